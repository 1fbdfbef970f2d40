"""Which rank the flight recorder's dumps name: hand-made hangs with known answers, in any order of files; garbage never crashes."""

import json
import pickle
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from megascale_jax.cli.main import app
from megascale_jax.errors import TraceError, UsageError
from megascale_jax.views.desync import judge_dumps
from megascale_jax.views.flight_recorder import rank_of, read_dumps

WORLD, LEFT = "0", "1"


def entry(number, state="completed", op="all_reduce", group=WORLD, **fields):
    return {
        "record_id": 0,
        "pg_id": int(group),
        "process_group": [group, "default_pg" if group == WORLD else "left"],
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"nccl:{op}",
        "time_created_ns": 10**18 + number * 10**9,
        "input_sizes": [[4, 2]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4, 2]],
        "state": state,
        "is_p2p": False,
    } | fields


def dump(*entries, ranks=(0, 1, 2, 3), left=(), **more):
    groups = {WORLD: {"name": WORLD, "desc": "default_pg", "ranks": str(list(ranks))}}
    groups |= {LEFT: {"name": LEFT, "desc": "left", "ranks": str(list(left))}} if left else {}
    return {"version": "2.9", "pg_config": groups, "pg_status": {}, "entries": list(entries)} | more


def waits(number, **fields):
    return dump(*(entry(n, **fields) for n in range(1, number)), entry(number, "scheduled", **fields))


def done(number, **fields):
    return dump(*(entry(n, **fields) for n in range(1, number + 1)))


def write(folder, dumps):
    folder.mkdir(exist_ok=True)
    for rank, content in dumps.items():
        text = content if isinstance(content, (str, bytes)) else json.dumps(content)
        path = folder / f"nccl_trace_rank_{rank}.json"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def judged(folder, dumps):
    return judge_dumps(read_dumps([write(folder, dumps)]))


def said(found):
    return found.judgement.verdict, found.judgement.named, found.judgement.suspects


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "dumps"


def test_the_rank_that_did_not_come_is_named(folder):
    found = judged(folder, {0: waits(5), 1: waits(5), 2: done(4), 3: waits(5)})
    assert said(found) == ("hang", (2,), ())
    assert found.judgement.reason == (
        "rank 2 is first behind: before all_reduce 5 of group 0 (default_pg), in which ranks 0, 1, 3 are; it waits for no other rank"
    )
    states = {one.rank: (one.state, one.operation) for one in found.judgement.ranks}
    assert states[2] == ("stuck", "after collective 4 of group 0 (default_pg)")
    assert states[0] == ("waiting", "in all_reduce 5 of group 0 (default_pg), scheduled")


def test_two_are_named_and_one_further_behind_too(folder):
    assert said(judged(folder, {0: waits(5), 1: done(3), 2: done(4), 3: waits(5)})) == ("hang", (1, 2), ())


def test_who_waits_in_another_group_is_a_victim(folder):
    """Rank 1 is not in the world's 3 because it waits for rank 0 in the left group's 7."""
    left = {"left": (0, 1)}
    common = [entry(1), entry(2)]
    dumps = {
        0: dump(*common, entry(6, group=LEFT), **left),
        1: dump(*common, entry(6, group=LEFT), entry(7, "started", op="broadcast", group=LEFT), **left),
        2: dump(*common, entry(3, "scheduled")),
        3: dump(*common, entry(3, "scheduled")),
    }
    assert said(judged(folder, dumps)) == ("hang", (0,), ())


def test_a_circle_cannot_be_told(folder):
    left, right = (0, 1), "2"
    other = {"name": right, "desc": "right", "ranks": "[0, 1]"}
    a = dump(entry(1, "scheduled", group=LEFT), ranks=(0, 1), left=left)
    b = dump(entry(1, "scheduled", group=right), ranks=(0, 1), left=left)
    for one in (a, b):
        one["pg_config"][right] = other
    found = judged(folder, {0: a, 1: b})
    assert said(found) == ("hang", (), (0, 1)) and "each waits in another group" in found.judgement.reason


