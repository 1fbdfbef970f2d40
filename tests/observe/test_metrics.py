"""`metrics.jsonl` under crashes, resumes and a disk that refuses."""

import json
import logging
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboardX.proto import event_pb2

from megascale_jax.errors import RunFolderError
from megascale_jax.observe import metrics
from megascale_jax.observe.metrics import MetricsWriter, read_metrics


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def writer(folder: Path, resume_step: int | None = None, clock: Clock | None = None, tensorboard: bool = False) -> MetricsWriter:
    return MetricsWriter(folder, tensorboard=tensorboard, resume_step=resume_step, clock=clock or Clock())


def write_steps(folder: Path, steps: range, resume_step: int | None = None) -> None:
    with writer(folder, resume_step) as out:
        for step in steps:
            out.train(step, {"loss": float(step)})


def steps_of(folder: Path) -> list[int]:
    return [record["step"] for record in read_metrics(folder)]


def test_lines_hold_what_was_written_when_read(tmp_path: Path) -> None:
    clock = Clock()
    with writer(tmp_path, clock=clock) as out:
        clock.now += 1.5
        out.train(1, {"loss": np.float32(2.5), "tokens": 4096, "mfu": None, "skipped": True})
        out.evaluation(1, {"loss": 2.25})
        out.event(1, "resume", {"seconds": 3.0})
    assert read_metrics(tmp_path) == [
        {"step": 1, "kind": "train", "wall_s": 1.5, "loss": 2.5, "tokens": 4096, "skipped": 1},
        {"step": 1, "kind": "evaluation", "wall_s": 1.5, "loss": 2.25},
        {"step": 1, "kind": "event", "wall_s": 1.5, "event": "resume", "seconds": 3.0},
    ]
    assert [record["kind"] for record in read_metrics(tmp_path, "evaluation")] == ["evaluation"]


def test_number_is_null_and_named_when_not_finite(tmp_path: Path) -> None:
    with writer(tmp_path) as out:
        out.train(1, {"loss": float("nan"), "grad_norm": float("inf"), "learning_rate": 0.1})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in line and "Infinity" not in line
    record = json.loads(line)
    assert record["loss"] is None and record["grad_norm"] is None and record["learning_rate"] == 0.1
    assert record["non_finite"] == ["loss", "grad_norm"]


def test_line_is_on_disk_when_the_writer_is_still_open(tmp_path: Path) -> None:
    out = writer(tmp_path)
    out.train(1, {"loss": 1.0})
    assert steps_of(tmp_path) == [1]
    out.close()


def test_each_step_occurs_once_when_resumed_before_the_end_of_a_broken_try(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 10))
    write_steps(tmp_path, range(6, 13), resume_step=5)
    assert steps_of(tmp_path) == list(range(1, 13))


def test_old_lines_are_dropped_when_the_run_starts_anew(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 10))
    write_steps(tmp_path, range(1, 3))
    assert steps_of(tmp_path) == [1, 2]


def test_torn_last_line_is_dropped_when_resumed(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 5))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-7])
    assert steps_of(tmp_path) == [1, 2, 3]
    write_steps(tmp_path, range(5, 7), resume_step=4)
    assert steps_of(tmp_path) == [1, 2, 3, 5, 6]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_line_is_dropped_when_only_its_end_is_missing(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    write_steps(tmp_path, range(4, 6), resume_step=3)
    assert steps_of(tmp_path) == [1, 2, 4, 5]


@given(cut=st.integers(0, 400), resume=st.integers(0, 6))
def test_file_stays_whole_when_torn_anywhere(tmp_path_factory: pytest.TempPathFactory, cut: int, resume: int) -> None:
    folder = tmp_path_factory.mktemp("run")
    write_steps(folder, range(1, 7))
    path = folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:cut])
    whole = steps_of(folder)
    assert whole == list(range(1, len(whole) + 1))
    write_steps(folder, range(7, 8), resume_step=resume)
    assert steps_of(folder) == [step for step in whole if step <= resume] + [7]
    assert len(path.read_text().splitlines()) == len(steps_of(folder))


def test_wall_time_goes_on_when_resumed(tmp_path: Path) -> None:
    clock = Clock()
    with writer(tmp_path, clock=clock) as out:
        clock.now += 100.0
        out.train(1, {})
        clock.now += 900.0
        out.train(2, {})
    with writer(tmp_path, resume_step=1, clock=clock) as out:
        clock.now += 5.0
        out.train(2, {})
        assert out.wall_s == 105.0
    assert [record["wall_s"] for record in read_metrics(tmp_path)] == [100.0, 105.0]


