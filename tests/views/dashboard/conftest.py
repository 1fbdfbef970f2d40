"""A browser for all tests of a process, and servers for one test each."""

from contextlib import contextmanager

import pytest

from megascale_jax.views.dashboard.app import make_app
from megascale_jax.views.dashboard.guard import Guard
from megascale_jax.views.dashboard.pages import PAGES
from megascale_jax.views.dashboard.run_view import RunView
from megascale_jax.views.dashboard.server import bound, served
from tests.views.dashboard import browser as chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """A headless Chromium; without one its tests skip."""
    if chromium.program() is None:
        pytest.skip("Chromium is not installed; apt-get install chromium")
    with chromium.started(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture
def dashboard():
    """Serves a run, a folder or a `RunView`: ``with dashboard(run) as url``."""

    @contextmanager
    def serving(run, guard=None, pages=PAGES, security=None):
        view = run if isinstance(run, RunView) else RunView(run)
        try:
            with served(make_app(view, guard or Guard(), pages), bound("127.0.0.1", 0), security) as url:
                yield url
        finally:
            view.close()

    return serving
