"""`metrics.jsonl`: one JSON object per line, each step once, whatever happened to earlier tries of the run.

Every line is one unbuffered write, so that a killed process loses nothing it wrote. When a run goes on from step r, the
lines of steps beyond r (written by a try that broke after its last checkpoint) and a line torn by a crash are dropped; without a
step to go on from, all are. A disk that refuses a write never stops training: the error is counted in `errors` and the first one
is logged as a warning; a half-written line is cut off again.

A line has `step`, `kind`, `wall_s` (seconds of training, earlier tries included) and then numbers. The usual ones:
`loss`, `grad_norm`, `learning_rate`, `tokens` (row positions consumed since step 0), `tokens_per_s`, `mfu`, `skipped` (1
when the update of this very step was skipped), `data_wait_s` (seconds that the loop waited for the rows of this step) for `train`;
`loss` for `evaluation`; an `event` has its name under `event`. A number that is not finite is null and its key is listed under
`non_finite`.
"""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, SupportsFloat

from megascale_jax.errors import RunFolderError
from megascale_jax.observe.report import replace_file
from megascale_jax.observe.tensorboard import TensorBoardMirror

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
EVENT_RESUME = "resume"
EVENT_SKIP = "skip"
EVENT_SPIKE = "spike"
EVENT_CHECKPOINT = "checkpoint"
EVENT_CHECKPOINT_ERROR = "checkpoint_error"
Kind = Literal["train", "evaluation", "event"]

_RESERVED = frozenset({"step", "kind", "wall_s", "event", "non_finite"})
_logger = logging.getLogger(__name__)


class MetricsWriter:
    """Appends to `metrics.jsonl` in `run_folder` and mirrors numbers to TensorBoard.

    `resume_step` is the number of completed steps in the checkpoint that the run goes on from, None for a run from the
    start. Only one process may write. `errors` counts the writes that the disk refused.
    """

    def __init__(
        self, run_folder: Path, *, tensorboard: bool, resume_step: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.errors = 0
        self._path = run_folder / METRICS_FILE
        self._file: int | None = None
        self._torn = False
        self._clock = clock
        self._earlier_s = self._keep_lines(-1 if resume_step is None else resume_step)
        self._began = clock()
        self._mirror: TensorBoardMirror | None = None
        if tensorboard:
            try:
                self._mirror = TensorBoardMirror(run_folder / TENSORBOARD_FOLDER, first_step=0 if resume_step is None else resume_step + 1)
            except OSError as error:
                self._count(error)

    @property
    def wall_s(self) -> float:
        """Seconds of training so far, earlier tries included."""
        return self._earlier_s + self._clock() - self._began

    def train(self, step: int, values: Mapping[str, SupportsFloat | None]) -> None:
        """Append the numbers of a training step. None means not known: the key is left out."""
        self._write(step, "train", {}, values)

    def evaluation(self, step: int, values: Mapping[str, SupportsFloat | None]) -> None:
        """Append the numbers of an evaluation after `step`; `loss` is the held-out loss in nats per token."""
        self._write(step, "evaluation", {}, values)

    def event(self, step: int, name: str, values: Mapping[str, SupportsFloat | None] | None = None) -> None:
        """Append something that happened at `step`: `resume`, `skip`, `stop`, `checkpoint_error`, ..."""
        self._write(step, "event", {"event": name}, values or {})

    def close(self) -> None:
        """Close both files; never raises for the disk."""
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None
        if self._mirror is not None:
            self._mirror.close()
            self._mirror = None

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, step: int, kind: Kind, extra: Mapping[str, str], values: Mapping[str, SupportsFloat | None]) -> None:
        assert not _RESERVED & values.keys(), f"reserved keys: {sorted(_RESERVED & values.keys())}"
        numbers = {key: int(value) if isinstance(value, int) else float(value) for key, value in values.items() if value is not None}
        finite = {key: value for key, value in numbers.items() if math.isfinite(value)}
        record: dict[str, Any] = {"step": int(step), "kind": kind, "wall_s": round(self.wall_s, 3), **extra}
        record |= {key: finite.get(key) for key in numbers}
        if len(finite) < len(numbers):
            record["non_finite"] = [key for key in numbers if key not in finite]
        try:
            self._append(json.dumps(record, allow_nan=False).encode() + b"\n")
        except OSError as error:
            self._count(error)
        if self._mirror is not None:
            try:
                self._mirror.add(step, kind, finite)
            except OSError as error:
                self._count(error)
                self._mirror.close()
                self._mirror = None

    def _append(self, line: bytes) -> None:
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        if self._torn:
            line = b"\n" + line
        size = os.fstat(self._file).st_size
        try:
            written = 0
            while written < len(line):
                written += os.write(self._file, line[written:])
            self._torn = False
        except OSError:
            self._torn = True
            with suppress(OSError):
                os.ftruncate(self._file, size)
                self._torn = line.startswith(b"\n")
            raise

    def _keep_lines(self, last_step: int) -> float:
        """Rewrite the file without lines that do not count; returns `wall_s` of the last line kept."""
        try:
            content = self._path.read_bytes() if self._path.exists() else b""
            lines = content.splitlines(keepends=True)
            kept = [(line, record) for line in lines if (record := _record(line)) and record["step"] <= last_step]
            text = b"".join(line for line, _ in kept)
            if text != content:
                replace_file(self._path, text)
        except OSError as error:
            self._torn = True
            self._count(error)
            return 0.0
        return max((float(record["wall_s"]) for _, record in kept), default=0.0)

    def _count(self, error: OSError) -> None:
        self.errors += 1
        if self.errors == 1:
            _logger.warning("metrics cannot be written (%s); training goes on, further failures are only counted", error)


def _record(line: bytes) -> dict[str, Any] | None:
    """The object of a whole line, or None for a torn one."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int or not isinstance(record.get("wall_s"), int | float):
        return None
    return record if "kind" in record else None


def read_metrics(run_folder: Path, kind: Kind | None = None) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl` in order, of one kind if given. Torn lines are left out, so a running run can be read.

    Raises RunFolderError if the folder has no such file.
    """
    path = run_folder / METRICS_FILE
    if not path.is_file():
        raise RunFolderError(f"{run_folder} has no {METRICS_FILE}; expected the folder of a run, such as runs/quickstart")
    records = (_record(line) for line in path.read_bytes().splitlines(keepends=True))
    return [record for record in records if record is not None and kind in (None, record["kind"])]
