"""The table of operations that all analysis reads: one row for each operation of each worker, as columns.

A *worker* is a place ``(pipe, data, tensor)`` in the mesh: a device, or several in lock-step where a trace has only one row for them.
An operation is one of `OPTYPES`. Computation runs for as long as its work takes; communication also waits for its
peers, so its duration says little before `dependencies.transfer_durations` has taken the waiting off.

Failure case: columns that do not fit each other or the layout are refused (TraceError) before anything is computed from them.
"""

from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np

from megascale_jax.config.layout import MeshShape
from megascale_jax.errors import TraceError

COMPUTE = ("forward", "backward", "weight-gradient", "optimizer", "garbage-collection")
"""Operation types that wait for no other worker."""

TRANSFERS = ("forward-send", "forward-recv", "backward-send", "backward-recv")
"""Between neighbours of a pipeline: activations forwards, their gradients backwards."""

SYNCS = ("params-sync", "grads-sync", "embedding-sync", "tensor-sync", "gradient-norm")
"""Collectives: weights and gradients over ``data``, tied embeddings over the ends of ``pipe``, gradients of replicated
parameters over ``tensor``, the norm over all workers."""

OPTYPES = (*COMPUTE, *TRANSFERS, *SYNCS)
CODES = {name: code for code, name in enumerate(OPTYPES)}
"""Value of an operation type in the column ``optype``."""

MODEL_WORK = ("forward", "backward", "weight-gradient")
"""Operation types that work on one micro-batch in one chunk."""

NONE = -1
"""Value of ``microbatch`` and ``chunk`` where an operation has none."""


@dataclass(frozen=True)
class TraceLayout:
    """How the traced job was spread: its mesh, model chunks of a stage, devices that stand behind one worker, and schedule."""

    mesh: MeshShape
    chunks: int = 1
    devices_per_worker: int = 1
    schedule: str = "1f1b"


@dataclass(frozen=True)
class Operations:
    """Columns of one length ``n``, and the layout. Raises TraceError where they contradict each other.

    ``step``, ``rank`` (the device's number in the job), ``pipe``, ``data``, ``tensor``, ``microbatch``, ``chunk``: int64;
    ``optype``: int64 codes (`CODES`); ``start_s``, ``duration_s``: float64 seconds, comparable within a step. ``microbatch`` and
    ``chunk`` are `NONE` where an operation belongs to no single one.
    """

    step: np.ndarray
    rank: np.ndarray
    pipe: np.ndarray
    data: np.ndarray
    tensor: np.ndarray
    optype: np.ndarray
    microbatch: np.ndarray
    chunk: np.ndarray
    start_s: np.ndarray
    duration_s: np.ndarray
    layout: TraceLayout

    def __post_init__(self) -> None:
        for name in COLUMNS:
            value = np.asarray(getattr(self, name))
            wanted = np.float64 if name.endswith("_s") else np.int64
            if not np.can_cast(value.dtype, wanted, "same_kind"):
                raise TraceError(f"column {name} holds {value.dtype}, expected {np.dtype(wanted)}")
            object.__setattr__(self, name, value.astype(wanted, copy=False))
        if shapes := {np.shape(getattr(self, name)) for name in COLUMNS} - {(self.step.size,)}:
            raise TraceError(f"columns of shape {sorted(shapes)[0]} beside {self.step.size} steps; expected one value a row in each")
        if not self.step.size:
            raise TraceError("a trace without operations; nothing can be said about it")
        self._check_values()

    def _check_values(self) -> None:
        mesh = self.layout.mesh
        for name, low, end in (
            ("pipe", 0, mesh.pipe),
            ("data", 0, mesh.data),
            ("tensor", 0, mesh.tensor),
            ("optype", 0, len(OPTYPES)),
            ("chunk", NONE, self.layout.chunks),
            ("microbatch", NONE, self.step.size),
        ):
            column = getattr(self, name)
            if (wrong := (column < low) | (column >= end)).any():
                row = int(wrong.argmax())
                raise TraceError(f"row {row}: {name} is {column[row]}, the layout has {low} to {end - 1}")
        for name in ("start_s", "duration_s"):
            column = getattr(self, name)
            if (wrong := ~np.isfinite(column)).any():
                raise TraceError(f"row {int(wrong.argmax())}: {name} is {column[wrong][0]}, expected a finite number of seconds")
        if (wrong := self.duration_s < 0).any():
            raise TraceError(f"row {int(wrong.argmax())}: duration_s is {self.duration_s[wrong][0]:g}, expected 0 or more")
        work = np.isin(self.optype, [CODES[name] for name in (*MODEL_WORK, *TRANSFERS)])
        if (wrong := work & ((self.microbatch < 0) | (self.chunk < 0))).any():
            row = int(wrong.argmax())
            raise TraceError(f"row {row}: a {OPTYPES[self.optype[row]]} without its micro-batch and chunk")

    def __len__(self) -> int:
        return self.step.size

    @property
    def end_s(self) -> np.ndarray:
        """End of every operation, float64[n]."""
        return self.start_s + self.duration_s

    @property
    def worker(self) -> np.ndarray:
        """Number of every operation's worker, int64[n], in the order of `MeshShape`: ``tensor`` fastest, ``pipe`` slowest."""
        mesh = self.layout.mesh
        return (self.pipe * mesh.data + self.data) * mesh.tensor + self.tensor

    def rows(self, index: np.ndarray) -> Self:
        """The rows of an index or a mask, in its order. Raises TraceError if there is none."""
        return replace(self, **{name: getattr(self, name)[index] for name in COLUMNS})

    def is_of(self, *optypes: str) -> np.ndarray:
        """Which rows are of one of these operation types, bool[n]."""
        return np.isin(self.optype, [CODES[name] for name in optypes])


COLUMNS = tuple(field.name for field in fields(Operations) if field.name != "layout")
