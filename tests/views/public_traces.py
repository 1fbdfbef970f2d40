"""The public straggler traces: read where they lie, in ``../shared/data`` beside the project or where MEGASCALE_TEST_DATA says."""

import json
import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("MEGASCALE_TEST_DATA") or Path(__file__).parents[3] / "shared" / "data") / "straggler-traces"


def trace_file(name: str) -> Path:
    """A trace; the test skips where the traces are not."""
    if not FOLDER.is_dir():
        pytest.skip(f"the public straggler traces are not in {FOLDER}: nothing of others' data is part of this project")
    return FOLDER / f"trace-{name}.parquet"


def published(name: str, kind: str = "result") -> dict:
    """The published results of a trace."""
    return json.loads((FOLDER / f"{kind}-{name}.json").read_text(encoding="utf-8"))
