"""A simulated step as a timeline, so that `megascale trace` and the step's picture draw it as they draw a real one. No JAX.

One pipeline, that of data and tensor coordinate 0. A unit is its computation, then the tensor-parallel communication that nothing hides,
then the head on the last stage, then its message; what comes after the passes follows in one piece each.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megascale_jax.config.software import SoftwareConfig
from megascale_jax.observe.step_sums import Pass
from megascale_jax.parallel.pipeline.schedule import Schedule, Unit
from megascale_jax.sim.analytic import Times, iteration_times
from megascale_jax.sim.costs import Costs, costs_of
from megascale_jax.sim.device import Device as SimulatedDevice
from megascale_jax.sim.iteration import units_of
from megascale_jax.sim.replay import BACKWARD, FORWARD, Units, schedule_of
from megascale_jax.sim.work import Work
from megascale_jax.views.timeline import Device, Row, Timeline

_PASSES: tuple[tuple[Pass, int], ...] = (("forward", FORWARD), ("backward", BACKWARD))
_HOST = "simulated"


def simulated_timeline(work: Work, device: SimulatedDevice, software: SoftwareConfig, slow_stages: tuple[int, ...] = ()) -> Timeline:
    """A step of one pipeline, some of its stages on slow nodes."""
    costs = costs_of(work, device, software)
    blocked_s = costs.message_s if software.pipe_sends == "blocking" and work.pipe > 1 else 0.0
    drawing = _Drawing(work, schedule_of(work), units_of(work, device, software, slow_stages), costs, blocked_s)
    tail = drawing.tail(iteration_times(work, device, software))
    size = work.data * work.tensor
    devices = tuple(
        Device(stage * size, (stage, 0, 0), stage, _HOST, None, (*drawing.rows(stage), *tail), ()) for stage in range(work.pipe)
    )
    note = f"simulated, not measured: one of {size:,} pipelines side by side, {work.devices:,} devices in all"
    return Timeline(0, 0, (work.pipe, work.data, work.tensor), devices, (), (note,))


@dataclass(frozen=True)
class _Drawing:
    """What rows are made of; ``blocked_s``: seconds of a blocking message, which its unit contains."""

    work: Work
    schedule: Schedule
    units: Units
    costs: Costs
    blocked_s: float

    def tail(self, times: Times) -> list[Row]:
        """What follows the passes, one after the other."""
        rows: list[Row] = []
        at_s = float(np.nanmax(self.units.end_s))
        for name, lane, lasts_s in (
            ("Z.exposed", "data", times.data_s),
            ("embedding", "pipe", times.embedding_s),
            ("optimizer", "compute", times.optimizer_s),
            ("input", "host", times.input_s),
            ("host", "host", times.host_s),
        ):
            if lasts_s > 0:
                rows.append(_row(name, lane, (-1, -1, -1), at_s, lasts_s))
            at_s += lasts_s
        return rows

    def rows(self, stage: int) -> Iterator[Row]:
        """The passes of a stage in the order of time."""
        for tick in range(self.schedule.ticks):
            for of, number in _PASSES:
                unit = (self.schedule.forward if of == "forward" else self.schedule.backward)(tick, stage)
                if unit is not None:
                    begin_s, end_s = float(self.units.begin_s[number, tick, stage]), float(self.units.end_s[number, tick, stage])
                    yield from self._unit(stage, tick, of, unit, begin_s, end_s - begin_s - self.blocked_s)

    def _unit(self, stage: int, tick: int, of: Pass, unit: Unit, begin_s: float, busy_s: float) -> Iterator[Row]:
        forward, schedule = of == "forward", self.schedule
        layer, head = self._parts(forward)
        at_head = stage == schedule.pipe - 1 and unit.chunk == schedule.virtual_stages - 1
        layers_s = self.work.layers[stage][unit.chunk] * layer.total
        scale = busy_s / (layers_s + (head.total if at_head else 0.0))
        exposed_s = scale * layers_s * layer.tensor / layer.total
        letter, at_s = ("F", begin_s) if forward else ("B", begin_s)
        for name, lane, lasts_s in (
            (f"{letter}.layers", "compute", scale * layers_s - exposed_s),
            (f"{letter}.exposed", "tensor", exposed_s),
            ("H.loss", "compute", scale * head.total if at_head else 0.0),
        ):
            if lasts_s > 0:
                yield _row(name, lane, (tick, unit.micro_batch, unit.chunk), at_s, lasts_s)
            at_s += lasts_s
        is_end = at_head if forward else stage == 0 and unit.chunk == 0
        if schedule.pipe > 1 and not is_end:
            name, sent = ("P.send_y", tick) if forward else ("P.send_g", tick + 1)
            yield _row(name, "pipe", (sent, unit.micro_batch, unit.chunk), at_s, self.blocked_s)

    def _parts(self, forward: bool):
        costs = self.costs
        return (costs.layer_forward, costs.head_forward) if forward else (costs.layer_backward, costs.head_backward)


def _row(name: str, lane: str, place: tuple[int, int, int], begin_s: float, lasts_s: float) -> Row:
    begin_ns = round(begin_s * 1e9)
    return Row(name, lane, *place, begin_ns, round((begin_s + lasts_s) * 1e9) - begin_ns)
