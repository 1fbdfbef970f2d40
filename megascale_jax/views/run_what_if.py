"""What slow devices, stages and passes of a run cost: its detailed steps replayed with parts of them normal (`phases_replay`).

    T, T_ideal           replayed as recorded, and with every compute as long as the median of its stage
    slowdown             = T / T_ideal
    slowdown of part X   = T(X as recorded, all else ideal) / T_ideal
    explained by part X  = (T - T(X ideal, all else as recorded)) / (T - T_ideal)
    gaps                 = T_recorded / T: how well the replay repeats what was recorded

Causes are taken away one after the other, as in `causes`: the devices that are slow by the rule of `slow_devices`, in the passes
in which they are, all together (`split_loss`); passes that vary, by `IRREGULAR`, for what that still costs; the stage with most work.
Their shares are of ``T`` less the time without any of them. Work of a stage by design is in no device's slowdown. Micro-batches of a run
have one shape, so their length is no cause here.

Failure case: without a detailed step in the window there are no replays; slow devices are causes all the same, of unknown share.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megascale_jax.config.layout import MeshShape
from megascale_jax.views.causes import IRREGULAR, LEAST_LOSS, Cause, split_loss
from megascale_jax.views.effects import LEAST_EXCESS as LEAST_STAGE_EXCESS
from megascale_jax.views.phases_replay import Replay
from megascale_jax.views.slow_devices import SlowDevice
from megascale_jax.views.step_times import COMPUTED
from megascale_jax.views.what_if import EXACT_WORKERS, MEASURABLE, Part, Worker

_AT_ONCE = 1 << 20
"""Devices times what-ifs of one replay."""


@dataclass(frozen=True)
class RunCosts:
    """Numbers of a window of steps; None: no detailed step.

    ``workers``, by the numbers of devices: the slowest first; all, or those slow by the rule where there are more than `EXACT_WORKERS`.
    """

    slowdown: float | None
    gaps: float | None
    causes: tuple[Cause, ...]
    unexplained: float | None
    workers: tuple[Worker, ...]
    stages: dict[int, Part]
    optypes: dict[str, Part]
    steps: tuple[dict[str, float], ...]


def find_costs(replays: Sequence[Replay], mesh: MeshShape, slow: Sequence[SlowDevice]) -> RunCosts:
    """What the parts of a run cost, by the replays of its detailed steps."""
    by_number: dict[int, list[SlowDevice]] = {}
    for device in slow:
        by_number.setdefault(device.device, []).append(device)
    if not replays:
        causes = tuple(replace(_cause(found), share=math.nan, loss=math.nan) for found in by_number.values())
        return RunCosts(None, None, causes, None, (), {}, {}, ())
    return _Costs(replays, mesh, by_number).all()


def _cause(slow: Sequence[SlowDevice]) -> Cause:
    """The cause that one device is, slow in some passes."""
    worst = slow[0]
    words = ", ".join(f"{one.excess:.0%} in {one.optype}" for one in slow)
    excess = {one.optype: one.excess for one in slow}
    name = f"{worst.label} slower than its peers: {words}"
    ranks = (worst.rank,) if worst.rank >= 0 else ()
    place = {"pipe": worst.pipe, "data": worst.data}
    return Cause("worker", name, optype=worst.optype, **place, ranks=ranks, excess=excess, devices=(worst.device,))


class _Costs:
    """The replays, asked many what-ifs at once. A what-if is which computes are ideal: bool[optype, pipe, data, tensor]."""

    def __init__(self, replays: Sequence[Replay], mesh: MeshShape, slow: dict[int, list[SlowDevice]]) -> None:
        self._replays, self._mesh, self._slow = replays, mesh, slow
        self._shape = (len(COMPUTED), mesh.pipe, mesh.data, mesh.tensor)
        nothing, everything = np.zeros(self._shape, bool), np.ones(self._shape, bool)
        self._per_step = np.array([replay.times(np.array([nothing, everything])) for replay in replays])
        self._real_s, self._ideal_s = self._per_step.sum(axis=0).tolist()

    def all(self) -> RunCosts:
        """All numbers."""
        causes, unexplained = self._causes()
        ranks = range(self._mesh.size) if self._mesh.size <= EXACT_WORKERS else sorted(self._slow)
        present = {phase.optype for replay in self._replays for phase in replay.phases}
        optypes = [name for name in COMPUTED if name in present]
        masks = [self._mask(pipe=stage) for stage in range(self._mesh.pipe)]
        masks += [self._mask(optype=name) for name in optypes]
        masks += [self._mask(rank=rank) for rank in ranks]
        parts = iter(self._parts(masks))
        stages = {stage: next(parts) for stage in range(self._mesh.pipe)}
        by_optype = {name: next(parts) for name in optypes}
        workers = [
            Worker(part.slowdown, part.explained, rank, *self._mesh.coordinates(rank)) for rank, part in zip(ranks, parts, strict=True)
        ]
        recorded = [replay.recorded_s for replay in self._replays]
        steps = tuple(
            {"step": replay.step, "recorded_s": replay.recorded_s, "replayed_s": real, "ideal_s": ideal, "slowdown": real / ideal}
            for replay, (real, ideal) in zip(self._replays, self._per_step.tolist(), strict=True)
        )
        return RunCosts(
            self._real_s / self._ideal_s,
            sum(recorded) / self._real_s,
            tuple(causes),
            unexplained,
            tuple(sorted(workers, key=lambda worker: (-worker.slowdown, worker.rank))),
            stages,
            by_optype,
            steps,
        )

    def _mask(self, *, optype: str | None = None, pipe: int | None = None, rank: int | None = None) -> np.ndarray:
        mask = np.zeros(self._shape, bool)
        place = (slice(pipe, None if pipe is None else pipe + 1),) if rank is None else self._mesh.coordinates(rank)
        mask[(slice(None) if optype is None else COMPUTED.index(optype), *place)] = True
        return mask

    def _totals(self, what_ifs: Sequence[np.ndarray]) -> np.ndarray:
        """Seconds of all replays together, float64[what-if]."""
        chunk = max(_AT_ONCE // self._mesh.size, 1)
        parts = [np.array(what_ifs[first : first + chunk]) for first in range(0, len(what_ifs), chunk)]
        return np.concatenate([np.sum([replay.times(part) for replay in self._replays], axis=0) for part in parts])

    def _parts(self, masks: Sequence[np.ndarray]) -> list[Part]:
        alone = self._totals([~mask for mask in masks]) / self._ideal_s
        lost = self._real_s - self._ideal_s
        without = self._totals(masks)
        is_little = lost < MEASURABLE * self._ideal_s
        explained = np.zeros(len(masks)) if is_little else (self._real_s - without) / lost
        return [Part(*numbers) for numbers in zip(alone.tolist(), explained.tolist(), strict=True)]

    def _causes(self) -> tuple[list[Cause], float]:
        """The largest first, and the share of none."""
        causes, taken = self._workers()
        left_s = float(self._totals([taken])[0])
        for optype in filter(self._varies, COMPUTED):
            mask = taken | self._mask(optype=optype)
            total = float(self._totals([mask])[0])
            loss = (left_s - total) / self._ideal_s
            if loss >= LEAST_LOSS:
                causes.append(Cause("optype", f"{optype} varies, and no slow device explains it", loss=loss, optype=optype))
                taken, left_s = mask, total
        lost_s = self._real_s - self._ideal_s
        for cause in self._stage():
            causes.append(cause)
            lost_s += cause.loss * self._ideal_s
        if lost_s < MEASURABLE * self._ideal_s:
            return [], 0.0
        causes = [replace(cause, share=cause.loss * self._ideal_s / lost_s) for cause in causes]
        return sorted(causes, key=lambda cause: -cause.share), 1 - sum(cause.share for cause in causes)

    def _workers(self) -> tuple[list[Cause], np.ndarray]:
        """Slow devices that cost something, and which computes are ideal without them."""
        nothing = np.zeros(self._shape, bool)
        masks = [self._worker_mask(slow) for slow in self._slow.values()]
        removed = np.any(masks or [nothing], axis=0)
        without_s = float(self._totals([removed])[0])
        joint = (self._real_s - without_s) / self._ideal_s
        if joint < LEAST_LOSS:
            return [], nothing
        alone = (self._totals([removed & ~mask for mask in masks]) - without_s) / self._ideal_s
        losses = split_loss(joint, alone.tolist())
        return [replace(_cause(slow), loss=loss) for slow, loss in zip(self._slow.values(), losses, strict=True) if loss], removed

    def _worker_mask(self, slow: Sequence[SlowDevice]) -> np.ndarray:
        return np.any([self._mask(optype=one.optype, rank=one.device) for one in slow], axis=0)

    def _varies(self, optype: str) -> bool:
        """Whether a pass varies by more than noise on devices that are not slow."""
        usual = ~np.any([self._worker_mask(slow) for slow in self._slow.values()] or [np.zeros(self._shape, bool)], axis=0)
        usual = usual[COMPUTED.index(optype)]
        apart, normal = [], []
        for replay in self._replays:
            own = [k for k, phase in enumerate(replay.phases) if phase.optype == optype]
            ideal = np.broadcast_to(replay.ideal[own], replay.computed[own].shape)
            apart.append((replay.computed[own] - ideal)[:, usual].ravel())
            normal.append(ideal[:, usual].ravel())
        differences, lengths = np.concatenate(apart), np.concatenate(normal)
        return bool(lengths.size and math.sqrt(float(np.mean(differences**2))) >= IRREGULAR * float(lengths.mean()) > 0)

    def _stage(self) -> list[Cause]:
        """The stage with the most work, if that costs something."""
        work = np.sum([replay.ideal[:, :, 0, 0].sum(axis=0) for replay in self._replays], axis=0)
        excess = work / work.mean() - 1
        pipe = int(excess.argmax())
        if excess[pipe] < LEAST_STAGE_EXCESS:
            return []
        factor = (work.mean() / work)[:, None, None]
        nothing = np.zeros((1, *self._shape), bool)
        shape = self._shape[1:]
        even = [replace(one, computed=np.broadcast_to(one.ideal * factor, (len(one.phases), *shape))) for one in self._replays]
        loss = 1 - float(sum(one.times(nothing)[0] for one in even)) / self._ideal_s
        if loss < LEAST_LOSS:
            return []
        return [Cause("stage", f"stage {pipe} has {excess[pipe]:.0%} more work than the mean", loss=loss, pipe=pipe)]
