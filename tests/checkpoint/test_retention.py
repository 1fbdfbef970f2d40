"""Which checkpoints go: by count, age and every-k; never the newest good one (KempnerForge #102); each with its reason on record."""

import json

from hypothesis import given
from hypothesis import strategies as st

from megascale_jax.checkpoint.line import REWINDS, given_up
from megascale_jax.checkpoint.manifest import Found, Manifest, mark_damaged, published_steps
from megascale_jax.checkpoint.retention import Retention, apply, decide
from megascale_jax.checkpoint.stage_two import Target, tidy
from megascale_jax.comm.storage import Storage
from tests.checkpoint.states import plan, published

HOUR = 3600.0


def found(*steps, hours=None):
    """Published checkpoints; ``hours``: their ages."""
    ages = hours or [0.0] * len(steps)
    return [Found(step, Manifest(step, "x", {}, 1, 0, "none", -age * HOUR, {})) for step, age in zip(steps, ages, strict=True)]


def gone(checkpoints, policy, folders=()):
    folders = [*(str(item.step) for item in checkpoints), *folders]
    return [deletion.folder for deletion in decide(checkpoints, folders, policy, now_unix_s=0.0)]


def test_count():
    assert gone(found(1, 2, 3, 10), Retention(keep=2)) == ["1", "2"]


def test_multiples_stay_for_ever():
    assert gone(found(5, 6, 10, 11, 12), Retention(keep=1, keep_every=5)) == ["6", "11"]


def test_young_ones_stay():
    assert gone(found(1, 2, 3, hours=[30, 20, 1]), Retention(keep=1, keep_hours=24)) == ["1"]


def test_clock_that_went_back_deletes_nothing_more():
    assert gone(found(1, 2, 3, hours=[-100, -50, -1]), Retention(keep=1, keep_hours=24)) == []


def test_unfinished_and_damaged_ones_go_once_they_are_behind():
    checkpoints = [*found(4, 8), Found(6, None, "cannot be read")]
    assert gone(checkpoints, Retention(keep=2), folders=["2", "5", "9", "notes"]) == ["2"]
    assert gone(checkpoints, Retention(keep=1), folders=["5", "9"]) == ["4", "5"]


def test_what_a_rewind_gave_up_goes_at_once_and_is_not_counted():
    old, new = found(4, 8, 12, 16), found(9)
    new[0].manifest.description[REWINDS] = [[8, 100, 120]]
    checkpoints = sorted([*old, *new], key=lambda one: one.step)
    assert gone(checkpoints, Retention(keep=2, rewinds=[[8, 100, 120]])) == ["12", "16", "4"]
    assert gone(checkpoints, Retention(keep=2)) == ["4", "8", "9"], "the same without the rewind"


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9)), max_size=6), st.data())
def test_a_line_goes_on_from_what_it_knows_and_from_what_lies_before_what_it_does_not(moves, data):
    """Trainings and rewinds in turn: what is admitted at the end is exactly what was never given up."""
    rewinds, states, step = [], [], 0
    for number, (steps, back) in enumerate(moves):
        states += [(one, {REWINDS: [list(rewind) for rewind in rewinds]}) for one in range(step + 1, step + steps + 1)]
        step += steps
        if back:
            rewinds.append((max(0, step - back), 10 * number, 10 * number + 1))
            step = rewinds[-1][0]
            kept = [state for state in states if given_up(*state, rewinds) is None]
            assert [one for one, _ in kept] == list(range(1, step + 1))
            states = kept if data.draw(st.booleans()) else states  # removed, or still there
    assert sorted(one for one, known in states if given_up(one, known, rewinds) is None) == list(range(1, step + 1))


