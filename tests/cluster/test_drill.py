"""How a drill judges what became of a fault, against a job whose statuses are made up; the faults themselves run in `megascale drill`."""

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megascale_jax.cluster import drill as drill_module
from megascale_jax.cluster.drill import Drill, compared, losses, summary
from megascale_jax.cluster.faults import KINDS, draw, flip_byte
from megascale_jax.cluster.injury import Fault, Injury, Job
from megascale_jax.errors import UsageError

SEATS = ["node-0", "node-1"]


def incident(number: int, began_s: float, named: list[str], **more: Any) -> dict[str, Any]:
    times = {name: began_s + 1.0 + index for index, name in enumerate(("suspended_s", "diagnosed_s", "replaced_s", "restored_s"))}
    return {
        "number": number,
        "began_s": began_s,
        "step": 9,
        "resumed_step": 5,
        "named": named,
        "evicted": [],
        "text": f"number {number}",
        **times,
        **more,
    }


class FakeJob:
    """Answers with the given incidents once the fault is there; trains on with every look."""

    proxy, power, has_small_disk, shrinks, flips_bits, compiles_anew, isolates = None, None, False, False, False, False, False

    def __init__(self, *incidents: dict[str, Any], observed: tuple[str, ...] = ()):
        self.folder, self.incidents, self.observed = Path("run"), incidents, observed
        self.steps, self.is_hurt, self.undone = itertools.count(1), False, 0

    def status(self) -> dict[str, Any]:
        step = next(self.steps)
        return {
            "phase": "running",
            "outcome": "",
            "step": step,
            "step_limit_s": 10.0,
            "seats": SEATS,
            "nodes": {name: {"status": "assigned", "processes": [{"pid": 1, "step_s": 0.5}]} for name in SEATS},
            "now_s": 100.0,
            "num_incidents": 0,
            "incidents": list(self.incidents) if self.is_hurt else [],
            "observed": [[101.0, text] for text in self.observed] if self.is_hurt else [],
        }

    def kill_driver(self) -> None:
        raise AssertionError

    def hurt(self, *nodes: str, **more: Any) -> Injury:
        self.is_hurt = True

        def undo() -> None:
            self.undone += 1

        return Injury(frozenset(nodes), undo, **more)


def hurts(job: FakeJob, **more: Any) -> Callable[[Job, dict[str, Any], str], Injury]:
    return lambda _, status, node: job.hurt(node, **more)


