"""The graph of operations: hand-made tables with times computed by hand, other ways to the same numbers, and what is refused."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_jax.config.layout import MeshShape
from megascale_jax.errors import TraceError
from megascale_jax.parallel.pipeline.schedule import Schedule
from megascale_jax.views.dependencies import build_graph, transfer_durations
from megascale_jax.views.operations import NONE, OPTYPES, Operations, TraceLayout
from megascale_jax.views.replay import Replay
from tests.views.made_trace import made_trace, table

TWO_STAGES = TraceLayout(MeshShape(2, 1, 1))
ROUND_TRIP = [
    (0, 0, 0, 0, "forward", 0, 0, 0.0, 1.0),
    (0, 0, 0, 0, "forward-send", 0, 0, 1.0, 0.5),
    (0, 1, 0, 0, "forward-recv", 0, 0, 0.0, 1.5),
    (0, 1, 0, 0, "forward", 0, 0, 1.5, 2.0),
    (0, 1, 0, 0, "backward", 0, 0, 3.5, 3.0),
    (0, 1, 0, 0, "backward-send", 0, 0, 6.5, 0.25),
    (0, 0, 0, 0, "backward-recv", 0, 0, 1.0, 5.75),
    (0, 0, 0, 0, "backward", 0, 0, 6.75, 4.0),
]
PIPELINE = build_graph(made_trace(Schedule(3, 2, 6), data=2, steps=2))
"""Interleaved 1F1B of three stages with two chunks."""


def replayed(operations: Operations) -> np.ndarray:
    graph = build_graph(operations)
    return Replay(graph).times(transfer_durations(graph))


def test_a_round_trip_takes_the_sum_of_its_operations_without_the_waiting():
    graph = build_graph(table(ROUND_TRIP, TWO_STAGES))
    durations = transfer_durations(graph)
    by_name = dict(zip(((graph.operations.pipe[i], OPTYPES[c]) for i, c in enumerate(graph.operations.optype)), durations, strict=True))
    assert by_name[1, "forward-recv"] == 0.5, "one second of it was spent waiting for the sender"
    assert by_name[0, "backward-recv"] == 0.25
    assert Replay(graph).times(durations) == pytest.approx([1 + 0.5 + 2 + 3 + 0.25 + 4])


def test_order_of_rows_means_nothing():
    shuffled = table(ROUND_TRIP, TWO_STAGES).rows(np.array([5, 2, 7, 0, 3, 6, 1, 4]))
    assert replayed(shuffled) == pytest.approx([10.75])


def test_members_of_a_collective_wait_for_the_last_and_not_for_each_others_waiting():
    rows = []
    for data, work in ((0, 1.0), (1, 3.0)):
        rows += [(7, 0, data, 0, "backward", 0, 0, 0.0, work), (7, 0, data, 0, "grads-sync", NONE, 0, work, 3.5 - work)]
    graph = build_graph(table(rows, TraceLayout(MeshShape(1, 2, 1))))
    assert transfer_durations(graph).tolist() == [1.0, 0.5, 3.0, 0.5]
    assert Replay(graph).times(np.array([1.0, 0.5, 0.5, 0.5])) == pytest.approx([1.5])


def test_a_late_receive_costs_nothing_when_its_sender_was_early():
    """Stage 1 posts its receive only after other work; a replay lets the data come as soon as it is sent."""
    rows = [row for row in ROUND_TRIP if not row[4].startswith("backward")]
    rows[2] = (0, 1, 0, 0, "forward-recv", 0, 0, 5.0, 0.5)
    rows[3] = (0, 1, 0, 0, "forward", 0, 0, 5.5, 2.0)
    rows[1] = (0, 0, 0, 0, "forward-send", 0, 0, 1.0, 4.5)
    assert replayed(table(rows, TWO_STAGES)) == pytest.approx([1 + 0.5 + 2])


@pytest.mark.parametrize(("posted_s", "step_s"), [(3.0, 1 + 2 + 0.5 + 2), (1.0, 1 + 2 + 2)])
def test_a_receive_waits_for_the_pass_before_it_unless_it_was_seen_to_overlap(posted_s, step_s):
    """Stage 1 works on the first of two micro-batches from second 1 to 3, and receives the second one after that, or meanwhile."""
    rows = [
        (0, 0, 0, 0, "forward", 0, 0, 0.0, 0.5),
        (0, 0, 0, 0, "forward-send", 0, 0, 0.5, 0.5),
        (0, 0, 0, 0, "forward", 1, 0, 0.5, 0.5),
        (0, 0, 0, 0, "forward-send", 1, 0, 1.0, posted_s - 0.5),
        (0, 1, 0, 0, "forward-recv", 0, 0, 0.0, 1.0),
        (0, 1, 0, 0, "forward", 0, 0, 1.0, 2.0),
        (0, 1, 0, 0, "forward-recv", 1, 0, posted_s, 0.5),
        (0, 1, 0, 0, "forward", 1, 0, max(posted_s + 0.5, 3.0), 2.0),
    ]
    assert replayed(table(rows, TWO_STAGES)) == pytest.approx([step_s])


def test_gradients_of_one_chunk_leave_while_another_is_still_computed_but_the_norm_waits_for_all():
    rows = [
        (0, 0, 0, 0, "backward", 0, 1, 0.0, 1.0),
        (0, 0, 0, 0, "grads-sync", NONE, 1, 1.0, 4.0),
        (0, 0, 0, 0, "backward", 0, 0, 1.0, 2.0),
        (0, 0, 0, 0, "grads-sync", NONE, 0, 5.0, 4.0),
        (0, 0, 0, 0, "gradient-norm", NONE, NONE, 9.0, 0.5),
        (0, 0, 0, 0, "optimizer", NONE, NONE, 9.5, 1.0),
    ]
    assert replayed(table(rows, TraceLayout(MeshShape(1, 1, 1), chunks=2))) == pytest.approx([1 + 4 + 4 + 0.5 + 1])


def test_parameters_of_a_chunk_are_awaited_by_its_own_passes_only():
    rows = [
        (0, 0, 0, 0, "params-sync", NONE, 0, 0.0, 1.0),
        (0, 0, 0, 0, "params-sync", NONE, 1, 1.0, 5.0),
        (0, 0, 0, 0, "forward", 0, 0, 1.0, 2.0),
        (0, 0, 0, 0, "forward", 0, 1, 6.0, 2.0),
    ]
    graph = build_graph(table(rows, TraceLayout(MeshShape(1, 1, 1), chunks=2)))
    ends = Replay(graph).ends(transfer_durations(graph))
    assert sorted(ends.tolist()) == [1.0, 3.0, 6.0, 8.0]


def test_stages_without_recorded_transfers_still_wait_for_each_other():
    rows = [row for row in ROUND_TRIP if row[4] in ("forward", "backward")]
    assert replayed(table(rows, TWO_STAGES)) == pytest.approx([1 + 2 + 3 + 4])


def test_steps_are_separate():
    rows = ROUND_TRIP + [(1, *row[1:7], 20 + 2 * row[7], 2 * row[8]) for row in ROUND_TRIP]
    assert replayed(table(rows, TWO_STAGES)) == pytest.approx([10.75, 21.5])


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row for row in ROUND_TRIP if row[4] != "forward-recv"], "forward-send of micro-batch 0, chunk 0 has 0 peers, expected 1"),
        ([*ROUND_TRIP, ROUND_TRIP[3]], "forward of micro-batch 0, chunk 0 is there twice"),
        ([row for row in ROUND_TRIP if row[:5] != (0, 1, 0, 0, "backward")], "backward-send .* has no pass that it belongs to"),
        ([row for row in ROUND_TRIP if row[1] == 0], "step 0 has operations of 1 workers, the layout has 2"),
    ],
)
def test_what_is_missing_or_there_twice_is_named(rows, words):
    with pytest.raises(TraceError, match=words):
        build_graph(table(rows, TWO_STAGES))


def test_a_circle_is_refused():
    """Each stage has run the backward pass before the forward pass that the other one waits for."""
    swapped = [(*row[:7], -row[7], row[8]) if row[4] in ("forward", "backward") else row for row in ROUND_TRIP]
    with pytest.raises(TraceError, match="wait for each other in a circle"):
        Replay(build_graph(table(swapped, TWO_STAGES))).times(np.ones(len(ROUND_TRIP)))


durations_of_pipeline = st.integers(0, 2**32 - 1).map(
    lambda seed: np.random.default_rng(seed).exponential(1.0, len(PIPELINE.operations)),
)


def plain_ends(durations: np.ndarray) -> np.ndarray:
    """Ends by visiting nodes one by one."""
    waits = defaultdict(list)
    for before, after in zip(PIPELINE.before.tolist(), PIPELINE.after.tolist(), strict=True):
        waits[after].append(before)
    ends: dict[int, float] = {}

    def end(node: int) -> float:
        if node not in ends:
            took = durations[node] if node < durations.size else 0.0
            ends[node] = took + max((end(other) for other in waits[node]), default=0.0)
        return ends[node]

    return np.array([end(node) for node in range(durations.size)])


@settings(max_examples=20, deadline=None)
@given(durations_of_pipeline)
def test_replay_is_the_longest_path(durations):
    np.testing.assert_allclose(Replay(PIPELINE).ends(durations), plain_ends(durations))


@settings(max_examples=50, deadline=None)
@given(durations_of_pipeline, st.data())
def test_a_slower_operation_never_makes_a_step_faster(durations, data):
    slower = durations.copy()
    slower[data.draw(st.integers(0, durations.size - 1))] += data.draw(st.floats(0, 10))
    replay = Replay(PIPELINE)
    assert (replay.times(slower) >= replay.times(durations)).all()


@settings(max_examples=50, deadline=None)
@given(durations_of_pipeline)
def test_a_step_is_no_shorter_than_the_work_of_any_worker(durations):
    made = PIPELINE.operations
    compute = made.is_of("forward", "backward", "optimizer")
    times = Replay(PIPELINE).times(durations)
    for worker in np.unique(made.worker):
        work = [durations[compute & (made.worker == worker) & (made.step == step)].sum() for step in (0, 1)]
        assert (times >= np.array(work) * (1 - 1e-12)).all()
    assert (times <= [durations[made.step == step].sum() * (1 + 1e-12) for step in (0, 1)]).all()


@pytest.mark.parametrize("shape", [(1, 3, 2), (2, 1, 4), (4, 2, 8)])
def test_a_made_trace_replays_as_recorded(shape):
    made = made_trace(Schedule(*shape), data=2, tensor=2, steps=2)
    recorded = [np.ptp(np.concatenate([made.start_s[rows], made.end_s[rows]])) for rows in (made.step == 0, made.step == 1)]
    assert replayed(made) == pytest.approx(recorded)


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("duration_s", -1.0, "duration_s is -1, expected 0 or more"),
        ("start_s", np.nan, "start_s is nan, expected a finite number"),
        ("pipe", 2, "pipe is 2, the layout has 0 to 1"),
        ("optype", 99, "optype is 99"),
        ("chunk", 1, "chunk is 1"),
        ("microbatch", 10**9, "microbatch is 1000000000"),
        ("microbatch", NONE, "forward without its micro-batch and chunk"),
    ],
)
def test_columns_that_contradict_the_layout_are_refused(column, value, words):
    made = table(ROUND_TRIP, TWO_STAGES)
    changed = getattr(made, column).copy()
    changed[0] = value
    with pytest.raises(TraceError, match=f"row 0: .*{words}"):
        Operations(**{name: getattr(made, name) for name in made.__dataclass_fields__} | {column: changed})


def test_columns_of_other_lengths_or_kinds_are_refused():
    made = table(ROUND_TRIP, TWO_STAGES)
    columns = {name: getattr(made, name) for name in made.__dataclass_fields__}
    with pytest.raises(TraceError, match="expected one value a row"):
        Operations(**columns | {"rank": made.rank[1:]})
    with pytest.raises(TraceError, match="column step holds float64, expected int64"):
        Operations(**columns | {"step": made.step + 0.5})
    with pytest.raises(TraceError, match="without operations"):
        made.rows(np.zeros(len(made), bool))
