"""Slowdowns by hand and against the published ones."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_jax.config.layout import MeshShape
from megascale_jax.errors import TraceError
from megascale_jax.parallel.pipeline.schedule import Schedule
from megascale_jax.views import what_if as module
from megascale_jax.views.operations import NONE, TraceLayout
from megascale_jax.views.straggler_trace import OPTYPE_OF, read_straggler_trace
from megascale_jax.views.what_if import WhatIf
from tests.views.made_trace import made_trace, table
from tests.views.public_traces import published, trace_file


def two_replicas(first: float, second: float) -> WhatIf:
    rows = []
    for data, work in ((0, first), (1, second)):
        rows += [
            (0, 0, data, 0, "backward", 0, 0, 0.0, work),
            (0, 0, data, 0, "grads-sync", NONE, 0, work, max(first, second) + 0.5 - work),
        ]
    return WhatIf(table(rows, TraceLayout(MeshShape(1, 2, 1))))


def test_two_replicas_by_hand():
    found = two_replicas(1.0, 3.0)
    assert found.real_s.tolist() == [3.5] and found.ideal_s.tolist() == [2.5], "backward: the mean of 1 and 3; sync: 0.5"
    assert found.slowdown == pytest.approx(1.4) and found.gaps == pytest.approx(1.0)
    slow, fast = found.workers
    assert (slow.rank, slow.slowdown, slow.explained) == (1, pytest.approx(1.4), pytest.approx(1.0))
    assert (fast.rank, fast.slowdown, fast.explained) == (0, pytest.approx(1.0), pytest.approx(0.0))
    assert found.optypes["backward"].slowdown == pytest.approx(1.4) and found.optypes["grads-sync"].slowdown == pytest.approx(1.0)


def test_equal_replicas_have_nothing_to_explain():
    found = two_replicas(2.0, 2.0)
    assert found.slowdown == pytest.approx(1.0)
    assert all(worker.explained == 0.0 for worker in found.workers)


def test_operations_without_time_are_refused():
    with pytest.raises(TraceError, match="step 0: all operations take no time"):
        _ = two_replicas(0.0, 0.0).with_durations(np.zeros(4)).slowdown


def test_one_slow_transfer_does_not_move_the_ideal():
    made = made_trace(Schedule(2, 1, 8), noise=0, scale=lambda o, p, d, s, m: 100 if (o, d, s, m) == ("forward-recv", 0, 0, 0) else 1)
    found = WhatIf(made)
    assert found.ideal[found.operations.is_of("forward-recv")].max() == pytest.approx(2e-4)
    assert found.slowdown > 1.01 and found.optypes["forward-recv"].explained == pytest.approx(1.0)


def test_many_workers_are_judged_by_stage_and_replica(monkeypatch):
    made = made_trace(Schedule(2, 2, 4), steps=1, scale=lambda o, p, d, s, m: 1.5 if (p, d) == (1, 2) else 1)
    exact = WhatIf(made).workers
    monkeypatch.setattr(module, "EXACT_WORKERS", 7)
    estimated = WhatIf(made).workers
    assert estimated[0].rank == exact[0].rank == 6 and estimated[0].explained is None
    assert {worker.rank for worker in estimated} == set(range(8))
    assert estimated[0].slowdown == pytest.approx(exact[0].slowdown, rel=0.02)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 0.3))
def test_ideal_lies_between_the_fastest_and_the_slowest_of_each_type(seed, noise):
    found = WhatIf(made_trace(Schedule(2, 2, 4), data=2, steps=1, noise=noise, seed=seed))
    fastest, slowest = found.real.copy(), found.real.copy()
    for code in np.unique(found.operations.optype):
        rows = found.operations.optype == code
        fastest[rows], slowest[rows] = found.real[rows].min(), found.real[rows].max()
    assert found.total(fastest) <= found.ideal_s.sum() * (1 + 1e-12)
    assert found.ideal_s.sum() <= found.total(slowest) * (1 + 1e-12)
    assert found.real_s.sum() <= found.total(slowest) * (1 + 1e-12)


@pytest.fixture(scope="module", params=["SE", "ST"])
def public(request) -> tuple[WhatIf, dict, dict]:
    found = WhatIf(read_straggler_trace(trace_file(request.param)))
    return found, published(request.param), published(request.param, "ms")


def test_slowdown_is_the_published_one(public):
    found, results, _ = public
    assert found.slowdown == pytest.approx(results["blocking_slowdown"], rel=1e-6)
    assert found.gaps == pytest.approx(results["launch_slowdown"], rel=1e-6)


def test_every_step_is_the_published_one(public):
    found, results, _ = public
    for times, name in ((found.recorded_s, "base"), (found.real_s, "nodelay"), (found.ideal_s, "noblk")):
        theirs = results[f"step_t_{name}"]
        assert [str(step) for step in found.steps] == list(theirs)
        np.testing.assert_allclose(times, list(theirs.values()), rtol=1e-6)


def test_parts_are_the_published_ones(public):
    found, results, last_stage = public
    for pipe, part in found.stages.items():
        assert part.slowdown == pytest.approx(results["blocking_decompose_by_stage"][str(pipe)], rel=1e-6)
    for data in range(found.operations.layout.mesh.data):
        theirs = results["blocking_decompose_by_dp_rank"][str(data)]
        assert found.alone(found.operations.data == data) == pytest.approx(theirs, rel=1e-6)
    for name, theirs in results["blocking_decompose_by_optype"].items():
        if name in OPTYPE_OF:
            assert found.optypes[OPTYPE_OF[name]].slowdown == pytest.approx(theirs, rel=1e-6)
        else:
            direction = name.split("-")[0]
            transfers = found.operations.is_of(f"{direction}-send", f"{direction}-recv")
            assert found.alone(transfers) == pytest.approx(theirs, rel=1e-6)
    assert found.stages[max(found.stages)].explained == pytest.approx(last_stage["Ms"], rel=1e-6)