@pytest.fixture
def run(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(time, "sleep", lambda seconds: None)

    def run(job: FakeJob, fault: Fault):
        monkeypatch.setattr(drill_module, "KINDS", {"some": fault})
        return Drill(job, lambda line: None, clock=lambda: float(next(ticks))).run("some", 1, 0.0)

    return run


def test_times_and_the_right_node(run):
    job = FakeJob(incident(1, 103.0, ["node-1"]))
    record = run(job, Fault(hurts(job)))
    assert (record.node, record.recovered, record.right_node_named, record.healthy_evicted) == ("node-1", True, True, [])
    assert (record.detected_s, record.suspended_s, record.restored_s, record.total_s) == (3.0, 1.0, 1.0, 7.0)
    assert (record.steps_lost, record.interruptions, job.undone) == (4, 1, 1)


@pytest.mark.parametrize(("named", "right"), [(["node-0"], False), (["node-0", "node-1"], False), ([], False), (["node-1"], True)])
def test_only_a_node_that_was_hurt_may_be_named(run, named, right):
    job = FakeJob(incident(1, 103.0, named))
    record = run(job, Fault(hurts(job)))
    assert record.right_node_named is right


def test_eviction_of_a_healthy_node_is_told_from_that_of_the_bad_one(run):
    job = FakeJob(incident(1, 103.0, ["node-1"], evicted=["node-1", "node-0"]))
    record = run(job, Fault(hurts(job)))
    assert record.healthy_evicted == ["node-0"]


def test_a_fault_that_is_to_end_by_itself_is_undone_before_recovery_counts(run):
    job, looks = FakeJob(), []

    def is_enough(status: object) -> bool:
        looks.append(job.undone)
        return len(looks) > 2

    record = run(job, Fault(hurts(job, is_enough=is_enough), interrupts=False))
    assert (record.recovered, record.detected_s, looks, job.undone) == (True, None, [0, 0, 0], 1)


def test_training_that_need_not_stop_may_be_seen_by_a_rule(run):
    for job, note in ((FakeJob(observed=("step_drift: slower",)), ""), (FakeJob(), "step_drift did not see it")):
        record = run(job, Fault(hurts(job), interrupts=False, looks_for="step_drift"))
        assert (record.note, record.recovered) == (note, not note)


def test_what_must_interrupt_and_does_not_has_not_recovered(run):
    job = FakeJob()
    record = run(job, Fault(hurts(job)))
    assert not record.recovered and record.note == "not over after 300 s"
    assert summary([record])["injected"] == 1 and summary([record])["recovered"] == 0


def test_an_incident_that_another_cut_short_is_over_with_it(run) -> None:
    job = FakeJob(incident(1, 103.0, ["node-1"], restored_s=None, replaced_s=None), incident(2, 106.0, ["node-1"]))
    record = run(job, Fault(hurts(job)))
    assert (record.recovered, record.interruptions, record.detected_s, record.total_s) == (True, 2, 3.0, 10.0)


@pytest.mark.parametrize(
    ("incidents", "note"),
    [
        ([incident(1, 103.0, ["node-1"])], ""),
        (
            [incident(1, 103.0, ["node-1"]), incident(2, 130.0, ["node-1"])],
            "2 interruption(s), expected 1, and no eviction: number 1; number 2",
        ),
        ([incident(1, 103.0, ["node-1"], evicted=["node-1"])], "1 interruption(s), expected 1, and no eviction: number 1"),
    ],
)
def test_what_may_interrupt_once_is_wrong_with_a_further_alarm_or_an_eviction(run, incidents, note):
    record = run(job := FakeJob(*incidents), Fault(hurts(job), interruptions=1))
    assert (record.note, record.recovered) == (note, not note)


@pytest.mark.parametrize("why", ["", "it took only 3 times as long"])
def test_a_kind_may_measure_something_and_say_what_is_amiss(run, why):
    job, measured = FakeJob(incident(1, 103.0, ["node-1"])), {}

    def amiss() -> str:
        measured["some_s"] = 4.0
        return why

    record = run(job, Fault(hurts(job, measured=measured, amiss=amiss)))
    assert (record.note, record.recovered, record.measured) == (why, not why, {"some_s": 4.0})


def test_a_kind_may_take_longer_than_others(run):
    job = FakeJob()
    assert run(job, Fault(hurts(job), limit_s=20.0)).note == "not over after 20 s"


def test_a_fault_that_lacks_something_is_refused_and_not_drawn(run):
    job = FakeJob()
    with pytest.raises(UsageError, match="cannot be injected into this job: no disk"):
        run(job, Fault(hurts(job), lacks=lambda job: "no disk"))


def test_every_kind_comes_before_one_comes_again():
    drawn = [kind for kind, _ in draw(2 * len(KINDS), seed=3)]
    assert sorted(drawn[: len(KINDS)]) == sorted(drawn[len(KINDS) :]) == sorted(KINDS)
    assert draw(5, seed=3) == draw(5, seed=3) != draw(5, seed=4)


def test_losses_are_compared_bit_for_bit_or_within_a_tolerance(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 2.0}\n{"kind": "event", "step": 1}\n{"kind": "tr')
    assert losses(tmp_path) == {1: 2.0}
    assert compared({1: 2.0, 2: 1.0}, {1: 2.0, 2: 1.0}, 0.0) == {
        "loss_bit_equal": True,
        "loss_max_difference": 0.0,
        "losses_agree": True,
        "steps_compared": 2,
    }
    near = compared({1: 2.0}, {1: 2.0 * (1 + 5e-6)}, 1e-5)
    assert (near["loss_bit_equal"], near["losses_agree"]) == (False, True)
    assert not compared({1: 2.0}, {1: 2.0 * (1 + 5e-6)}, 0.0)["losses_agree"]
    assert not compared({1: 2.0, 2: 1.0}, {1: 2.0}, 1e-5)["losses_agree"], "a step that is missing does not agree"


def test_one_byte_is_another(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(9))
    flip_byte(path)
    assert path.read_bytes() == bytes(4) + b"\xff" + bytes(4)
