"""A growing log: every line once, whatever the pieces; a flood costs neither time nor disk, and its first cause stays."""

import errno

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_jax.cluster import log_reader
from megascale_jax.cluster.log_reader import LogReader
from megascale_jax.cluster.reports import LOG_LINE_CHARACTERS, LOG_LINES


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "rank-0.log"
    path.touch()
    return path


def append(path, content):
    with path.open("ab") as file:
        file.write(content if isinstance(content, bytes) else content.encode())


def names(reader):
    return [keyword.name for keyword in reader.keywords]


@settings(deadline=None)
@given(st.lists(st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1), max_size=LOG_LINES), st.data())
def test_every_line_is_read_once_whatever_the_pieces(tmp_path_factory, lines, data):
    path = tmp_path_factory.mktemp("logs") / "log"
    path.touch()
    reader, seen = LogReader(path), []
    content = "".join(f"{line}\n" for line in lines).encode()
    while content:
        cut = data.draw(st.integers(1, len(content)))
        append(path, content[:cut])
        content = content[cut:]
        seen += reader.read()
    assert seen == lines and reader.read(is_final=True) == ()


def test_half_a_line_waits_for_its_end_and_counts_when_none_comes(path):
    reader = LogReader(path)
    append(path, "one\ntw")
    assert reader.read() == ("one",)
    append(path, "o\nthree")
    assert reader.read() == ("two",)
    assert reader.read() == ()
    assert reader.read(is_final=True) == ("three",)


def test_lines_are_short_few_and_without_control_characters(path):
    reader = LogReader(path)
    append(path, "".join(f"{index}\n" for index in range(50)))
    append(path, b"\x1b[1;32mbold\x1b[0m \x07bell \xff\n" + b"bar 1\rbar 2\r\n\n" + b"x" * 1000 + b"\n")
    lines = reader.read()
    assert len(lines) == LOG_LINES and lines[-4:-1] == ("bold bell \N{REPLACEMENT CHARACTER}", "bar 1", "bar 2")
    assert lines[-1] == "x" * LOG_LINE_CHARACTERS


def test_what_was_there_before_is_not_read(path):
    append(path, "Bus error\n")
    reader = LogReader(path)
    append(path, "new\n")
    assert reader.read() == ("new",) and names(reader) == []


def test_line_of_the_first_cause_is_reported_though_many_follow(path):
    reader = LogReader(path)
    append(path, "CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure\n" + "Socket closed\n" * 100)
    lines = reader.read()
    assert len(lines) == LOG_LINES and lines[0].startswith("CUDA_ERROR_LAUNCH_FAILED") and names(reader) == ["cuda", "peer closed"]
    append(path, "CUDA_ERROR_LAUNCH_FAILED\n" + "more\n" * 100)
    assert set(reader.read()) == {"more"}, "it is no news any more"


def test_flood_is_read_at_both_ends(path, monkeypatch):
    monkeypatch.setattr(log_reader, "READ_BYTES", 1000)
    reader = LogReader(path)
    append(path, "Bus error\n" + "noise\n" * 100_000 + "the end\n")
    lines = reader.read()
    assert lines[0] == "Bus error" and lines[-1] == "the end"
    assert reader.read() == ()
    append(path, "Killed\n" + "noise\n" * 300)
    assert "bytes of the log" not in " ".join(reader.read()), "two pieces hold all of it"
    assert names(reader) == ["bus error", "killed"]


def test_log_that_grows_too_long_is_emptied_once_its_first_content_is_put_aside(path, monkeypatch):
    monkeypatch.setattr(log_reader, "KEEP_BYTES", 5000)
    reader, first = LogReader(path), path.with_suffix(".first.log")
    for round_number in range(3):
        append(path, f"round {round_number}\n" + "noise\n" * 1000)
        assert reader.read()[-1] == "noise"
        assert path.stat().st_size == 0
    assert first.read_text().startswith("round 0\n") and first.stat().st_size < 7000
    append(path, "after\n")
    assert reader.read() == ("after",)


def test_line_without_an_end_is_not_kept_in_memory_for_ever(path, monkeypatch):
    monkeypatch.setattr(log_reader, "READ_BYTES", 1000)
    reader = LogReader(path)
    for _ in range(5):
        append(path, "x" * 900)
        reader.read()
    assert len(reader._rest) <= 1000


def test_a_log_that_cannot_be_read_says_so_once_and_goes_on(path, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    reader = LogReader(path)
    append(path, b"first\n")
    with monkeypatch.context() as patch:
        patch.setattr(log_reader.os, "pread", broken)
        assert reader.read() == ("... the log cannot be read: Input/output error ...",)
        assert reader.read() == ()
    assert reader.read() == ("first",)
