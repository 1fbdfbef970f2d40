"""Which devices compute slower than their peers, by a rule that noise and one disturbed moment do not set off.

Devices of one stage do the same work, so they are each other's peers. ``r`` of a device in a step is the seconds of a pass over the
median of its peers in that step, itself left out. A device is slow in a pass if all of this holds:

1. the median of ``r`` over the steps is above 1 by at least `LEAST_EXCESS`, and by `SIGMAS` times the larger of two deviations: that of its
   peers' medians from each other (1.4826 times their median absolute deviation, itself left out), and the error of a median, by how its
   stage's devices vary over the steps (1.2533 * 1.4826 * MAD / sqrt(steps); the median over the devices). With three peers the
   former says little, and the other two count;
2. so is the median by `LEAST_EXCESS` in `HOLDS` of the `PARTS` parts of the window, so one disturbed moment is none;
3. what it costs in a step is at least `LEAST_SHARE` of the step: microseconds of a short pass are nobody's concern;
4. it waits less than the median of its peers by at least `LEAST_EVIDENCE` of what it computes longer (`SlowDevice.waits_less`). Timers of
   computation end before a collective does and all devices end a step together, so whoever computes longer is waited for and
   waits less itself, by about 1 of it. A device that only seems slow, because its compute hides a wait, does not.

CPUs are such a case: their collectives run before the compute beside them, and not at the same time.

Failure case: fewer than `FEWEST_STEPS` steps or no peer; nobody is called slow then, and the notes say so.
"""

from dataclasses import dataclass

import numpy as np

from megascale_jax.views.step_times import StepTimes

LEAST_EXCESS = 0.10
"""Excess over the peers below which a device is not called slow."""
SIGMAS = 5.0
"""Deviations that an excess must exceed; thousands of devices are compared at once."""
PARTS, HOLDS = 4, 3
"""Parts of the window, and in how many of them it must hold."""
FEWEST_STEPS = 8
"""Steps that a device must have: two a part."""
LEAST_SHARE = 1e-3
"""Of a step that the excess must cost."""
LEAST_EVIDENCE = 0.3
"""Of its excess that a slow device must wait less than its peers."""

_MANY = 64
"""Devices of a stage beyond which it makes no difference to leave one out of a spread."""
_MAD = 1.4826
_MEDIAN_ERROR = 1.2533


@dataclass(frozen=True)
class SlowDevice:
    """A device that takes ``excess`` longer (0.15: 15 %) than its peers for a pass, ``excess_s`` seconds a step.

    ``device``: its number in the mesh; ``rank`` and ``host``: of its process, -1 and empty if not known;
    ``parts``: parts of the window in which it holds; ``waits_less``: how much less than its peers it waits, over ``excess_s``.
    """

    device: int
    rank: int
    host: str
    pipe: int
    data: int
    tensor: int
    optype: str
    excess: float
    excess_s: float
    parts: int
    waits_less: float

    @property
    def label(self) -> str:
        """``device 5 (rank 0, HOST)``."""
        known = [f"rank {self.rank}"] * (self.rank >= 0) + [self.host] * bool(self.host)
        return f"device {self.device}" + (f" ({', '.join(known)})" if known else "")


@dataclass(frozen=True)
class SlowDevices:
    """``excess`` by pass, float64[pipe, data, tensor] (NaN: not known); the slow ``devices``, worst first; notes, one line each."""

    excess: dict[str, np.ndarray]
    devices: tuple[SlowDevice, ...]
    notes: tuple[str, ...]


