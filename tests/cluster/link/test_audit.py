"""The audit log: what was changed is named, what a crash cut short is said, two writers make one chain."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from megascale_jax.cli.audit import app
from megascale_jax.cluster.link import audit
from megascale_jax.cluster.link.audit import AuditLog, Verdict, records, verify
from megascale_jax.errors import StorageError, UsageError


def write(path, count=5):
    log = AuditLog(path)
    for number in range(count):
        log.append("alice", "admin", "evict", {"node": f"node-{number}"})
    return path.read_bytes().splitlines(keepends=True)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "audit.jsonl"


def test_a_log_is_whole_and_for_its_owner_only(path):
    lines = write(path)
    verdict = verify(path)
    assert (verdict.lines, verdict.problem) == (5, "")
    assert path.stat().st_mode & 0o777 == 0o600
    assert [record.details["node"] for record in records(path)] == [f"node-{number}" for number in range(5)]
    assert json.loads(lines[0])["previous"] == audit.FIRST
    AuditLog(path).append("bob", "view", "status", {})
    assert verify(path, verdict.head).lines == 6


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda lines: [*lines[:2], lines[2].replace(b"node-2", b"node-9"), *lines[3:]], "line 4: the line before was changed"),
        (lambda lines: [*lines[:2], *lines[3:]], "line 3: index 3; expected 2"),
        (lambda lines: [*lines[:2], lines[1], *lines[2:]], "line 3: index 1; expected 2"),
        (lambda lines: [lines[1], lines[0], *lines[2:]], "line 1: index 1; expected 0"),
        (lambda lines: [*lines[:4], b"{}\n"], "line 5: no line of an audit log"),
        (lambda lines: [*lines[:4], lines[4][:-20]], "line 5: the line is cut short"),
        (lambda lines: [*lines[:3], lines[3].replace(b'"role"', b'"rolle"'), lines[4]], "line 4: no line of an audit log"),
    ],
)
def test_tampering_is_named(path, change, expected):
    path.write_bytes(b"".join(change(write(path))))
    assert verify(path).problem.startswith(expected)
    result = CliRunner().invoke(app, ["verify", str(path)])
    assert result.exit_code == 1
    assert expected in result.output


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_any_flipped_byte_is_found(tmp_path_factory, place, flip):
    path = tmp_path_factory.mktemp("audit") / "log"
    content = bytearray(b"".join(write(path, 3)))
    good = verify(path)
    content[place % len(content)] ^= flip
    path.write_bytes(content)
    assert verify(path, good.head).problem


def test_missing_lines_at_the_end_need_a_noted_hash(path):
    lines = write(path)
    head = verify(path).head
    path.write_bytes(b"".join(lines[:4]))
    assert verify(path) == Verdict(4, verify(path).head)
    assert "lines at the end are missing" in verify(path, head).problem


def test_a_torn_line_is_moved_aside_and_said(path, caplog):
    lines = write(path)
    path.write_bytes(b"".join(lines[:4]) + lines[4][:33])
    AuditLog(path).append("bob", "admin", "stop", {})
    assert verify(path) == Verdict(6, verify(path).head)
    said = list(records(path))[4]
    assert (said.action, said.details["bytes"]) == ("audit.torn", 33)
    assert (path.parent / said.details["moved_to"]).read_bytes() == lines[4][:33]
    assert "ended in the middle of a line" in caplog.text


def test_a_file_that_is_no_log_is_left_alone(path):
    for content in (b"model:\n  layers: 4\n", b"some text", b'{"index":0}\n'):
        path.write_bytes(content)
        with pytest.raises(StorageError):
            AuditLog(path)
        assert path.read_bytes() == content
    path.write_bytes(b"x" * 200_000)
    with pytest.raises(StorageError, match="is no audit log"):
        AuditLog(path)


def test_two_writers_and_many_threads_make_one_chain(path):
    logs = [AuditLog(path), AuditLog(path)]
    threads = [threading.Thread(target=lambda log=log: [log.append("a", "node", "x", {}) for _ in range(10)]) for log in logs * 3]
    program = "from megascale_jax.cluster.link.audit import AuditLog; import sys\n"
    program += "log = AuditLog(sys.argv[1])\nfor number in range(10): log.append('other', '', 'y', {'number': number})"
    other = subprocess.Popen([sys.executable, "-c", program, str(path)], env=os.environ | {"PYTHONPATH": str(Path.cwd())})
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert other.wait(60) == 0
    assert verify(path) == Verdict(70, verify(path).head)


def test_a_full_disk_leaves_the_log_as_it_was(path, monkeypatch):
    lines = write(path)
    log = AuditLog(path)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="No space left on device"):
            log.append("alice", "admin", "stop", {})
    assert path.read_bytes() == b"".join(lines)
    log.append("alice", "admin", "stop", {})
    assert verify(path).problem == ""


@pytest.mark.parametrize("details", [{"x": "y" * 70_000}, {"x": float("nan")}, {"x": object()}, {"x": "\ud800"}])
def test_details_that_could_not_be_read_again_are_refused(path, details):
    log = AuditLog(path)
    with pytest.raises(UsageError, match="details of stop"):
        log.append("alice", "admin", "stop", details)
    log.append("alice", "admin", "stop", {})
    assert verify(path).lines == 1


def test_a_log_that_stays_locked_is_an_error(path, monkeypatch):
    monkeypatch.setattr(audit, "LOCK_LIMIT_S", 0.05)
    log = AuditLog(path)
    with AuditLog(path)._locked(), pytest.raises(StorageError, match="locked by another process"):
        log.append("alice", "admin", "stop", {})


def test_show_prints_the_last_lines_without_control_characters(path):
    write(path)
    AuditLog(path).append("link", "", "link.refused", {"detail": "\x1b[2J"})
    result = CliRunner().invoke(app, ["show", str(path), "--last", "2"])
    assert result.exit_code == 0
    assert "node-4" in result.output and "node-3" not in result.output
    assert "\x1b[2J" not in result.output and "link.refused" in result.output
