"""What a journal tells afterwards, and while its driver holds it."""

import sqlite3
from pathlib import Path

import pytest

from megascale_jax.cluster.history import read_history
from megascale_jax.cluster.job import JOURNAL_FILE, terms_text
from megascale_jax.cluster.lifecycle import NodeStatus, Phase
from megascale_jax.cluster.state import Ordered
from megascale_jax.config.cluster import ClusterConfig
from tests.cluster.simulated import World

CONFIG = ClusterConfig(lost_after_s=5.0, grace_s=5.0, wait_s=60.0, diagnose_s=30.0)


def driven(folder: Path) -> World:
    """A job with a crash and an eviction behind it, whose driver is still there."""
    world = World(folder, CONFIG)
    world.journal.keep("terms", terms_text(world.shapes, CONFIG))
    world.until_step(12)
    world.crash("node-2")
    world.until_step(20)
    world.driver.record(Ordered(at_s=world.now, action="evict", node="node-1", by="anna and ben", step=20))
    world.until_step(30)
    return world


def test_a_living_drivers_journal_is_read_beside_it(tmp_path) -> None:
    world = driven(tmp_path)
    (job,) = read_history(tmp_path)
    assert job.state == world.driver.state and not job.note and not job.has_ended
    assert [line.text for line in job.lines] == [line for line in world.lines if not line.startswith("observed")]
    assert [(one.incident.number, one.attempt) for one in job.incidents] == [(1, 1), (2, 2)]
    assert job.state.nodes["node-1"].status == NodeStatus.EVICTED
    assert job.phases[-1].phase == Phase.RUNNING and job.phases[-1].end_s is None
    assert all(first.end_s == second.begin_s for first, second in zip(job.phases, job.phases[1:], strict=False))
    assert job.saved_unix_s is not None
    world.until_step(40)  # the driver still has its journal
    assert read_history(tmp_path)[0].state == world.driver.state


def test_jobs_of_a_folder_are_told_in_their_order(tmp_path) -> None:
    world = driven(tmp_path)
    world.journal.close()
    for name in ("journal-10.sqlite", "journal-2.sqlite"):
        (tmp_path / name).write_bytes((tmp_path / JOURNAL_FILE).read_bytes())
    (tmp_path / "journal-2.sqlite").write_bytes(b"garbage" * 100)
    first, second, third = read_history(tmp_path)
    assert first.state is None and "journal-2.sqlite cannot be read" in first.note
    assert second.state == third.state == world.driver.state


def test_there_may_be_none(tmp_path) -> None:
    assert read_history(tmp_path / "nowhere") == ()


@pytest.mark.parametrize("broken", ["no json", '{"kind": "unheard"}', '{"kind": "diagnosed", "at_s": 1, "attempt": 1, "bad": {}}'])
def test_what_comes_before_a_damaged_event_is_told(tmp_path, broken) -> None:
    world = driven(tmp_path)
    world.journal.close()
    whole = read_history(tmp_path)[0]
    with sqlite3.connect(tmp_path / JOURNAL_FILE) as file:
        number = file.execute("SELECT count(*) FROM events").fetchone()[0]
        file.execute("UPDATE events SET event = ? WHERE number = ?", (broken, number))
    (job,) = read_history(tmp_path)
    assert job.incidents[0] == whole.incidents[0]
    assert ("damaged" in job.note) == ("bad" not in broken), "an event that does not fit changes nothing"


def test_a_journal_without_terms_says_so(tmp_path) -> None:
    world = driven(tmp_path)
    world.journal.close()
    with sqlite3.connect(tmp_path / JOURNAL_FILE) as file:
        file.execute("DELETE FROM facts WHERE name = 'terms'")
    (job,) = read_history(tmp_path)
    assert job.state is None and "does not say" in job.note
