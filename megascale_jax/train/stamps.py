"""From the stamps of a step to events: what each device of this process computed, and what it waited for.

Every step gives sums: of each unit (a micro-batch in a chunk) its forward, backward and weight gradients, of each pass what it waited for
on which mesh axis, gathers, scatters, norm and optimizer. Every `detail_every`-th step also gives every phase of every tick. Names of
phases are those of their operations (`parallel/pipeline/operations.py`).

A GPU counts from an epoch of its own. `calibrate` reads it between two looks at the host's clock; the difference is
good to half of what lay in between. CPUs read the host's clock itself.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import jax
import numpy as np

from megascale_jax.kernels.clock.api import STAMP, nanoseconds
from megascale_jax.observe.events import STEP_END, Events
from megascale_jax.observe.pulse import PASSED, Passed
from megascale_jax.observe.step_sums import IDLE, STEP_NAMES, STEP_SPAN
from megascale_jax.parallel.pipeline.stamps import LAST_TICK, StepStamps
from megascale_jax.parallel.plan import Plan

_TRIES = 5


class StampEvents:
    """Writes the stamps of this process's devices. Without a clock, or without events, nothing is done."""

    def __init__(self, plan: Plan, events: Events, detail_every: int):
        self._plan, self._events, self._detail_every = plan, events, detail_every
        self.is_on = plan.executor.clock is not None and events.is_on
        if not self.is_on:
            return
        self._stamps = plan.executor.stamps(plan.experiment.num_micro_batches)
        own = {device: place for place, device in np.ndenumerate(plan.mesh.devices) if device.process_index == jax.process_index()}
        self._places = {device: (int(np.ravel_multi_index(place, plan.mesh.devices.shape)), place[0]) for device, place in own.items()}
        self._reduced = self._stamps.end[self._stamps.name == self._stamps.names.index(STEP_NAMES[2])].item()
        """Number of the stamp behind the reduction that all devices leave together."""
        self._ticks = np.array([_shown_tick(int(tick)) for tick in self._stamps.tick], np.int32)
        self._sums = cache(lambda stage: _Sums.of(self._stamps, stage))
        self._units = cache(self._stamps.units)
        self._offsets_ns = dict.fromkeys(self._places, 0)
        self._watch = _Watch(self._stamps, self._units)

    def begin(self, first: int) -> None:
        """The next step is ``first + 1``, and the devices have nothing to do.

        From now on each pulse of the events says where the devices are in their step (`pulse.py`).
        """
        if not self.is_on:
            return
        self.calibrate()
        clock = self._plan.executor.clock
        assert clock is not None, "it is on"
        taken = clock.taken
        before = {number: taken(number) for number, _ in self._places.values()}

        def pulse() -> None:
            for number, stage in self._places.values():
                count, base = taken(number), before[number]
                if count is not None and base is not None:
                    self._watch.tell(self._events, number, stage, first + 1, count - base)

        self._events.each_pulse(pulse)

    @cached_property
    def _read_clock(self) -> Callable[[jax.Array, jax.Array], jax.Array]:
        clock = self._plan.executor.clock
        assert clock is not None, "it is on"
        return jax.jit(clock.stamp)

    def calibrate(self) -> None:
        """Compare the devices' clocks with the host's; the devices must have nothing to do."""
        clock = self._plan.executor.clock
        if not self.is_on or clock is None or clock.is_of_host:
            return
        read = self._read_clock
        for device in self._places:
            zero = jax.device_put(np.zeros(STAMP.shape, STAMP.dtype), device)
            read(zero, zero).block_until_ready()  # compiled
            tries = []
            for _ in range(_TRIES):
                before_ns = time.monotonic_ns()
                seen = np.asarray(read(zero, zero))
                after_ns = time.monotonic_ns()
                tries.append((after_ns - before_ns, (before_ns + after_ns) // 2 - int(nanoseconds(seen))))
            within_ns, self._offsets_ns[device] = min(tries)
            self._events.instant("device clock", device=self._places[device][0], text=f'{{"within_ns": {within_ns // 2}}}')

    def write(self, step: int, stamps: jax.Array) -> None:
        """The stamps of a step, int32 ``[devices, n, 2]``, of which this process has its devices' rows."""
        for shard in stamps.addressable_shards if self.is_on else ():
            number, stage = self._places[shard.device]
            ns_n = nanoseconds(np.asarray(shard.data)[0]) + self._offsets_ns[shard.device]
            self._write_device(step, number, stage, ns_n)

    def _write_device(self, step: int, device: int, stage: int, ns_n: np.ndarray) -> None:
        table, sums = self._stamps, self._sums(stage)
        begin_ns, lasted_ns = ns_n[table.begin], ns_n[table.end] - ns_n[table.begin]
        self._events.many(
            name=(sums.name, sums.names),
            lane=(sums.lane, table.lanes),
            begin_ns=begin_ns[sums.first],
            duration_ns=np.bincount(sums.group, lasted_ns, len(sums.first)).astype(np.int64),
            device=device,
            step=step,
            microbatch=sums.micro_batch,
            chunk=sums.chunk,
        )
        self._events.record(STEP_SPAN, int(ns_n[0]), int(ns_n[-1] - ns_n[0]), lane="compute", device=device, step=step)
        self._events.instant(STEP_END, begin_ns=int(ns_n[self._reduced]), lane="compute", device=device, step=step)
        if step % self._detail_every == 0:
            micro_batch, chunk = self._units(stage)
            self._events.many(
                name=(table.name, table.names),
                lane=(table.lane, table.lanes),
                begin_ns=begin_ns,
                duration_ns=lasted_ns,
                device=device,
                step=step,
                tick=self._ticks,
                microbatch=micro_batch,
                chunk=chunk,
            )


@dataclass(frozen=True)
class _Watch:
    """Which span a device is in by the number of stamps that it has taken."""

    table: StepStamps
    units: Callable[[int], tuple[np.ndarray, np.ndarray]]

    def tell(self, events: Events, device: int, stage: int, first: int, taken: int) -> None:
        """Record where a device is that has taken so many stamps, the first ones of step ``first``; at a step's end the step is done."""
        table = self.table
        done, stamps = divmod(taken, table.count)
        place = {"lane": "compute", "device": device}
        if not stamps:
            passed = Passed(stamps=table.count if done else 0, of=table.count)
            events.instant(PASSED, step=first + done - bool(done), text=passed.model_dump_json(), **place)
            return
        span = self._by_end[min(np.searchsorted(table.end[self._by_end], stamps), len(self._by_end) - 1)]
        passed = Passed(stamps=stamps, of=table.count, name=table.names[table.name[span]], lane=table.lanes[table.lane[span]])
        micro_batch, chunk = self.units(stage)
        place |= {"tick": _shown_tick(int(table.tick[span])), "microbatch": int(micro_batch[span]), "chunk": int(chunk[span])}
        events.instant(PASSED, step=first + done, text=passed.model_dump_json(), **place)

    @cached_property
    def _by_end(self) -> np.ndarray:
        return np.argsort(self.table.end)


@dataclass(frozen=True)
class _Sums:
    """Which spans are added up to which rows of a stage: ``group`` of every span, and columns of one row a group."""

    names: tuple[str, ...]
    group: np.ndarray
    first: np.ndarray
    name: np.ndarray
    lane: np.ndarray
    micro_batch: np.ndarray
    chunk: np.ndarray

    @classmethod
    def of(cls, table: StepStamps, stage: int) -> "_Sums":
        computing = table.lanes.index("compute")
        groups: dict[tuple[str, int, int, int], int] = {}
        group, first = [], []
        for number, (of, lane, micro_batch, chunk) in enumerate(zip(table.of, table.lane, *table.units(stage), strict=True)):
            kind = table.passes[of]
            if kind == "step":
                key = (table.names[table.name[number]], int(lane), -1, -1)
            elif lane == computing:
                key = (IDLE, int(lane), -1, -1) if micro_batch < 0 else (kind, int(lane), int(micro_batch), int(chunk))
            else:
                key = (f"{kind} wait", int(lane), -1, -1)
            if key not in groups:
                groups[key] = len(groups)
                first.append(number)
            group.append(groups[key])
        names = tuple(dict.fromkeys(key[0] for key in groups))
        columns = ([names.index(key[0]) for key in groups], *zip(*(key[1:] for key in groups), strict=True))
        return cls(names, np.array(group), np.array(first), *(np.array(column, np.int32) for column in columns))


def _shown_tick(tick: int) -> int:
    """What is outside all ticks has none."""
    return tick if 0 <= tick < LAST_TICK else -1
