"""Profiles on request: steps that are past, clash, expire, are none; disks that are full; early ends; the command. Real: `test_loop.py`."""

import errno
import threading
import time

import pytest
from typer.testing import CliRunner

from megascale_jax.cli import profile as profile_cli
from megascale_jax.cli.main import app
from megascale_jax.errors import RunFolderError, UsageError
from megascale_jax.observe import profile_request
from megascale_jax.observe.marks import Marks
from megascale_jax.observe.profile_request import AT_WORK, Answer, Place, Request, ask, requests_of
from megascale_jax.train import profiles
from megascale_jax.train.profiles import Profiles
from megascale_jax.views.xplane import find_profiles

LIMIT_S = 60.0


def request(first, end, ranks=(0,), expires_s=3600.0):
    return Request(first=first, end=end, ranks=ranks, expires_unix_s=time.time() + expires_s)


def wait_for(look):
    limit = time.monotonic() + LIMIT_S
    while not (found := look()) and time.monotonic() < limit:
        time.sleep(0.005)
    assert found
    return found


def said(place, rank=0, *states):
    """The answer, once it is one of ``states``."""
    return wait_for(lambda: (answer := place.answer(rank)) is not None and answer.state in states and answer)


class FakeSession:
    content = b"xspace"

    def stop(self):
        return self.content


class Loop:
    """A rank whose steps the test takes one by one; the numbers of one are read while the next runs, as the trainer does."""

    def __init__(self, folder, steps=100, rank=0, begin=FakeSession, marks=None):
        self.begun, self.at = [], 0

        def begins():
            self.begun.append(self.at + 1)
            return begin()

        self.profiles = Profiles(folder, steps, rank, 1, marks or Marks(), begins)

    def __enter__(self):
        self.profiles.__enter__()
        return self

    def __exit__(self, *error):
        self.profiles.__exit__(*error)

    def to(self, step):
        while self.at < step:
            with self.profiles.step(self.at + 1):
                self.at += 1
            if self.at > 1:
                self.profiles.read(self.at - 1)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(profiles, "look_s", lambda ranks: 0.01)
    monkeypatch.setattr(profiles, "RESERVE_BYTES", 0)
    monkeypatch.setattr(profiles, "NEWS_S", 0.05)
    (tmp_path / "config.yaml").write_text("")
    return tmp_path


def test_steps_that_are_asked_for_are_profiled_and_no_others(folder):
    with Loop(folder) as loop:
        loop.to(3)
        place = ask(folder, request(6, 8))
        said(place, 0, "waiting")
        loop.to(5)
        assert loop.begun == []
        loop.to(7)
        assert loop.begun == [6] and loop.profiles._running is not None
        loop.to(8)
        assert loop.profiles._running is None, "step 7 is read"
        assert said(place, 0, "done").text == ""
        assert place.profile(0).read_bytes() == b"xspace"
        assert loop.profiles.step(9) is profiles._NO_STEP
    assert find_profiles(place.folder) == [place.profile(0)]


def test_only_the_ranks_that_are_asked(folder):
    with Loop(folder) as zero, Loop(folder, rank=3) as three:
        place = ask(folder, request(2, 3, ranks=(3,)))
        said(place, 3, "waiting")
        zero.to(4)
        three.to(4)
        said(place, 3, "done")
    assert zero.begun == [] and place.answer(0) is None


@pytest.mark.parametrize(
    ("first", "end", "text"),
    [(5, 7, "step 5 is past: the run is in step 5"), (98, 102, "the run ends with step 100")],
)
def test_steps_that_cannot_be_are_refused_with_where_the_run_is(first, end, text, folder):
    with Loop(folder) as loop:
        loop.to(5)
        assert text in said(ask(folder, request(first, end)), 0, "refused").text
        loop.to(9)
    assert loop.begun == []


def test_of_two_at_once_the_second_is_refused_and_one_apart_is_taken(folder):
    with Loop(folder) as loop:
        first = ask(folder, request(5, 7))
        said(first, 0, "waiting")
        second = ask(folder, request(5, 7))
        assert second.name != first.name and f"asked for already ({first.name})" in said(second, 0, "refused").text
        near = ask(folder, request(8, 9))
        assert "leave 2 steps" in said(near, 0, "refused").text
        apart = ask(folder, request(10, 11))
        said(apart, 0, "waiting")
        loop.to(8)
        said(first, 0, "done")
        loop.to(12)
        said(apart, 0, "done")
    assert loop.begun == [5, 10]


