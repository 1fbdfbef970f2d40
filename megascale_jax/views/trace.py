"""A step as a trace for Perfetto (https://ui.perfetto.dev): devices and their lanes, messages, the ideal schedule beside. No JAX.

Chrome's JSON format of trace events, gzipped if the file's name ends in ``.gz``: Perfetto and others open it as it is, any script
reads it, and it needs no library. Perfetto's own format would take half the space, a dependency, and a reader to test it with. A phase
is some 200 bytes, 17 gzipped; a device of a 175 B model has 10,000 of them a step, so of a large run some devices are drawn (`chosen`).

Stage by stage from top to bottom: the ideal schedule of the stage, its devices, and at the end the processes. A device has a lane for
the units of each pass, one for its computing phases, and one for each mesh axis: how long it waited for collectives over it. A unit
stretches from the begin of its first computing phase to the end of the last one, the phases of other passes in between included.
"""

import gzip
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from megascale_jax.observe.events import LANES
from megascale_jax.observe.step_sums import IDLE, Pass
from megascale_jax.parallel.pipeline.schedule import Schedule
from megascale_jax.views.ideal import ideal_units
from megascale_jax.views.schedule import unit_label
from megascale_jax.views.timeline import UNIT_LANES, Device, Row, Timeline

MOST_DEVICES = 64
"""Drawn when nobody chooses; of a larger mesh those with data and tensor coordinate 0, a whole pipeline."""
_LANES = {**{of: f"{of} units" for of in UNIT_LANES}, **{lane: lane for lane in ("compute", "tensor", "pipe", "data")}}
"""Lanes of a device from top to bottom, and what readers call them."""
_MESSAGES: Mapping[str, tuple[Pass, int, int]] = {
    "P.send_y": ("forward", 0, 1),
    "P.send_a": ("forward", 0, 1),
    "P.send_b": ("forward", 1, 0),
    "P.send_g": ("backward", 1, 0),
}
"""By operation: what it sends the output of, that unit's tick before its own, and the tick after its own in which it is used."""
_IDEAL, _HOSTS = 1_000_000, 2_000_000
"""Process numbers of the trace: devices from 1 on, then stages, then ranks."""
_STAGE_ORDER, _HOST_ORDER = 100_000, 1_000_000_000
"""Places from top to bottom."""

TraceEvent = dict[str, Any]


@dataclass(frozen=True)
class Arrow:
    """A message: the first row of the phase that sent it, beside whose compute it was under way, and the first phase that used it."""

    name: str
    sender: Device
    sent: Row
    receiver: Device
    used: Row


def chosen(mesh: tuple[int, int, int], stages: Collection[int] | None) -> tuple[list[int] | None, str]:
    """Devices to draw, ``None`` for all, of some stages only if given; and what to say about it, perhaps nothing."""
    pipe, data, tensor = mesh
    size = data * tensor
    if stages is not None:
        return [stage * size + place for stage in stages for place in range(size)], ""
    if pipe * size <= MOST_DEVICES:
        return None, ""
    return (
        [stage * size for stage in range(pipe)],
        f"the mesh has {pipe * size:,} devices; these are the {pipe} of data 0, tensor 0 (choose others by --ranks or --stage)",
    )


def trace_bytes(timeline: Timeline, notes: Sequence[str] = (), *, compressed: bool = False) -> bytes:
    """The trace as a file's content."""
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in trace_events(timeline))
    about = json.dumps({"step": timeline.step, "attempt": timeline.attempt, "notes": [*timeline.notes, *notes]})
    content = f'{{"displayTimeUnit":"ms","otherData":{about},"traceEvents":[\n{lines}\n]}}\n'.encode()
    return gzip.compress(content, 6, mtime=0) if compressed else content