def test_file_is_left_alone_when_the_resumed_run_has_nothing_to_drop(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 4))
    inode = (tmp_path / "metrics.jsonl").stat().st_ino
    write_steps(tmp_path, range(4, 5), resume_step=3)
    assert (tmp_path / "metrics.jsonl").stat().st_ino == inode and steps_of(tmp_path) == [1, 2, 3, 4]


def test_training_goes_on_and_half_a_line_is_cut_off_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real_write, room = os.write, 20

    def full(descriptor: int, data: bytes) -> int:
        nonlocal room
        if room <= 0:
            raise OSError(28, "No space left on device")
        written = real_write(descriptor, data[:room])
        room -= written
        return written

    out = writer(tmp_path)
    out.train(1, {"loss": 1.0})
    monkeypatch.setattr(metrics.os, "write", full)
    with caplog.at_level(logging.WARNING):
        out.train(2, {"loss": 2.0})
        out.train(3, {"loss": 3.0})
    monkeypatch.setattr(metrics.os, "write", real_write)
    out.train(4, {"loss": 4.0})
    out.close()
    assert out.errors == 2
    assert len(caplog.records) == 1 and "No space left" in caplog.text
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 4]


def test_later_lines_are_read_when_half_a_line_could_not_be_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = os.write

    def torn(descriptor: int, data: bytes) -> int:
        real_write(descriptor, data[:9])
        raise OSError(5, "Input/output error")

    def refuse(_: int, __: int) -> None:
        raise OSError(5, "Input/output error")

    out = writer(tmp_path)
    out.train(1, {})
    monkeypatch.setattr(metrics.os, "write", torn)
    monkeypatch.setattr(metrics.os, "ftruncate", refuse)
    out.train(2, {})
    monkeypatch.setattr(metrics.os, "write", real_write)
    out.train(3, {})
    out.train(4, {})
    out.close()
    assert steps_of(tmp_path) == [1, 3, 4] and out.errors == 1


def test_training_goes_on_when_old_lines_cannot_be_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_steps(tmp_path, range(1, 4))

    def full(_: Path, __: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(metrics, "replace_file", full)
    with writer(tmp_path, resume_step=1) as out:
        out.train(2, {})
        assert out.errors == 1


_FILL_THE_DISK = """
import resource, signal, sys
from pathlib import Path
from megascale_jax.observe.metrics import MetricsWriter
signal.alarm(20)
folder = Path(sys.argv[1])
out = MetricsWriter(folder, tensorboard=True, resume_step=None)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
for step in range(1, 200):
    out.train(step, {"loss": 1.0})
out.close()
print(out.errors)
"""


def test_nothing_blocks_when_the_disk_is_full_under_tensorboard(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _FILL_THE_DISK, str(tmp_path)], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    steps = steps_of(tmp_path)
    assert 10 < len(steps) < 100 and steps == list(range(1, len(steps) + 1))
    # Every refused line, and the mirror's one failure.
    assert int(done.stdout) == 199 - len(steps) + 1
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"\n")
    assert done.stderr.count("cannot be written") == 1


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """What TensorBoard shows of `tag`: files in the order of their names; a START event at step n hides what was logged from n on."""
    shown: list[tuple[int, float]] = []
    for path in sorted((folder / "tensorboard").iterdir()):
        content = path.read_bytes()
        while content:
            # A record: uint64 length, its checksum (4 bytes), the event, its checksum (4 bytes).
            (length,) = struct.unpack_from("<Q", content)
            event = event_pb2.Event.FromString(content[12 : 12 + length])  # pyright: ignore[reportAttributeAccessIssue]  (made at import time)
            content = content[16 + length :]
            if event.HasField("session_log"):
                shown = [(step, value) for step, value in shown if step < event.step]
            shown += [(event.step, value.simple_value) for value in event.summary.value if value.tag == tag]
    return shown


def test_tensorboard_shows_each_step_once_when_resumed(tmp_path: Path) -> None:
    for steps, resume_step, offset in ((range(1, 6), None, 0), (range(4, 8), 3, 100)):
        with writer(tmp_path, resume_step, tensorboard=True) as out:
            for step in steps:
                out.train(step, {"loss": float(step + offset), "grad_norm": float("nan")})
            out.evaluation(steps[-1], {"loss": 0.5})
    assert scalars(tmp_path, "train/loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 104.0), (5, 105.0), (6, 106.0), (7, 107.0)]
    assert scalars(tmp_path, "evaluation/loss") == [(7, 0.5)]


def test_no_tensorboard_folder_when_switched_off(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 2))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_reserved_key_is_our_mistake(tmp_path: Path) -> None:
    with writer(tmp_path) as out, pytest.raises(AssertionError, match="step"):
        out.train(1, {"step": 2.0})


def test_folder_is_refused_when_it_has_no_metrics(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="expected the folder of a run"):
        read_metrics(tmp_path)
