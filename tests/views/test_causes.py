"""The one rule that names causes: right on the public traces and on made ones, and silent where there is only noise."""

from collections.abc import Iterator

import numpy as np
import pytest

from megascale_jax.parallel.pipeline.schedule import Schedule
from megascale_jax.views.causes import Findings, find_causes, split_loss
from megascale_jax.views.effects import lower_medians
from megascale_jax.views.straggler_trace import read_straggler_trace
from megascale_jax.views.what_if import WhatIf
from tests.views.made_trace import made_trace
from tests.views.public_traces import trace_file

PASSES = ("forward", "backward")
SCHEDULE = Schedule(4, 2, 8)


def causes_of(scale, schedule=SCHEDULE, **options) -> Findings:
    return find_causes(WhatIf(made_trace(schedule, scale=scale, **options)))


def kinds(findings: Findings) -> list[str]:
    return [cause.kind for cause in findings.causes]


def work(optype: str, pipe: int) -> float:
    """The last stage has a third more to do, by design."""
    return 4 / 3 if optype in PASSES and pipe == 3 else 1.0


@pytest.mark.parametrize(("name", "first"), [("SE", "sequence"), ("ST", "stage")])
def test_the_public_traces_have_their_published_cause_first(name, first):
    findings = find_causes(WhatIf(read_straggler_trace(trace_file(name))))
    assert findings.causes[0].kind == first and findings.causes[0].share > 0.6
    assert "worker" not in kinds(findings) and not findings.slow_workers
    assert sum(cause.share for cause in findings.causes) + findings.unexplained == pytest.approx(1.0)
    if name == "ST":
        assert findings.causes[0].pipe == 3
    else:
        assert findings.causes[1].kind == "stage" and findings.causes[1].share > 0.15, "sequences go first: stages keep what is theirs"


def windows_with_noise(scale, count=200) -> Iterator[Findings]:
    """Windows of one job with 5 % noise on every operation, new in each; the graph is the same."""
    what_if, draw = WhatIf(made_trace(SCHEDULE, noise=0, scale=scale)), np.random.default_rng(5)
    for _ in range(count):
        yield find_causes(what_if.with_durations(what_if.real * (1 + 0.05 * draw.standard_normal(what_if.real.size))))


def test_no_cause_in_200_windows_of_noise():
    for findings in windows_with_noise(lambda *_: 1.0):
        assert findings.causes == () and findings.slow_workers == ()


def test_no_worker_in_200_windows_of_a_job_whose_last_stage_has_more_work():
    for findings in windows_with_noise(lambda o, p, *_: work(o, p)):
        assert kinds(findings) == ["stage"] and findings.causes[0].pipe == 3 and findings.slow_workers == ()


def test_a_last_stage_with_more_work_is_the_stage():
    findings = causes_of(lambda o, p, *_: work(o, p))
    assert kinds(findings) == ["stage"] and findings.causes[0].pipe == 3 and findings.causes[0].share > 0.7
    assert findings.causes[0].excess == pytest.approx({"forward": 4 / 3 / (13 / 12) - 1, "backward": 4 / 3 / (13 / 12) - 1}, abs=0.02)


@pytest.mark.parametrize("seed", range(5))
def test_a_worker_slow_in_backward_is_named_with_it(seed):
    findings = causes_of(lambda o, p, d, *_: 1.15 if (o, p, d) == ("backward", 3, 2) else 1, seed=seed)
    assert kinds(findings) == ["worker"]
    cause = findings.causes[0]
    assert cause.ranks == (14,) and (cause.pipe, cause.data) == (3, 2) and list(cause.excess) == ["backward"]
    assert cause.excess["backward"] == pytest.approx(0.15, abs=0.04) and cause.share > 0.5


@pytest.mark.parametrize("other", [2, 5])
def test_two_workers_that_are_slow_alike_share_what_both_cost(other):
    """Without one of them the step is as slow as before."""
    findings = causes_of(lambda o, p, d, *_: 1.3 if (o, p) == ("backward", 1) and d in (0, other) else 1, data=8)
    assert [(cause.kind, *cause.ranks) for cause in sorted(findings.causes, key=lambda cause: cause.ranks)] == [
        ("worker", 8),
        ("worker", 8 + other),
    ]
    assert not findings.hidden_workers and all(cause.share > 0.2 for cause in findings.causes)
    assert sum(cause.share for cause in findings.causes) + findings.unexplained == pytest.approx(1.0)