def test_a_device_that_did_not_come_to_what_is_enqueued_is_named(folder):
    starts = dump(entry(1), entry(2, "started"))
    found = judged(folder, {0: starts, 1: starts, 2: starts, 3: waits(2)})
    assert said(found) == ("hang", (3,), ()) and "on the device not yet in all_reduce 2" in found.judgement.reason


def test_all_equally_far_names_nobody(folder):
    found = judged(folder, dict.fromkeys(range(4), waits(5)))
    assert said(found) == ("hang", (), (0, 1, 2, 3)) and "it cannot be told" in found.judgement.reason


def test_a_missing_dump_is_named_only_if_all_others_are_there(folder):
    found = judged(folder, {0: waits(5), 1: waits(5), 3: waits(5)})
    assert said(found) == ("hang", (2,), ()) and "rank 2 left no dump" in found.judgement.reason
    assert said(judged(folder / "b", {0: waits(5)})) == ("hang", (), (1, 2, 3)), "of most of them nothing is known"
    assert said(judged(folder / "c", {0: waits(5), 1: done(4), 3: waits(5)})) == ("hang", (1,), ())
    assert said(judged(folder / "d", {0: done(5), 1: done(5)})) == ("unknown", (), (2, 3))


def test_a_cut_dump_counts_as_missing_with_a_note(folder):
    found = judged(folder, {0: waits(5), 1: waits(5), 2: json.dumps(done(4))[:-40], 3: waits(5)})
    assert said(found) == ("hang", (2,), ()) and "nccl_trace_rank_2.json cannot be read as JSON" in found.notes[0]


def test_a_ring_that_lost_the_group_does_not_make_its_rank_behind(folder):
    lost = dump(entry(9, op="broadcast", group=LEFT, record_id=4000), left=(2, 3))
    dumps = {0: waits(5), 1: waits(5), 2: lost, 3: dump(*waits(5)["entries"], entry(9, op="broadcast", group=LEFT), left=(2, 3))}
    assert said(judged(folder, dumps)) == ("hang", (2,), ()), "as one without a dump"
    behind = {**dumps, 1: done(4)}
    assert said(judged(folder / "b", behind)) == ("hang", (1,), ())


def test_pg_status_knows_what_the_ring_has_lost(folder):
    ahead = dump(entry(4), pg_status={WORLD: {"last_enqueued_collective": 5, "last_completed_collective": 4}})
    assert said(judged(folder, {0: waits(5), 1: waits(5), 2: ahead, 3: waits(5)}))[1] == ()


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        ({"op": "all_gather"}, "ranks 0, 1, 3 are in all_reduce [[4,2]] Float"),
        ({"input_sizes": [[4, 3]]}, "rank 2 is in all_reduce [[4,3]] Float"),
        ({"input_dtypes": ["Half"]}, "rank 2 is in all_reduce [[4,2]] Half"),
    ],
)
def test_the_odd_one_of_a_mismatch_is_named(odd, text, folder):
    found = judged(folder, {0: waits(5), 1: waits(5), 2: dump(*done(4)["entries"], entry(5, "scheduled", **odd)), 3: waits(5)})
    assert said(found) == ("hang", (2,), ()) and text in found.judgement.reason
    assert found.mismatches[0].number == 5


def test_without_a_majority_all_are_suspects(folder):
    other = waits(5, op="all_gather")
    assert said(judged(folder, {0: waits(5), 1: waits(5), 2: other, 3: other})) == ("hang", (), (0, 1, 2, 3))


def test_sizes_that_may_differ_are_no_mismatch(folder):
    some = [dump(entry(1, op="all_to_all", input_sizes=[[rank + 1]])) for rank in range(4)]
    found = judged(folder, dict(enumerate(some)))
    assert said(found) == ("running", (), ()) and not found.mismatches


def test_sends_are_shown_and_not_judged(folder):
    stuck = dump(*done(4)["entries"], entry(4, "started", op="recv 0<-1", is_p2p=True, p2p_seq_id=3))
    found = judged(folder, {0: stuck, 1: done(4), 2: done(4), 3: done(4)})
    assert said(found) == ("hang", (), (0,)) and "not judged" in found.notes[0]


