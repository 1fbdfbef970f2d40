"""The keeper's threads by themselves: what waits for what, and until when a slot is busy."""

import json
import threading
import time

import pytest

from megascale_jax.checkpoint import carriers as module
from megascale_jax.checkpoint.carriers import Carriers
from megascale_jax.checkpoint.holdings import Held, Job, Rank
from megascale_jax.checkpoint.retention import Retention
from megascale_jax.checkpoint.slot import checksums
from megascale_jax.checkpoint.stage_two import Target
from megascale_jax.observe.event_store import read_events
from tests.checkpoint.states import filled_slot, plan

LIMIT_S = 30


class Gate:
    """Stands in for work on a slot; lets it through, in order, once it is open."""

    def __init__(self):
        self.steps, self.open, self.error = [], threading.Event(), None

    def __call__(self, *arguments):
        step = next(one.step for one in arguments if hasattr(one, "blocks"))
        assert self.open.wait(LIMIT_S), "never opened"
        if self.error is not None:
            raise OSError(self.error)
        self.steps.append(step)


@pytest.fixture
def gates(monkeypatch):
    copies, parts = Gate(), Gate()
    monkeypatch.setattr(module, "send_copy", copies)
    monkeypatch.setattr(module, "write_part", parts)
    yield copies, parts
    copies.open.set()
    parts.open.set()


@pytest.fixture
def work(tmp_path):
    """Carriers at work on two saves of rank 1."""
    carriers, rank, here = Carriers(), Rank(), plan(data=2)
    carriers.peer = ("host", 1, "secret")
    carriers.start()
    target = Target(str(tmp_path), 2, "none", Retention(2), LIMIT_S, events=str(tmp_path / "events"))
    jobs = []
    for step in (1, 2):
        slot, index = filled_slot(here, step)
        held = Held(slot, index)
        jobs.append(Job(rank, held, index.__class__(**{**vars(index), "rank": 1}), target))
        carriers.take(jobs[-1])
    return carriers, jobs


def until(carriers, condition):
    with carriers.changed:
        assert carriers.changed.wait_for(condition, LIMIT_S), "did not happen"


def test_newest_state_is_verified_and_copied_while_the_one_before_is_written(gates, work):
    (copies, parts), (carriers, jobs) = gates, work
    copies.open.set()
    until(carriers, lambda: copies.steps == [1, 2] and not [one for one in carriers.in_hand if one.what == "copying"])
    assert [job.held.sums for job in jobs] == [checksums(job.held.slot, job.index) for job in jobs]
    assert parts.steps == [] and all(job.held.is_busy for job in jobs), "storage still has to read both"
    assert carriers.status()["working"] == [{"what": "writing", "step": 1}, {"what": "writing", "step": 2}]
    parts.open.set()
    until(carriers, lambda: not carriers.in_hand)
    assert parts.steps == [1, 2] and not any(job.held.is_busy for job in jobs)


def test_what_the_threads_do_is_on_record(gates, work, tmp_path):
    (copies, parts), (carriers, jobs) = gates, work
    copies.error = "the next host is gone"
    copies.open.set()
    parts.open.set()
    until(carriers, lambda: not carriers.in_hand)
    carriers.events.close()
    with read_events(tmp_path) as store:
        rows = store.sql("select * from events where lane = 'keeper' order by begin_ns").to_pylist()
    assert {(row["name"], row["step"], row["is_instant"]) for row in rows} == {
        *(("copying", step, False) for step in (1, 2)),
        *(("writing", step, False) for step in (1, 2)),
        *(("no copy on the next host", step, True) for step in (1, 2)),
    }
    assert {(row["role"], row["rank"]) for row in rows} == {("keeper", 1)}
    spans = [json.loads(row["text"]) for row in rows if not row["is_instant"]]
    assert all(span == {"rank": 1, "bytes": jobs[0].held.slot.num_bytes} for span in spans)
    assert [row["text"] for row in rows if row["is_instant"]] == ["the next host is gone"] * 2


def test_state_is_written_while_the_next_host_does_not_answer(gates, work):
    (copies, parts), (carriers, jobs) = gates, work
    parts.open.set()
    until(carriers, lambda: parts.steps == [1] and not [one for one in carriers.in_hand if one.what == "writing"])
    assert jobs[0].held.is_busy, "the copy still has to read it"
    copies.open.set()
    until(carriers, lambda: not carriers.in_hand)
    assert (copies.steps, parts.steps) == ([1, 2], [1, 2]) and not any(job.held.is_busy for job in jobs)


def test_what_fails_is_told_and_leaves_the_slot_free(gates, work):
    (copies, parts), (carriers, jobs) = gates, work
    copies.error, parts.error = "the next host is gone", "the disk is full"
    copies.open.set()
    parts.open.set()
    until(carriers, lambda: not carriers.in_hand)
    assert not any(job.held.is_busy for job in jobs)
    told = sorted((failure["step"], failure["what"], failure["error"], failure["is_loss"]) for failure in jobs[0].rank.failures)
    assert told == [
        (step, *one)
        for step in (1, 2)
        for one in (("no copy on the next host", "the next host is gone", False), ("not written", "the disk is full", True))
    ]


def test_word_that_a_part_will_not_come_is_said_again_until_the_disk_takes_it(gates, work, monkeypatch):
    (copies, parts), (carriers, jobs) = gates, work
    monkeypatch.setattr(module, "_TELL_AGAIN_S", 0.02)
    told, refused = [], [True] * 4

    def tell(storage, index, error):
        if refused:
            refused.pop()
            return False
        told.append((index.step, error))
        return True

    monkeypatch.setattr(module, "tell_failure", tell)
    parts.error = "the disk is full"
    copies.open.set()
    parts.open.set()
    until(carriers, lambda: not carriers.in_hand)
    assert [one["error"] for one in jobs[0].rank.failures] == ["the disk is full"] * 2
    limit = time.monotonic() + LIMIT_S
    while len(told) < 2 and time.monotonic() < limit:
        time.sleep(0.01)
    assert sorted(told) == [(1, "the disk is full"), (2, "the disk is full")]


def test_a_thread_that_stumbles_goes_on(gates, monkeypatch, request):
    copies, parts = gates
    stumbles, appended = [True], module.Carriers._ended

    def ended(self, what, job):
        if what == "writing" and stumbles:
            stumbles.pop()
            raise RuntimeError("not foreseen")
        return appended(self, what, job)

    monkeypatch.setattr(module.Carriers, "_ended", ended)
    request.getfixturevalue("work")
    copies.open.set()
    parts.open.set()
    limit = time.monotonic() + LIMIT_S
    while not parts.steps and time.monotonic() < limit:
        time.sleep(0.01)
    assert parts.steps == [2], "the first was lost to it, the next is not"