@given(
    st.lists(st.tuples(st.integers(0, 100), st.floats(-10, 100), st.booleans()), unique_by=lambda item: item[0]),
    st.integers(1, 4),
    st.none() | st.integers(1, 7),
    st.none() | st.floats(0.1, 50),
)
def test_newest_good_ones_never_go_and_reasons_are_given(items, keep, every, hours):
    checkpoints = [Found(s, Manifest(s, "x", {}, 1, 0, "none", -age * HOUR, {}) if good else None) for s, age, good in items]
    deletions = decide(checkpoints, [str(step) for step, _, _ in items], Retention(keep, every, hours), 0.0)
    good = sorted(item.step for item in checkpoints if item.manifest is not None)
    removed = {int(deletion.folder) for deletion in deletions}
    assert not removed & set(good[-keep:])
    assert not removed & {item.step for item in checkpoints if item.manifest is None}, "unreadable today is not damaged"
    assert all(deletion.reason for deletion in deletions)
    assert len(removed) == len(deletions)


def test_deletions_are_on_record_and_the_damaged_one_is_not_counted(tmp_path):
    here, storage = plan(data=2), Storage(tmp_path)
    for step in (1, 2, 3):
        published(tmp_path, here, step, keep=9)
    mark_damaged(storage, 3, "a flipped byte")
    assert published_steps(tmp_path) == [1, 2]
    assert apply(storage, Retention(keep=2), by="a test", launch="now") == []
    published(tmp_path, here, 4, keep=9)
    apply(storage, Retention(keep=1), by="a test", launch="now")
    assert published_steps(tmp_path) == [4]
    lines = [json.loads(line) for line in (tmp_path / "deletions.jsonl").read_text().splitlines()]
    assert [(line["folder"], line["by"]) for line in lines] == [("1", "a test"), ("2", "a test"), ("3", "a test")]
    assert lines[0]["reason"] == "not among the newest 1"
    assert "damaged or never completed" in lines[2]["reason"]


def test_what_an_earlier_start_left_of_a_step_goes_when_it_is_published(tmp_path):
    here = plan(data=2)
    published(tmp_path, here, 7, launch="first")
    mark_damaged(Storage(tmp_path), 7, "a flipped byte")
    published(tmp_path, here, 7, launch="second")
    assert sorted(path.name for path in (tmp_path / "7").iterdir()) == ["manifest.json", "second"]
    assert published_steps(tmp_path) == [7]


def test_tidying_that_comes_late_leaves_what_a_later_start_published(tmp_path):
    """An upload of the first start's step 7 ends after the second start has published its own."""
    here, storage = plan(data=2), Storage(tmp_path)
    first = published(tmp_path, here, 7, launch="first")
    published(tmp_path, here, 7, launch="second")
    target = Target(str(tmp_path), 1, "none", Retention(keep=2), publish_limit_s=1.0)
    tidy(storage, target, first)
    assert sorted(path.name for path in (tmp_path / "7").iterdir()) == ["manifest.json", "second"]


def test_run_that_goes_on_from_an_older_step_keeps_what_it_writes(tmp_path):
    """Steps of another start are newer: neither the step just published nor the one in hand may go for that."""
    here, storage = plan(data=2), Storage(tmp_path)
    for step in (8, 12, 16):
        published(tmp_path, here, step, launch="before", keep=9)
    (tmp_path / "5/now").mkdir(parents=True)
    (tmp_path / "5/now/manifest.ocdbt").write_bytes(b"x")
    (tmp_path / "6/older").mkdir(parents=True)
    published(tmp_path, here, 4, launch="now", keep=2)
    assert published_steps(tmp_path) == [4, 12, 16]
    assert (tmp_path / "5/now").is_dir() and not (tmp_path / "6").exists()
    apply(storage, Retention(keep=2), by="a test", launch="now")
    assert published_steps(tmp_path) == [12, 16]


def test_what_this_start_gave_up_goes_with_the_next_publication(tmp_path):
    """Parts that came after their step was given up would stay for ever, on a disk that was full once."""
    here = plan(data=2)
    for folder in ("3/now/ocdbt.process_2", "3/now.parts", "5/now.parts", "9/now/ocdbt.process_1"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "x").write_bytes(b"x")
    published(tmp_path, here, 7, launch="now", keep=9)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["7", "9"], "the newer one is still being written"
    lines = [json.loads(line) for line in (tmp_path / "deletions.jsonl").read_text().splitlines()]
    assert [line["folder"] for line in lines] == ["3/now", "5/now"]
    assert all("step 7 was published meanwhile" in line["reason"] for line in lines)