def trace_events(timeline: Timeline) -> Iterator[TraceEvent]:
    """Events of the trace; their times are microseconds since the first of all."""
    begin_ns = min((row.begin_ns for row in _all_rows(timeline)), default=0)
    draw = _Drawing(begin_ns)
    schedule = timeline.schedule
    if schedule is not None:
        _draw_ideal(draw, timeline, schedule)
    for device in timeline.devices:
        _draw_device(draw, device)
    for host in timeline.hosts:
        draw.process(_HOSTS + host.rank, f"rank {host.rank}  {host.name}", _HOST_ORDER + host.rank)
        for row in host.rows:
            draw.row(_HOSTS + host.rank, row.lane, row.name, row, {"text": row.text} if row.text else {})
    for number, arrow in enumerate(arrows(timeline, schedule) if schedule is not None else ()):
        draw.arrow(number, arrow)
    return iter(draw.events)


def _all_rows(timeline: Timeline) -> Iterator[Row]:
    for device in timeline.devices:
        yield from (device.step,) if device.step is not None else ()
        yield from device.phases
        yield from device.sums
    for host in timeline.hosts:
        yield from host.rows


def arrows(timeline: Timeline, schedule: Schedule) -> Iterator[Arrow]:
    """Messages between the devices of a timeline: outputs to the next stage, gradients to the one before, in a ring."""
    by_place = {device.place: device for device in timeline.devices}
    first: dict[tuple[int, Pass, int, str], Row] = {}
    for device in timeline.devices:
        for row in device.phases:
            if row.lane == "compute" and row.micro_batch >= 0:
                first.setdefault((device.number, row.of, row.tick, row.name[0]), row)
                first.setdefault((device.number, row.of, row.tick, ""), row)
    for sender in timeline.devices:
        for row, sent in _with_compute(sender.phases):
            for name in set(row.name.split(" + ")) & set(_MESSAGES):
                of, before, after = _MESSAGES[name]
                unit = (schedule.forward if of == "forward" else schedule.backward)(row.tick - before, sender.stage)
                stage = (sender.stage + (1 if of == "forward" else -1)) % schedule.pipe
                receiver = by_place.get((stage, *sender.place[1:]))
                if unit is None or receiver is None:
                    continue
                at = (receiver.number, of, row.tick + after)
                used = first.get((*at, "b" if name == "P.send_b" else "")) or first.get((*at, ""))
                if used is not None and used.micro_batch == unit.micro_batch:
                    yield Arrow(name, sender, sent, receiver, used)


