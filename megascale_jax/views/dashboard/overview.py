"""The first page: what the run is and how it goes."""

from typing import Any

from megascale_jax.views.dashboard.page import Page, Query
from megascale_jax.views.dashboard.run_view import RunView


def _context(run: RunView, query: Query) -> dict[str, Any]:
    return {"progress": run.progress, "record": run.record, "status": run.status}


OVERVIEW = Page("", "Overview", "overview.html", _context)