def test_what_is_asked_too_late_for_the_loop_is_said(folder):
    with Loop(folder) as loop:
        place = ask(folder, request(5, 7))
        said(place, 0, "waiting")
        loop.at = 7
        loop.to(8)
        assert "step 5 is past" in said(place, 0, "failed").text


def test_a_request_left_behind_or_withdrawn_is_given_up(folder):
    with Loop(folder) as loop:
        left = ask(folder, request(50, 52, expires_s=0.5))
        withdrawn = ask(folder, request(60, 62))
        for place in (left, withdrawn):
            said(place, 0, "waiting")
        withdrawn.withdraw()
        wait_for(lambda: not loop.profiles._waiting)
        loop.to(70)
    assert loop.begun == [] and left.answer(0).state == "failed" and not withdrawn.folder.exists()
    ask(folder, request(1, 2))
    assert not left.request.exists(), "the next command sweeps"


def test_a_second_command_of_the_same_steps_gets_an_answer_of_its_own(folder):
    with Loop(folder) as loop:
        loop.to(5)
        for _ in range(3):  # refused, withdrawn, and asked again before the rank looks
            place = ask(folder, request(3, 4))
            assert place.name == "steps-3-4" and "is past" in said(place, 0, "refused").text
            place.withdraw()


def test_a_run_that_ends_early_leaves_what_it_has(folder):
    with Loop(folder) as loop:
        running, waiting = ask(folder, request(3, 9)), ask(folder, request(20, 22))
        for place in (running, waiting):
            said(place, 0, "waiting")
        loop.to(5)
    assert running.answer(0).state == "done" and running.answer(0).text == "the run ended: it has the steps 3 to 5"
    assert (waiting.answer(0).state, waiting.answer(0).text) == ("failed", "the run ended after step 5")


def test_a_step_that_does_not_end_does_not_hold_the_profile(folder, monkeypatch):
    monkeypatch.setattr(profiles, "MOST_S", 0.05)
    with Loop(folder) as loop:
        place = ask(folder, request(2, 9))
        said(place, 0, "waiting")
        loop.to(3)
        assert said(place, 0, "done").text == "cut after 0 s: it has the steps 2 to 3"
        loop.to(12)
    assert loop.begun == [2]


def failing(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [("replace_file", failing, "No space left"), ("RESERVE_BYTES", 1 << 60, "are to stay free")],
)
def test_a_full_disk_loses_the_profile_alone(name, value, text, folder, monkeypatch):
    monkeypatch.setattr(profiles, name, value)
    with Loop(folder) as loop:
        place = ask(folder, request(2, 3))
        said(place, 0, "waiting")
        loop.to(4)
        assert text in said(place, 0, "failed").text and not place.profile(0).exists()
        monkeypatch.undo()
        monkeypatch.setattr(profiles, "RESERVE_BYTES", 0)
        again = ask(folder, request(7, 8))
        said(again, 0, "waiting")
        loop.to(9)
        said(again, 0, "done")


def test_a_disk_that_takes_no_answer_disturbs_nobody(folder, monkeypatch, caplog):
    monkeypatch.setattr(profile_request, "replace_file", failing)
    with Loop(folder) as loop:
        (folder / "profiles" / "requests").mkdir(parents=True)
        (folder / "profiles" / "requests" / "steps-5-6.json").write_text(request(5, 6).model_dump_json())
        wait_for(lambda: "cannot be served" in caplog.text)
        loop.to(8)
    assert loop.begun == [5], "and the loop went on"


