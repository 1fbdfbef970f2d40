"""The 3D view: the cube of ranks, each coloured by the operation it is in, the one that the others wait for marked, and why."""

from pathlib import Path
from typing import Any

import xxhash

from megascale_jax.observe.event_store import VIEW, read_events
from megascale_jax.observe.events import ANCHOR
from megascale_jax.observe.pulse import ALIVE
from megascale_jax.views.cube import LETTERS
from megascale_jax.views.dashboard.cube_scene import NONE, cube_bytes, ranges, scene_of
from megascale_jax.views.dashboard.packed import packed
from megascale_jax.views.dashboard.page import Page, Query, whole_number
from megascale_jax.views.dashboard.run_view import EVENTS, RunView

ROWS = 100
"""Ranks on a page of the table."""
LAST_EVENTS = 12
_STATES = list(LETTERS)


def _context(run: RunView, query: Query) -> dict[str, Any]:
    found = run.progress
    if not found:
        return {"scene": found}
    scene = scene_of(*found)
    judgement = scene.judgement
    asked = whole_number(query, "rank", most=1 << 24)
    rank = asked if asked is not None else next(iter((*judgement.named, *judgement.suspects)), None)
    state = None if rank is None else scene.state(rank)
    ranks = sorted(judgement.ranks, key=lambda one: (_STATES.index(one.state), one.rank))
    last_page = max(len(ranks) - 1, 0) // ROWS
    table_page = min(whole_number(query, "page", most=1 << 24) or 0, last_page)
    return {
        "scene": scene,
        "version": xxhash.xxh64_hexdigest(cube_bytes(scene)),
        "rank": rank,
        "state": state,
        "places": () if state is None else scene.places(state.rank),
        "peers": {} if state is None else scene.peers(state.rank),
        "events": () if state is None else run.known(("last events", state.rank), lambda: _last_events(run.folder, state.rank), EVENTS),
        "ranges": ranges,
        "none": NONE,
        "rows": ranks[table_page * ROWS : (table_page + 1) * ROWS],
        "num_ranks": len(ranks),
        "table_page": table_page,
        "last_page": last_page,
    }


def _cube(run: RunView, query: Query) -> bytes:
    found = run.progress
    return cube_bytes(scene_of(*found)) if found else packed({"missing": found.why})


def _last_events(run: Path, rank: int) -> list[dict[str, Any]]:
    """The newest spans and instants of a rank's main thread, without its clock and its pulse, the newest first."""
    with read_events(run, ranks={rank}) as store:
        return store.sql(
            f"select unix_ns / 1e9 as at_s, name, step, duration_ns / 1e9 as lasted_s, is_instant, text from {VIEW} "
            f"where role = 'trainer' and device < 0 and name not in ('{ANCHOR}', '{ALIVE}') order by unix_ns desc limit {LAST_EVENTS}"
        ).to_pylist()


CUBE = Page("cube", "3D view", "cube.html", _context, data={"cube": _cube}, scripts=("packed.js", "cube.js"))
