"""A pytest plugin that fails the run on a skip that `allowed_skips.txt` does not expect.

Loaded by `.ci/run` with ``-p tests.skip_policy``. A line of the list is ``TEST-ID-PATTERN  reason in words``; the pattern is
a shell pattern on the test id. The summary line of pytest stays the last line; the exit code becomes 1.
"""

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ALLOWED = Path(__file__).with_name("allowed_skips.txt")


class SkipPolicy:
    """Collects skips of the whole run (with pytest-xdist: in the controlling process) and judges them at its end."""

    def __init__(self, allowed: list[str]) -> None:
        self._allowed = allowed
        self._unexpected: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._unexpected and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._unexpected:
            terminalreporter.section(f"skips that {ALLOWED.name} does not allow: this run fails", red=True)
            for test, reason in self._unexpected.items():
                terminalreporter.write_line(f"{test}: {reason}")

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        if not any(fnmatchcase(report.nodeid, pattern) for pattern in self._allowed):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._unexpected[report.nodeid] = reason


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        lines = [line.split("#")[0].strip() for line in ALLOWED.read_text(encoding="utf-8").splitlines()]
        config.pluginmanager.register(SkipPolicy([line.split()[0] for line in lines if line]))
