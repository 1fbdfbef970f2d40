"""The report: one file that needs nothing else, the same for the same run, of any run."""

import re
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from megascale_jax.cli.main import app
from megascale_jax.errors import UsageError
from megascale_jax.views.dashboard.report import report_html
from megascale_jax.views.dashboard.run_view import RunView
from megascale_jax.views.step_times import read_step_times
from tests.views.dashboard import driven, runs

NOW = 1.8e9
MOST_BYTES = 2_000_000


def report(folder, now=NOW):
    view = RunView(folder, patience_s=60)
    try:
        return report_html(view, now).decode()
    finally:
        view.close()


class Elements(HTMLParser):
    """Every element with its attributes; whether all are closed in order."""

    VOID = frozenset({"meta", "img", "br", "input", "link"})

    def __init__(self, html):
        super().__init__()
        self.found, self.open = [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check(html):
    """It is whole, and asks for nothing and runs nothing."""
    assert html.startswith("<!doctype html>") and len(html.encode()) < MOST_BYTES
    parsed = Elements(html)
    assert parsed.open == []
    for tag, attributes in parsed.found:
        assert tag not in ("script", "iframe", "link", "object", "form"), tag
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert name != "src" or value.startswith("data:image/png;base64,")
            assert name != "href" or value.startswith("#")
    assert "\u202e" not in html and "\x1b" not in html


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = driven.driven(tmp_path_factory.mktemp("report") / "run")
    return folder, report(folder)


def test_a_report_tells_everything_in_one_file(whole):
    _, html = whole
    check(html)
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html))
    for words in (
        "all 200 steps are done", "Incident 1 at step 13", "anna and ben ordered: evict node-1", "counted as training",
        "no device stands out", "Log of node-2", "global_batch_size", "this report", "made 2027-01-15",
    ):  # fmt: skip
        assert words in text, words
    assert "data:image/png;base64," in html and html.count("<svg") > 8


def test_the_same_run_gives_the_same_file_but_for_ages(whole):
    folder, html = whole
    later = report(folder, NOW + 86400 * 40)
    ages = r"\d+ d \d+ h|2027-\d+-\d+ [\d:]+ UTC"
    assert re.sub(ages, "", later) == re.sub(ages, "", html)


@pytest.mark.parametrize("name", ["hanging", "empty", "broken"])
def test_every_run_has_a_report_which_says_what_is_missing(tmp_path, name):
    html = report(getattr(runs, name)(tmp_path / "run"))
    check(html)
    if name == "hanging":
        assert "rank 5" in html and "first behind" in html and "stuck" in html
    if name == "broken":
        assert "journal.sqlite cannot be read" in html and "nothing tells what its processes do" in html
    if name == "empty":
        assert "never driven" in html and "not begun" in html


def test_whatever_is_written_in_a_run_is_text(tmp_path):
    html = report(driven.driven(tmp_path / "<img src=x onerror=alert(1)>", is_hostile=True, steps=range(1, 3)))
    check(html)
    assert "&lt;script&gt;" in html and "\\u202e" in html and "\\x1b" not in html.partition("<body")[0]
    check(report(runs.hostile(tmp_path / "other" / "run")))


def test_the_slowest_step_with_details_is_drawn(tmp_path):
    folder = driven.trained(tmp_path / "run", steps=range(1, 8))
    html = report(folder)
    number = int(re.search(r"Step (\d+), attempt 0", html).group(1))
    times = read_step_times(folder)
    assert number == times.steps[times.whole.reshape(times.steps.size, -1).max(axis=1).argmax()]


def test_of_many_units_a_report_stays_small(tmp_path):
    html = report(driven.trained(tmp_path / "run", grid=(8, 3, 24, 1), tensor=1, steps=[1]))
    check(html)
    assert html.count("<rect") < 8_000


def test_the_command_writes_it(tmp_path):
    folder, out = driven.trained(tmp_path / "run", steps=[1]), tmp_path / "out.html"
    done = CliRunner().invoke(app, ["report", str(folder), "--output", str(out)])
    assert done.exit_code == 0 and "out.html" in done.output
    check(out.read_text())
    for arguments, words in ((["nowhere"], "no folder"), ([str(folder), "--output", str(tmp_path / "no" / "x.html")], "does not exist")):
        refused = CliRunner().invoke(app, ["report", *arguments])
        assert isinstance(refused.exception, UsageError) and words in str(refused.exception)
