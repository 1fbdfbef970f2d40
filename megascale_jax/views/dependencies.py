"""Which operation waited for which: the graph behind a table of operations, built from the table alone.

A worker has lanes: one for computation, one for each direction of sending and of receiving, one for collectives. Within a lane operations
run in the order in which they started. Between lanes:

- a pass waits for that of the virtual stage before it and for the transfer that brings it, a backward pass for its forward pass,
  a send for its pass;
- a forward pass waits for the parameters of its chunk, the gradients of a chunk for the last backward pass of that chunk before them;
- a *barrier*, which is a collective of no single chunk or the optimizer, waits for all that its worker began before, and
  computation and collectives after it wait for it.

Operations that need each other *meet*: both ends of a transfer, all members of a collective. None begins to move data before
all of them are there. Steps are separate: each begins when its first operation may.

A receive waits for its sender, for earlier receives, and for the pass of its own direction that ended before it, whose buffer it may
need; not for the other direction's: what the step would be without gaps that nobody needed. After Lin et al., "Understanding
Stragglers in Large Model Training Using What-if Analysis", OSDI '25; the published replays of two traces have the same times
(docs/analysis.md).

Failure case: a transfer without its other end, or a collective that lacks a member, is refused by name: times replayed without it
would be too short.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megascale_jax.errors import TraceError
from megascale_jax.views.operations import CODES, COMPUTE, NONE, OPTYPES, SYNCS, TRANSFERS, Operations

_COMPUTE_LANE, _SYNC_LANE = 0, 1 + len(TRANSFERS)
_LANE_OF = np.array([_COMPUTE_LANE] * len(COMPUTE) + list(range(1, _SYNC_LANE)) + [_SYNC_LANE] * len(SYNCS))
_LANES = _SYNC_LANE + 1
_CLOCK = 0.01
"""Fraction of a pass by which its end may seem to lie after what followed it."""


@dataclass(frozen=True)
class Graph:
    """Operations sorted by step, worker and start, and who waits for whom.

    Nodes ``0`` to ``n - 1`` are the rows of ``operations``; node ``n + g`` is meeting ``g``, which takes no time. ``before`` and
    ``after``: int64[edges], the node ``after[e]`` begins when ``before[e]`` has ended. ``meeting``: int64[n], `NONE` where a row
    meets nobody.
    """

    operations: Operations
    before: np.ndarray
    after: np.ndarray
    meeting: np.ndarray
    meetings: int


def build_graph(operations: Operations) -> Graph:
    """The graph of a table. Raises TraceError if an operation is there twice, or a peer or a worker is not."""
    table = operations.rows(
        np.lexsort((operations.optype, operations.end_s, operations.start_s, operations.worker, operations.step))  # last key first
    )
    rows = _Rows(table)
    _check_workers(rows)
    meeting = _meetings(rows)
    pairs = [*_lane_order(rows), *_barriers(rows), *_passes_and_transfers(rows), *_chunks(rows)]
    before, after = (np.concatenate(side) for side in zip(*pairs, strict=True))
    meets = np.flatnonzero(meeting != NONE)
    count = int(meeting.max(initial=NONE)) + 1
    target = np.where(meeting == NONE, np.arange(len(table)), len(table) + meeting)
    return Graph(
        operations=table,
        before=np.concatenate([before, target[meets]]),
        after=np.concatenate([target[after], meets]),
        meeting=meeting,
        meetings=count,
    )


def transfer_durations(graph: Graph) -> np.ndarray:
    """Seconds that each operation takes once nobody is waited for, float64[n].

    Computation: as recorded. Communication: from the start of the last to come of those that meet, to this one's own end.
    """
    table, meets = graph.operations, graph.meeting != NONE
    last = np.full(graph.meetings, -np.inf)
    np.maximum.at(last, graph.meeting[meets], table.start_s[meets])
    durations = table.duration_s.copy()
    durations[meets] = np.maximum(table.end_s[meets] - last[graph.meeting[meets]], 0.0)
    return durations


def _check_workers(rows: "_Rows") -> None:
    """Raise TraceError unless every worker of the mesh has operations in every step."""
    size, steps = rows.table.layout.mesh.size, int(rows.step[-1]) + 1
    by_step = np.bincount(rows.step[np.flatnonzero(np.diff(rows.segment, prepend=-1))], minlength=steps)
    if (lacks := by_step != size).any():
        step = rows.table.step[np.searchsorted(rows.step, lacks.argmax())]
        raise TraceError(
            f"step {step} has operations of {by_step[lacks.argmax()]} workers, the layout has {size}; trace all of them, or choose "
            "whole steps with --steps"
        )


class _Rows:
    """Columns of a sorted table that all rules need; ``segment`` numbers its (step, worker) pairs.

    ``unit`` is the same for operations of one micro-batch in one chunk of a worker in a step; ``border`` is one more in the next
    virtual stage.
    """

    def __init__(self, table: Operations) -> None:
        self.table, self.count = table, len(table)
        self.lane = _LANE_OF[table.optype]
        self.segment = _numbered((table.step, table.worker))
        self.step = _numbered((table.step,))
        is_sync = table.is_of(*SYNCS)
        self.is_barrier = table.is_of("optimizer") | (is_sync & (table.chunk == NONE))
        chunks, pipes, count = table.layout.chunks, table.layout.mesh.pipe, table.microbatch.max() + 1
        self.segment_chunk = self.segment * chunks + table.chunk
        self.unit = self.segment_chunk * count + table.microbatch
        # Between the virtual stages of two micro-batches lies one that nobody has, so that a neighbour's number never is another's.
        micro_batch = _numbered((table.step, table.data, table.tensor)) * count + table.microbatch
        self.border = micro_batch * (chunks * pipes + 1) + table.chunk * pipes + table.pipe

    def of(self, *optypes: str) -> np.ndarray:
        """Rows of these types, ascending."""
        return np.flatnonzero(self.table.is_of(*optypes))

    def check_unique(self, found: np.ndarray) -> None:
        """Raise TraceError if two of these rows, of one type, are of the same step, worker, micro-batch and chunk."""
        order = found[np.argsort(self.unit[found], kind="stable")]
        if (twice := self.unit[order][1:] == self.unit[order][:-1]).any():
            raise TraceError(f"{self.name(int(order[1:][twice][0]))} is there twice; expected each operation once a step")

    def name(self, row: int) -> str:
        """A row in words."""
        table = self.table
        unit = f" of micro-batch {table.microbatch[row]}, chunk {table.chunk[row]}" if table.microbatch[row] != NONE else ""
        return f"step {table.step[row]}, rank {table.rank[row]}: {OPTYPES[table.optype[row]]}{unit}"


Pair = tuple[np.ndarray, np.ndarray]
"""Rows that are waited for, and those that wait."""


def _lane_order(rows: _Rows) -> list[Pair]:
    key = rows.segment * _LANES + rows.lane
    order = np.argsort(key, kind="stable")
    same = key[order][1:] == key[order][:-1]
    return [(order[:-1][same], order[1:][same])]


def _barriers(rows: _Rows) -> list[Pair]:
    """A barrier waits for the last row of every lane before it; what comes after, transfers excepted, for the last barrier."""
    barriers = np.flatnonzero(rows.is_barrier)
    pairs = [_latest_before(rows, np.flatnonzero(rows.lane == lane), barriers, rows.segment) for lane in range(_LANES)]
    others = np.flatnonzero((rows.lane == _COMPUTE_LANE) | (rows.lane == _SYNC_LANE))
    return [*pairs, _latest_before(rows, barriers, others, rows.segment)]


def _passes_and_transfers(rows: _Rows) -> list[Pair]:
    """A pass waits for that of the virtual stage before it and for its receive, backward for forward, a send for its pass."""
    pairs = []
    for direction, back in (("forward", 1), ("backward", -1)):
        passes, receives, sends = (rows.of(name) for name in (direction, f"{direction}-recv", f"{direction}-send"))
        for kind in (passes, receives, sends):
            rows.check_unique(kind)
        pairs += [
            _equal(rows.border, passes, rows.border - back, passes),
            (receives, _own_pass(rows, passes, receives)),
            (_own_pass(rows, passes, sends), sends),
            _pass_before(rows, passes, receives),
        ]
    return [*pairs, _equal(rows.unit, rows.of("forward"), rows.unit, rows.of("backward"))]


def _own_pass(rows: _Rows, passes: np.ndarray, transfers: np.ndarray) -> np.ndarray:
    """The pass that each transfer brings input to or carries the result of. Raises TraceError where there is none."""
    own, found = _equal(rows.unit, passes, rows.unit, transfers)
    if found.size != transfers.size:
        raise TraceError(f"{rows.name(int(np.setdiff1d(transfers, found)[0]))} has no pass that it belongs to; the trace lacks operations")
    return own


def _pass_before(rows: _Rows, passes: np.ndarray, receives: np.ndarray) -> Pair:
    """The pass of the same direction that a receive came after, if it had ended: one that overlaps had a buffer of its own."""
    before, after = _latest_before(rows, passes, receives, rows.segment)
    ended = rows.table.end_s[before] <= rows.table.start_s[after] + _CLOCK * rows.table.duration_s[before]
    return before[ended], after[ended]


def _chunks(rows: _Rows) -> list[Pair]:
    """Parameters before the first pass that reads them, gradients after the last that adds to them."""
    forward, backward = rows.of("forward"), rows.of("backward", "weight-gradient")
    with_chunk = rows.table.chunk != NONE
    params, grads = (found[with_chunk[found]] for found in (rows.of("params-sync"), rows.of("grads-sync")))
    return [
        _latest_before(rows, params, forward, rows.segment_chunk),
        _latest_before(rows, backward, grads, rows.segment_chunk),
    ]


def _latest_before(rows: _Rows, sources: np.ndarray, queries: np.ndarray, key: np.ndarray) -> Pair:
    """For each query, the last source of the same key that lies before it; queries without one are left out."""
    places = np.sort(key[sources] * rows.count + sources)
    found = np.searchsorted(places, key[queries] * rows.count + queries) - 1
    exists = found >= 0
    found, queries = places[found[exists]], queries[exists]
    same = found // rows.count == key[queries]
    return found[same] % rows.count, queries[same]


def _equal(source_key: np.ndarray, sources: np.ndarray, query_key: np.ndarray, queries: np.ndarray) -> Pair:
    """For each query the one source whose key is its key; queries without one are left out."""
    order = sources[np.argsort(source_key[sources], kind="stable")]
    keys, wanted = source_key[order], query_key[queries]
    place = np.minimum(np.searchsorted(keys, wanted), keys.size - 1)
    same = keys[place] == wanted if keys.size else np.zeros(queries.size, bool)
    return order[place[same]], queries[same]


def _meetings(rows: _Rows) -> np.ndarray:
    """Number of each row's meeting, int64[n], `NONE` for computation. Raises TraceError where a member is missing."""
    table, mesh = rows.table, rows.table.layout.mesh
    meeting, count = np.full(rows.count, NONE), 0
    for direction in ("forward", "backward"):
        members = rows.of(f"{direction}-send", f"{direction}-recv")
        key = (rows.step, table.data, table.tensor, table.microbatch, _link(table, direction))
        count = _meet(rows, members, key, 2, meeting, count)
    for names, place, size in (
        (("params-sync", "grads-sync"), (table.pipe, table.tensor), mesh.data),
        (("tensor-sync",), (table.pipe, table.data), mesh.tensor),
        (("gradient-norm",), (), mesh.size),
        (("embedding-sync",), (table.data, table.tensor), min(mesh.pipe, 2)),
    ):
        for name in names:
            members = rows.of(name)
            turn = _turn(rows.segment_chunk[members])
            spread = np.zeros(rows.count, np.int64)
            spread[members] = turn
            count = _meet(rows, members, (rows.step, *place, table.chunk, spread), size, meeting, count)
    return meeting