def test_a_loss_is_split_by_what_each_costs_alone():
    assert split_loss(0.3, [0.3, 0.1, 0.005]) == pytest.approx([0.3 * 60 / 81, 0.3 * 20 / 81, 0])
    assert split_loss(0.012, [0.006, 0.006]) == pytest.approx([0.006, 0.006]), "none is small beside the others"
    assert split_loss(0.02, [0, -1e-9]) == pytest.approx([0.01, 0.01]), "neither costs anything alone"


def test_with_few_passes_no_worker_is_judged():
    findings = causes_of(lambda o, p, d, *_: 2.0 if (o, p, d) == ("backward", 1, 1) else 1, Schedule(2, 1, 4), data=2, steps=3)
    assert findings.slow_workers == ()
    findings = causes_of(lambda o, p, d, *_: 2.0 if (o, p, d) == ("backward", 1, 1) else 1, Schedule(2, 1, 4), data=2, steps=4)
    assert [slow.rank for slow in findings.slow_workers] == [3]


def test_a_slow_worker_that_nothing_waits_for_is_told_but_no_cause():
    """Stage 0 is 12 % slower in one replica, but the last stage has twice the work."""
    findings = causes_of(lambda o, p, d, *_: 2.0 if p == 3 and o in PASSES else 1.12 if (o, p, d) == ("forward", 0, 1) else 1)
    assert kinds(findings)[0] == "stage"
    assert [(slow.rank, slow.optype) for slow in findings.slow_workers] == [(1, "forward")]


def test_uneven_sequences_are_the_sequences():
    lengths = np.random.default_rng(3).lognormal(0, 0.25, (2, 4, 8))
    findings = causes_of(lambda o, p, d, s, m: lengths[s, d, m] if o in PASSES else 1)
    assert kinds(findings) == ["sequence"] and findings.causes[0].share > 0.6


def test_a_replica_with_longer_sequences_is_no_slow_worker():
    findings = causes_of(lambda o, p, d, *_: 1.3 if d == 2 and o in PASSES else 1)
    assert kinds(findings) == ["sequence"] and not findings.slow_workers


def test_a_stage_that_slows_with_the_hour_is_no_sequence():
    """One worker's passes vary widely, its neighbours' do not: stages do not agree."""
    draw = np.random.default_rng(4)
    findings = causes_of(lambda o, p, *_: draw.lognormal(0, 0.3) if p == 1 and o in PASSES else 1)
    assert "sequence" not in kinds(findings) and "worker" not in kinds(findings)


def test_three_causes_at_once_are_told_apart():
    lengths = np.random.default_rng(3).lognormal(0, 0.25, (2, 4, 8))

    def scale(o, p, d, s, m):
        return work(o, p) * (lengths[s, d, m] if o in PASSES else 1) * (1.3 if (o, p, d) == ("backward", 1, 2) else 1)

    findings = causes_of(scale)
    assert sorted(kinds(findings)) == ["sequence", "stage", "worker"]
    assert [cause.ranks for cause in findings.causes if cause.kind == "worker"] == [(6,)]
    assert sum(cause.share for cause in findings.causes) + findings.unexplained == pytest.approx(1.0)
    assert [cause.share for cause in findings.causes] == sorted((cause.share for cause in findings.causes), reverse=True)


def test_tensor_peers_in_lock_step_are_one_cause():
    findings = causes_of(lambda o, p, d, *_: 1.2 if (o, p, d) == ("backward", 3, 0) else 1, tensor=2)
    assert [(cause.kind, cause.ranks) for cause in findings.causes] == [("worker", (24, 25))]


def test_a_pipeline_of_one_replica_blames_its_stage_not_the_worker():
    findings = causes_of(lambda o, p, *_: 1.3 if p == 2 and o in PASSES else 1, data=1)
    assert kinds(findings) == ["stage"] and findings.causes[0].pipe == 2


def test_a_job_without_a_pipeline_has_slow_workers_too():
    findings = causes_of(lambda o, p, d, *_: 1.15 if d == 1 and o in PASSES else 1, Schedule(1, 1, 16))
    assert [(cause.kind, cause.ranks) for cause in findings.causes] == [("worker", (1,))]
    assert set(findings.causes[0].excess) == set(PASSES)


def test_a_network_that_flaps_is_its_operation_type():
    findings = causes_of(lambda o, p, d, s, m: 30 if o == "grads-sync" and s == 1 else 1)
    assert kinds(findings) == ["optype"] and findings.causes[0].optype == "grads-sync"


def test_lower_median_takes_the_lesser_of_two():
    keys, medians, place = lower_medians(np.array([5, 3, 5, 3, 3]), np.array([2.0, 9.0, 1.0, 7.0, 8.0]))
    assert keys.tolist() == [3, 5] and medians.tolist() == [8.0, 1.0] and place.tolist() == [1, 0, 1, 0, 0]