def find_slow(times: StepTimes) -> SlowDevices:
    """The slow devices of a window of steps."""
    stages = {name: _by_stage(seconds) for name, seconds in times.computed.items()}
    waits, length = _median(_by_stage(times.waited)), _median(_by_stage(times.whole))
    less = -_beside_peers(waits[None])[0]
    excess: dict[str, np.ndarray] = {}
    found: list[SlowDevice] = []
    for name, seconds in stages.items():
        more = _beside_peers(seconds)
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = seconds / (seconds - more) - 1
        relative[~np.isfinite(relative)] = np.nan
        over = _median(relative)
        excess[name] = over.reshape(times.mesh.pipe, times.mesh.data, times.mesh.tensor)
        parts = np.sum([_median(part) >= LEAST_EXCESS for part in np.array_split(relative, PARTS)], axis=0)
        cost = _median(more)
        enough = (~np.isnan(relative)).sum(axis=0) >= FEWEST_STEPS
        slow = enough & (over >= np.maximum(LEAST_EXCESS, SIGMAS * _deviation(relative, over))) & (parts >= HOLDS)
        slow &= (cost >= LEAST_SHARE * length) & (less >= LEAST_EVIDENCE * cost)
        for stage, place in np.argwhere(slow).tolist():
            device = stage * slow.shape[1] + place
            rank, host = times.ranks[device] if times.ranks else -1, times.hosts[device] if times.hosts else ""
            ratio = float(less[stage, place] / cost[stage, place])
            number, seconds_more = int(parts[stage, place]), float(cost[stage, place])
            where = times.mesh.coordinates(device)
            found.append(SlowDevice(device, rank, host, *where, name, float(over[stage, place]), seconds_more, number, ratio))
    found.sort(key=lambda slow: (-slow.excess_s, slow.device))
    return SlowDevices(excess, tuple(found), _notes(times))


def _by_stage(seconds: np.ndarray) -> np.ndarray:
    """[step, pipe, data, tensor] as [step, stage, peer]."""
    return seconds.reshape(*seconds.shape[:2], -1)


def _median(values: np.ndarray) -> np.ndarray:
    """Over the first axis, of what is known; NaN where nothing is."""
    return _sorted_medians(np.sort(values, axis=0), 0)


def _sorted_medians(ordered: np.ndarray, axis: int) -> np.ndarray:
    count = (~np.isnan(ordered)).sum(axis=axis, keepdims=True)
    low, high = np.maximum((count - 1) // 2, 0), np.maximum(count // 2, 0)
    middle = [np.take_along_axis(ordered, np.minimum(at, ordered.shape[axis] - 1), axis) for at in (low, high)]
    return np.squeeze((middle[0] + middle[1]) / 2, axis)


def _beside_peers(values: np.ndarray) -> np.ndarray:
    """Of values [..., peer] the difference to the median of the others, NaN where there is none; NaNs are nobody's peers."""
    order = np.argsort(values, axis=-1)
    ordered = np.take_along_axis(values, order, -1)
    others = (~np.isnan(ordered)).sum(axis=-1, keepdims=True) - 1
    at, last = np.arange(values.shape[-1]), values.shape[-1] - 1
    middle = [np.minimum(np.maximum(number, 0) + (at <= number), last) for number in ((others - 1) // 2, others // 2)]
    medians = (np.take_along_axis(ordered, middle[0], -1) + np.take_along_axis(ordered, middle[1], -1)) / 2
    result = np.empty_like(values)
    np.put_along_axis(result, order, np.where(others > 0, ordered - medians, np.nan), -1)
    return result


def _deviation(relative: np.ndarray, over: np.ndarray) -> np.ndarray:
    """Standard deviation of a device's excess where it is like its peers, float64[stage, peer]."""
    steps = np.maximum((~np.isnan(relative)).sum(axis=0), 1)
    within = _median(_median(np.abs(relative - over)).T)[:, None] * _MEDIAN_ERROR * _MAD / np.sqrt(steps)
    return np.fmax(within, _MAD * _peers_spread(over))


def _peers_spread(over: np.ndarray) -> np.ndarray:
    """Median absolute deviation of every device's peers, float64[stage, peer]; one peer has none."""
    count = over.shape[1]
    if count > _MANY:
        return np.broadcast_to(_median(np.abs(over - _median(over.T)[:, None]).T)[:, None], over.shape)
    peers = np.where(np.eye(count, dtype=bool), np.nan, over[:, None, :])
    middle = np.moveaxis(peers, -1, 0)
    return np.nan_to_num(_median(np.abs(middle - _median(middle))))


def _notes(times: StepTimes) -> tuple[str, ...]:
    notes = []
    if times.mesh.data * times.mesh.tensor == 1:
        notes.append("a stage is one device, so none has a peer to be compared with")
    if times.steps.size < FEWEST_STEPS:
        notes.append(f"{times.steps.size} steps are too few to call a device slow; that takes {FEWEST_STEPS}")
    return tuple(notes)
