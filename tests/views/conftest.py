"""What several views are tried on."""

import pytest

from tests.views.fake_job import writers


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Writers of a job's processes on a clock of its own (`fake_job.py`)."""
    return writers(tmp_path, monkeypatch)
