"""Steps that wait for parts: a newer one never waits for an older one, and every one ends."""

from hypothesis import given
from hypothesis import strategies as st

from megascale_jax.checkpoint import publications as module
from megascale_jax.checkpoint.holdings import Held, Job, Rank
from megascale_jax.checkpoint.manifest import Manifest
from megascale_jax.checkpoint.publications import Publications
from megascale_jax.checkpoint.retention import Retention
from megascale_jax.checkpoint.slot import SlotIndex
from megascale_jax.checkpoint.stage_two import Publication, Target

RANKS = 2


class Parts(Publication):
    """A publication whose parts come when we say so."""

    def _collect(self):
        pass

    def _publish(self):
        return Manifest(self.index.step, self.index.launch, {}, RANKS, 0, "none", 0.0, {})


def waiting(tmp_path, limit_s=1000.0):
    """Publications of which nothing is on storage, and how to add a step and one of its parts."""
    pending, made = Publications(), {}
    target = Target(str(tmp_path / "nothing"), RANKS, "none", Retention(2), limit_s)

    def add(step, launch="launch"):
        index = SlotIndex(step, launch, 0, {}, (), "mark", {})
        pending.add(Job(Rank(), Held(None), index, target))
        one = pending._waiting[-1]
        one.publication.__class__ = Parts
        one.publication._looked = True
        made[step] = one.publication

    def part(step, rank):
        made[step]._parts[rank] = None

    return pending, add, part


def settled(pending, launch="launch"):
    return [(job.index.step, str(end) if isinstance(end, Exception) else "published") for job, end in pending.settle(lambda: launch)]


def test_newer_step_is_published_without_waiting_for_an_older_one_that_is_given_up_then(tmp_path):
    pending, add, part = waiting(tmp_path)
    for step in (1, 2, 3):
        add(step)
    part(1, 0)
    part(2, 0)
    part(2, 1)
    assert settled(pending) == [(2, "published")]
    assert settled(pending) == [(1, "no report of rank [1] (1 of 2) and step 2 was published meanwhile")]
    assert settled(pending) == [] and len(pending) == 1, "step 3 has its time"


def test_older_step_whose_last_part_is_seen_late_is_published_all_the_same(tmp_path):
    pending, add, part = waiting(tmp_path)
    for step in (1, 2):
        add(step)
        part(step, 0)
    part(2, 1)
    assert settled(pending) == [(2, "published")]
    part(1, 1)
    assert settled(pending) == [(1, "published")]


def test_limit_counts_from_when_a_step_is_the_oldest(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    pending, add, _ = waiting(tmp_path, limit_s=10.0)
    add(1)
    add(2)
    assert settled(pending) == []
    now = 11.0
    assert settled(pending) == [(1, "no report of rank [0, 1] (2 of 2) within 10 s")]
    assert settled(pending) == []
    now = 22.0
    assert settled(pending) == [(2, "no report of rank [0, 1] (2 of 2) within 10 s")]


def test_start_of_the_run_that_is_over_is_given_up(tmp_path):
    pending, add, _ = waiting(tmp_path)
    add(1, "old")
    add(2, "new")
    assert settled(pending, "new") == [(1, "no report of rank [0, 1] (2 of 2) and the run was started again meanwhile")]


@given(arrivals=st.permutations([(step, rank) for step in range(1, 5) for rank in range(RANKS)]), lost=st.sets(st.integers(1, 4)))
def test_what_has_all_parts_is_published_and_what_lacks_one_holds_up_nothing(tmp_path_factory, arrivals, lost):
    pending, add, part = waiting(tmp_path_factory.getbasetemp())
    for step in range(1, 5):
        add(step)
    done, there, gone = [], set(), {}
    for step, rank in arrivals:
        if not (rank == 1 and step in lost):
            part(step, rank)
            there.add((step, rank))
        done += settled(pending) + settled(pending)
        gone = dict(done)
        complete = {one for one in range(1, 5) if {(one, rank) for rank in range(RANKS)} <= there}
        newest = max((one for one, what in done if what == "published"), default=0)
        assert all(one in gone for one in complete), "nothing complete waits"
        assert all(one in gone for one in range(1, newest)), "nothing older than a published one waits"
    assert len(done) == len(gone), "each ends once"
