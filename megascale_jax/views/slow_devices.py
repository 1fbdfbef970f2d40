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

Failure case: fewer than `FEWEST_STEPS` steps or no peer; nobody is called slow then, and the notes say so.
"""

from dataclasses import dataclass

import numpy as np

from megascale_jax.views.peers import beside_peers, by_stage, deviation, excess_over_peers, median
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
    stages = {name: by_stage(seconds) for name, seconds in times.computed.items()}
    waits, length = median(by_stage(times.waited)), median(by_stage(times.whole))
    less = -beside_peers(waits[None])[0]
    excess: dict[str, np.ndarray] = {}
    found: list[SlowDevice] = []
    for name, seconds in stages.items():
        more = beside_peers(seconds)
        relative = excess_over_peers(seconds, more)
        over = median(relative)
        excess[name] = over.reshape(times.mesh.pipe, times.mesh.data, times.mesh.tensor)
        parts = np.sum([median(part) >= LEAST_EXCESS for part in np.array_split(relative, min(PARTS, len(relative)))], axis=0)
        cost = median(more)
        enough = (~np.isnan(relative)).sum(axis=0) >= FEWEST_STEPS
        slow = enough & (over >= np.maximum(LEAST_EXCESS, SIGMAS * deviation(relative, over))) & (parts >= HOLDS)
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


def excess_of_steps(seconds: np.ndarray) -> np.ndarray:
    """What every device takes beyond the median of its peers in each step, as a fraction; float64 [step, pipe, data, tensor], as given.

    NaN: not known, or no peer.
    """
    stages = by_stage(seconds)
    return excess_over_peers(stages, beside_peers(stages)).reshape(seconds.shape)


def _notes(times: StepTimes) -> tuple[str, ...]:
    notes = []
    if times.mesh.data * times.mesh.tensor == 1:
        notes.append("a stage is one device, so none has a peer to be compared with")
    if times.steps.size < FEWEST_STEPS:
        notes.append(f"{times.steps.size} steps are too few to call a device slow; that takes {FEWEST_STEPS}")
    return tuple(notes)
