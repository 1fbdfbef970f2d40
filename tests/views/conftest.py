"""What several views are tried on."""

import pytest

from tests.views.fake_job import Job


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Writers of a job's processes on a clock of its own (`fake_job.py`)."""
    return Job(tmp_path, monkeypatch)