def test_a_profiler_that_cannot_begin_is_said(folder):
    def broken():
        raise RuntimeError("another one is on")

    with Loop(folder, begin=broken) as loop:
        place = ask(folder, request(2, 3))
        said(place, 0, "waiting")
        loop.to(9)
        assert "the profiler cannot begin: another one is on" in said(place, 0, "failed").text


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "null", '{"first": 1, "end": 2}', '{"first": 1, "end": 2, "ranks": [0], "expires_unix_s": 1e300}'),
        *('{"first": 1, "end": 99, "ranks": [0], "expires_unix_s": 9e10}', '{"first": 1, "end": 1, "ranks": [0], "expires_unix_s": 9e10}'),
        *('{"first": 1, "end": 2, "ranks": [0], "expires_unix_s": 9e10, "path": "/etc"}', " " * (1 << 17), b"\xff\x80"),
    ],
)
def test_what_is_no_request_is_none(content, folder):
    requests = folder / "profiles" / "requests"
    requests.mkdir(parents=True)
    (requests / "steps-1-2.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    for name in ("..json", "steps-1-2.json.1.tmp", "passwd.json", "steps-1.json"):
        (requests / name).write_text(request(1, 2).model_dump_json())
    found = dict(requests_of(folder))
    assert [place.name for place in found] == ["steps-1-2"] and "is no request" in str(found[Place(folder, "steps-1-2")])
    with Loop(folder) as loop:
        loop.to(3)
    assert loop.begun == []


def command(folder, *words):
    result = CliRunner().invoke(app, ["profile", str(folder), *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


class Steps(threading.Thread):
    """Takes steps of loops that have been asked for something, until it is stopped."""

    def __init__(self, *loops):
        super().__init__(daemon=True)
        self.loops, self.stops = loops, threading.Event()

    def run(self):
        while not self.stops.wait(0.005):
            for loop in self.loops:
                if loop.at or loop.profiles._waiting:
                    loop.to(loop.at + 1)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stops.set()
        self.join(LIMIT_S)


def test_the_command_waits_and_says_where_the_profile_is(folder, tmp_path):
    output = tmp_path / "copy"
    with Loop(folder, steps=10**6) as zero, Loop(folder, steps=10**6, rank=1) as one, Steps(zero, one):
        result = command(folder, "--steps", "50:52", "--ranks", "0,1", "--output", output)
    assert result.exit_code == 0 and "profiles of 2 of 2 ranks" in result.output
    assert f"megascale analyze {output}" in result.output.replace("\n", " ").replace("  ", " ") and "xprof --logdir" in result.output
    assert len(find_profiles(output)) == 2 and not list((folder / "profiles" / "requests").iterdir())


def test_the_command_refuses_what_is_past(folder):
    with Loop(folder) as loop:
        loop.to(50)
        with pytest.raises(UsageError, match="rank 0: refused: step 3 is past: the run is in step 50"):
            command(folder, "--steps", "3:5")
    assert [path.name for path in (folder / "profiles").iterdir()] == ["requests"]


def test_the_command_does_not_wait_for_ever(folder, monkeypatch):
    monkeypatch.setattr(profile_cli, "SILENT_S", 0.1)
    monkeypatch.setattr(profile_cli, "NEWS_S", 0.1)
    monkeypatch.setattr(profile_cli, "look_s", lambda ranks: 0.1)
    with pytest.raises(UsageError, match=r"rank 0 of .* does not answer for 0 s; is the run at work"):
        command(folder, "--steps", "3:5")
    monkeypatch.setattr(profile_cli, "SILENT_S", LIMIT_S)
    with Loop(folder), pytest.raises(UsageError, match="after 1 s the profile is not there: step 0: 1 of 1 ranks wait for step 3"):
        command(folder, "--steps", "3:5", "--limit", 1)
    assert not list((folder / "profiles" / "requests").iterdir())


def test_some_ranks_without_a_profile_are_exit_code_1(folder):
    def broken():
        raise RuntimeError("no")

    with Loop(folder, steps=10**6) as zero, Loop(folder, steps=10**6, rank=1, begin=broken) as one, Steps(zero, one):
        result = command(folder, "--steps", "50:52", "--ranks", "0,1")
    assert result.exit_code == 1 and "profiles of 1 of 2 ranks" in result.output and "rank 1: failed" in result.output


def test_words_that_make_no_sense_are_refused(folder, tmp_path):
    for words in (("--steps", "5"), ("--steps", "5:"), ("--steps", "0:3"), ("--steps", "5:5"), ("--steps", "1:22")):
        with pytest.raises(UsageError, match="--steps"):
            command(folder, *words)
    with pytest.raises(UsageError, match="at most 64"):
        command(folder, "--steps", "5:6", "--ranks", "0-64")
    with pytest.raises(UsageError, match="expected the name of a new folder"):
        command(folder, "--steps", "5:6", "--output", tmp_path)
    with pytest.raises(RunFolderError, match="is not a run folder"):
        command(tmp_path / "nothing", "--steps", "5:6")


def test_answers_of_any_content_are_answers_or_none(folder):
    place = ask(folder, request(1, 2))
    for content in ("", "{}", '{"rank": 0, "state": "won", "step": 0, "at_unix_s": 1}', "[" * 100_000):
        (place.folder / "rank-00000.json").write_text(content)
        assert place.answer(0) is None
    place.say(Answer(rank=0, state="waiting", step=1, at_unix_s=1.0))
    assert place.answer(0).state in AT_WORK