def _link(table: Operations, direction: str) -> np.ndarray:
    """The virtual stage below the border that a transfer crosses: the same number at both of its ends."""
    virtual = table.chunk * table.layout.mesh.pipe + table.pipe
    upper = "forward-recv" if direction == "forward" else "backward-send"
    return np.where(table.optype == CODES[upper], virtual - 1, virtual)


def _meet(rows: _Rows, members: np.ndarray, key: Sequence[np.ndarray], size: int, meeting: np.ndarray, count: int) -> int:
    """Number the meetings of ``members`` from ``count`` on, into ``meeting``; the number after the last."""
    if not members.size:
        return count
    number = _numbered([column[members] for column in key])
    sizes = np.bincount(number)
    if (wrong := sizes[number] != size).any():
        row = int(members[wrong.argmax()])
        raise TraceError(
            f"{rows.name(row)} has {sizes[number][wrong.argmax()] - 1} peers, expected {size - 1}; the trace lacks operations or workers. "
            "Choose whole steps with --steps, or trace every worker"
        )
    meeting[members] = count + number
    return count + sizes.size


def _numbered(columns: Sequence[np.ndarray]) -> np.ndarray:
    """A dense number for each distinct tuple of values, in their order."""
    number = np.zeros(columns[0].size, np.int64)
    for column in columns:
        values = np.unique(column, return_inverse=True)
        number = np.unique(number * values[0].size + values[1], return_inverse=True)[1]
    return number


def _turn(keys: np.ndarray) -> np.ndarray:
    """How many equal keys came before each."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    first = np.concatenate([[0], np.flatnonzero(ordered[1:] != ordered[:-1]) + 1]) if keys.size else np.zeros(0, np.int64)
    starts = np.repeat(first, np.diff(np.append(first, keys.size)))
    turn = np.empty(keys.size, np.int64)
    turn[order] = np.arange(keys.size) - starts
    return turn