def _with_compute(phases: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Every wait of a device, and what its phase begins with: the compute beside it, or itself."""
    for before, row in zip((None, *phases), phases, strict=False):
        if row.lane != "compute":
            covers = before is not None and before.lane == "compute" and before.end_ns == row.begin_ns
            yield row, before if covers and before is not None else row


def _draw_ideal(draw: "_Drawing", timeline: Timeline, schedule: Schedule) -> None:
    """The ideal schedule of every stage that is drawn, from the time on at which the first of all devices began to compute.

    Files that lost the forward passes have none.
    """
    begin_ns = min((row.begin_ns for device in timeline.devices for row in device.units["forward"]), default=None)
    if begin_ns is None:
        return
    units = ideal_units(schedule, median_units_ns(timeline))
    shown = {device.stage for device in timeline.devices}
    for stage in sorted(shown):
        draw.process(_IDEAL + stage, f"stage {stage}  ideal: medians, no waits", stage * _STAGE_ORDER)
    for unit in units:
        if unit.stage in shown and unit.end_ns > unit.begin_ns:
            row = Row(unit.of, "compute", unit.tick, unit.micro_batch, unit.chunk, begin_ns + unit.begin_ns, unit.end_ns - unit.begin_ns)
            draw.unit(_IDEAL + unit.stage, unit.of, row)


def median_units_ns(timeline: Timeline) -> dict[Pass, int]:
    """Nanoseconds that a unit of each pass computes, by the median over all devices and units; of the head: one device's part."""
    found: dict[Pass, list[int]] = {}
    for device in timeline.devices:
        sums: dict[tuple[Pass, int, int], int] = {}
        for row in device.phases:
            if row.lane == "compute" and row.micro_batch >= 0:
                key = (row.of, row.micro_batch, row.chunk)
                sums[key] = sums.get(key, 0) + row.duration_ns
        for (of, _, _), lasts_ns in sums.items():
            found.setdefault(of, []).append(lasts_ns)
    return {of: round(median(lasts_ns)) for of, lasts_ns in found.items()}


def _draw_device(draw: "_Drawing", device: Device) -> None:
    pid, (stage, data, tensor) = device.number + 1, device.place
    name = f"stage {stage}  data {data}  tensor {tensor}  (device {device.number}, rank {device.rank}, {device.host})"
    draw.process(pid, name, stage * _STAGE_ORDER + 1 + device.number)
    for of, rows in device.units.items():
        for row in rows:
            draw.unit(pid, of, row)
    if device.phases:
        beside = {id(first): wait.name for wait, first in _with_compute(device.phases) if first is not wait}
        for row in device.phases:
            is_idle = row.micro_batch < 0 and row.lane == "compute" and row.of != "step"
            draw.row(pid, row.lane, IDLE if is_idle else row.name, row, {"beside": beside[id(row)]} if id(row) in beside else {})
        return
    waits = {f"{row.name}, {row.lane}": f"{row.duration_ns / 1e6:.3f} ms" for row in device.sums if row.micro_batch < 0}
    for row in device.sums:
        if row.micro_batch >= 0 and row.name in UNIT_LANES:
            draw.unit(pid, row.name, row)
    if device.step is not None:
        draw.row(pid, "compute", device.step.name, device.step, waits)


@dataclass
class _Drawing:
    """Trace events as they are made."""

    begin_ns: int
    events: list[TraceEvent] = field(default_factory=list)
    _tracks: set[tuple[int, str]] = field(default_factory=set)

    def process(self, pid: int, name: str, order: int) -> None:
        """A group of lanes."""
        self.events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
        self.events.append({"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": order}})

    def unit(self, pid: int, of: str, row: Row) -> None:
        """A unit in the lane of its pass."""
        self.row(pid, of, IDLE if row.micro_batch < 0 else unit_label(row.micro_batch, row.chunk), row, {})

    def row(self, pid: int, lane: str, name: str, row: Row, more: Mapping[str, str]) -> None:
        """A row in a lane."""
        numbers = {"tick": row.tick, "micro_batch": row.micro_batch, "chunk": row.chunk}
        args: dict[str, int | str] = (
            {key: value for key, value in numbers.items() if value >= 0} | ({"operations": row.name} if name == IDLE else {}) | dict(more)
        )
        event = {"ph": "X", "pid": pid, "tid": self._lane(pid, lane), "ts": self._us(row.begin_ns), "dur": row.duration_ns / 1e3}
        self.events.append({**event, "name": name, "cat": lane, "args": args})

    def arrow(self, number: int, arrow: Arrow) -> None:
        """An arrow from the begin of a row, just inside so that it belongs to it, to the middle of another."""
        ends = (
            ("s", arrow.sender, arrow.sent, min(1, arrow.sent.duration_ns)),
            ("f", arrow.receiver, arrow.used, arrow.used.duration_ns // 2),
        )
        for phase, device, row, inside_ns in ends:
            pid, at_ns = device.number + 1, row.begin_ns + inside_ns
            event = {"ph": phase, "id": number, "pid": pid, "tid": self._lane(pid, row.lane), "ts": self._us(at_ns)}
            self.events.append({**event, "name": arrow.name, "cat": "message", **({"bp": "e"} if phase == "f" else {})})

    def _us(self, at_ns: int) -> float:
        return (at_ns - self.begin_ns) / 1e3

    def _lane(self, pid: int, lane: str) -> int:
        order = [*_LANES, *(lane for lane in LANES if lane not in _LANES)]
        tid = order.index(lane) + 1 if lane in order else len(order) + 1
        if (pid, lane) not in self._tracks:
            self._tracks.add((pid, lane))
            self.events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": _LANES.get(lane, lane)}})
            self.events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
        return tid