def test_groups_of_one_name_and_other_members_are_two(folder):
    """Numbers of groups are each process's own; two pairs of one name have nothing to do with each other."""
    dumps = {rank: dump(*(entry(n) for n in range(1, last + 1)), ranks=pair) for pair, last in (((0, 1), 3), ((2, 3), 9)) for rank in pair}
    assert said(judged(folder, dumps)) == ("running", (), ())


def test_the_command_speaks_as_why_does(folder):
    write(folder, {0: waits(5), 1: waits(5), 2: done(4), 3: waits(5)})
    result = CliRunner().invoke(app, ["why", "--flight-recorder", str(folder), "--json"])
    told = json.loads(result.output)
    assert result.exit_code == 1 and (told["verdict"], told["named"]) == ("hang", [2])
    assert {"verdict", "reason", "named", "suspects", "attempt", "ranks", "until"} < told.keys() and len(told["ranks"]) == 4
    text = CliRunner().invoke(app, ["why", "--flight-recorder", str(folder)]).output
    assert "Verdict: hang" in text and "rank 2: stuck, after collective 4" in text


def test_what_cannot_be_read_is_refused_with_what_to_do(folder, tmp_path):
    with pytest.raises(UsageError, match=r"a pickle runs whatever it holds.*_dump_nccl_trace_json"):
        judged(folder, {0: pickle.dumps(waits(5))})
    with pytest.raises(TraceError, match="none of 1 files is a JSON dump"):
        judged(folder / "b", {0: "{"})
    with pytest.raises(UsageError, match="no rank in the name"):
        rank_of(tmp_path / "dump.json")
    (folder / "c").mkdir()
    (folder / "c" / "a_1.json").write_text("{}")
    (folder / "c" / "b_1.json").write_text("{}")
    with pytest.raises(UsageError, match="another file of rank 1"):
        read_dumps([folder / "c"])
    with pytest.raises(UsageError, match="no file and no folder"):
        read_dumps([tmp_path / "nothing"])
    result = CliRunner().invoke(app, ["why"])
    assert isinstance(result.exception, UsageError) and "not both" in str(result.exception)


def test_a_dump_under_another_ranks_name_is_not_believed(folder):
    found = judged(folder, {0: waits(5), 1: waits(5), 7: done(4), 3: waits(5)})
    assert 7 not in found.judgement.named and "which rank 7 is not in" in found.notes[0]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, 4), min_size=2, max_size=6),
    st.sets(st.integers(0, 5), max_size=3),
    st.randoms(use_true_random=False),
)
def test_in_any_order_of_files_nobody_is_named_who_is_ahead(tmp_path_factory, reached, missing, order):
    """Ranks have completed ``reached`` collectives, and those that can wait in the next one."""
    ranks, most = range(len(reached)), max(reached)
    dumps = {
        rank: dump(*waits(last + 1)["entries"] if last == most else done(last)["entries"], ranks=ranks)
        for rank, last in enumerate(reached)
        if rank not in missing
    }
    if not dumps:
        return
    folder = write(tmp_path_factory.mktemp("dumps"), dumps)
    files = sorted(folder.iterdir())
    found = judge_dumps(read_dumps(files), now=2e9)
    order.shuffle(files)
    mixed = read_dumps(files)
    random.Random(0).shuffle(mixed)
    assert judge_dumps(mixed, now=2e9) == found
    top = {rank for rank in dumps if reached[rank] == most}
    assert not top & set(found.judgement.named)
    behind = {rank for rank in dumps if reached[rank] < most}
    if top and behind:
        assert set(found.judgement.named) == behind


WORDS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(list(entry(1)) + list(dump())), inner, max_size=6),
    max_leaves=30,
)


@settings(deadline=None, max_examples=40)
@given(st.dictionaries(st.sampled_from(list(entry(1))), WORDS, max_size=4), WORDS, st.binary(max_size=60))
def test_garbage_never_crashes(tmp_path_factory, fields, content, junk):
    folder = tmp_path_factory.mktemp("dumps")
    dumps = {0: waits(2), 1: dump(entry(2, **fields)), 2: json.dumps(content), 3: b"{" + junk}
    assert judged(folder, dumps).judgement.verdict in ("hang", "running", "unknown")
