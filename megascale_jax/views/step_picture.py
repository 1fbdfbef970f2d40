"""A step of one pipeline as a picture in a page: its stages downwards, what each computed and waited for, the ideal schedule beside it.

A stage has a lane for each pass: the ideal units thin above, the real ones below, each by micro-batch and chunk; and one lane of what it
waited for, by mesh axis. Everything lies in an inner SVG of `WIDE` units that stretches, so a page zooms by making the picture wider and
pans by scrolling; words lie outside of it at per cents of the width. ``z0`` to ``z8``: words that find room once the picture is
1, 2, 4, ... times as wide.

Failure case: a step with very many units is drawn without words and tooltips, one path a kind, so that a page still opens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from markupsafe import Markup

from megascale_jax.errors import UsageError
from megascale_jax.parallel.pipeline.stamps import Pass
from megascale_jax.views.figures import ticks, words
from megascale_jax.views.ideal import ideal_units
from megascale_jax.views.schedule import unit_label
from megascale_jax.views.step_processes import StepProcesses, find_step
from megascale_jax.views.timeline import UNIT_LANES, Device, Row, Timeline, read_timeline
from megascale_jax.views.trace import median_units_ns

WIDE = 100_000
MOST_UNITS = 6000
"""Units, real and ideal, that have a box of their own; of more, one path holds all of a kind."""
WAIT_LANES = ("tensor", "pipe", "data")
_PIECES = 1500
"""Of the wait lane: each has the shade of how much of it was waiting."""
_SHADES = 4
_ZOOMS, _LETTER_PX, _BASE_PX = 8, 7.0, 1000.0
"""Doublings of the width; a letter's width; how wide a picture is at first, pixels."""
_AXIS, _IDEAL, _REAL, _WAIT, _GAP = 24, 7, 15, 8, 12
"""Heights, pixels."""


@dataclass(frozen=True)
class Unit:
    """A unit in a lane; times are nanoseconds since the begin of the picture."""

    of: Pass
    tick: int
    micro_batch: int
    chunk: int
    begin_ns: int
    end_ns: int

    @property
    def label(self) -> str:
        """Micro-batch, and chunk as a letter."""
        return unit_label(self.micro_batch, self.chunk)


@dataclass(frozen=True)
class Stage:
    """What is drawn of one device: units in the order of time, and waits ``(lane, name, begin_ns, end_ns)``."""

    device: Device
    real: tuple[Unit, ...]
    ideal: tuple[Unit, ...]
    waits: tuple[tuple[str, str, int, int], ...]


@dataclass(frozen=True)
class StepPicture:
    """A step of one pipeline. ``ideal_ns``: how long the ideal schedule takes, 0 without one; ``chunks``: of a stage."""

    step: int
    stages: tuple[Stage, ...]
    passes: tuple[Pass, ...]
    length_ns: int
    ideal_ns: int
    chunks: int
    notes: tuple[str, ...]


def pipeline_devices(mesh: tuple[int, int, int], data: int, tensor: int) -> list[int]:
    """Numbers of the devices of one pipeline."""
    return [int(np.ravel_multi_index((stage, data, tensor), mesh)) for stage in range(mesh[0])]


def read_picture(run: Path, step: int | None, data: int = 0, tensor: int = 0) -> tuple[StepProcesses, Timeline, StepPicture]:
    """A step of the pipeline at one place of data and tensor; by default the newest with details. Raises UsageError, RunFolderError."""
    found = find_step(run, step)
    _, datas, tensors = found.mesh
    if data >= datas or tensor >= tensors:
        raise UsageError(
            f"data {data}, tensor {tensor}: in step {found.step} the mesh has data 0 to {datas - 1}, tensor 0 to {tensors - 1}"
        )
    devices = pipeline_devices(found.mesh, data, tensor)
    ranks = {rank for rank, facts in found.facts.items() if not set(facts.devices).isdisjoint(devices)}
    timeline = read_timeline(run, found.step, ranks, devices)
    return found, timeline, step_picture(timeline)


def step_picture(timeline: Timeline) -> StepPicture:
    """The picture of a timeline's devices, which should be those of one pipeline."""
    rows = [row for one in timeline.devices for row in (*one.phases, *one.sums, *((one.step,) if one.step else ()))]
    begin_ns = min((row.begin_ns for row in rows), default=0)
    end_ns = max((row.end_ns for row in rows), default=begin_ns)
    ideal, offset_ns = _ideal(timeline, begin_ns)
    found = tuple(
        Stage(one, tuple(_real(one, begin_ns)), tuple(unit for stage, unit in ideal if stage == one.stage), tuple(_waits(one, begin_ns)))
        for one in timeline.devices
    )
    has = {unit.of for stage in found for unit in stage.real}
    last_ns = max((unit.end_ns for _, unit in ideal), default=offset_ns)
    chunks = 1 + max((unit.chunk for stage in found for unit in stage.real), default=0)
    passes: tuple[Pass, ...] = tuple(of for of in UNIT_LANES if of in has)
    return StepPicture(timeline.step, found, passes, max(end_ns - begin_ns, last_ns, 1), last_ns - offset_ns, chunks, timeline.notes)


def _ideal(timeline: Timeline, begin_ns: int) -> tuple[list[tuple[int, Unit]], int]:
    """Ideal units by stage, and when the first of them begins: when the first of all devices began to compute."""
    schedule = timeline.schedule
    forward = [row.begin_ns for one in timeline.devices for row in one.units["forward"] if row.micro_batch >= 0]
    if schedule is None or not forward:
        return [], 0
    offset_ns = min(forward) - begin_ns
    units = ideal_units(schedule, median_units_ns(timeline))
    moved = (
        (one.stage, Unit(one.of, one.tick, one.micro_batch, one.chunk, one.begin_ns + offset_ns, one.end_ns + offset_ns)) for one in units
    )
    return [(stage, unit) for stage, unit in moved if unit.end_ns > unit.begin_ns], offset_ns


def _real(device: Device, begin_ns: int) -> Iterator[Unit]:
    units: list[tuple[Pass, Row]] = [(of, row) for of in UNIT_LANES for row in device.units[of]]
    if not device.phases:
        units = [(of, row) for of in UNIT_LANES for row in device.sums if row.name == of]
    for of, row in sorted(units, key=lambda unit: unit[1].begin_ns):
        if row.micro_batch >= 0:
            yield Unit(of, row.tick, row.micro_batch, row.chunk, row.begin_ns - begin_ns, row.end_ns - begin_ns)


def _waits(device: Device, begin_ns: int) -> Iterator[tuple[str, str, int, int]]:
    for row in device.phases:
        if row.lane in WAIT_LANES and row.duration_ns > 0:
            yield row.lane, row.name, row.begin_ns - begin_ns, row.end_ns - begin_ns


def picture_svg(picture: StepPicture, most_units: int = MOST_UNITS) -> tuple[Markup, Markup]:
    """The names of the rows, and the picture: two SVGs of the same height, to be laid side by side."""
    draw = _Drawing(picture, most_units)
    return Markup(draw.names()), Markup(draw.shapes())


class _Drawing:
    def __init__(self, picture: StepPicture, most_units: int):
        self.picture = picture
        self.lane = _IDEAL + _REAL + 3 if picture.ideal_ns else _REAL + 3
        self.block = self.lane * max(len(picture.passes), 1) + _WAIT + _GAP
        self.height = _AXIS + self.block * len(picture.stages)
        self.is_fine = sum(len(one.real) + len(one.ideal) for one in picture.stages) <= most_units

    def names(self) -> str:
        parts = [f'<svg xmlns="http://www.w3.org/2000/svg" class="rows" width="118" height="{self.height}" aria-hidden="true">']
        for number, stage in enumerate(self.picture.stages):
            y = _AXIS + self.block * number
            parts.append(f'<text class="name" x="0" y="{y + 14}">stage {stage.device.stage}</text>')
            for row, of in enumerate(self.picture.passes):
                parts.append(f'<text class="tick" x="112" y="{y + self.lane * row + self.lane - 7}" text-anchor="end">{of}</text>')
            parts.append(f'<text class="tick" x="112" y="{y + self.block - _GAP - 1}" text-anchor="end">waits</text>')
        return "".join([*parts, "</svg>"])

    def shapes(self) -> str:
        picture = self.picture
        label = f"step {picture.step}: {len(picture.stages)} stages, {picture.length_ns / 1e6:.3f} ms; a table follows"
        head = f'<svg xmlns="http://www.w3.org/2000/svg" class="shapes" role="img" aria-label="{words(label)}" width="100%"'
        inner = f'<svg width="100%" height="{self.height}" viewBox="0 0 {WIDE} {self.height}" preserveAspectRatio="none">'
        boxes = [part for number, stage in enumerate(picture.stages) for part in self._stage(stage, _AXIS + self.block * number)]
        return "".join([f'{head} height="{self.height}">', *self._axis(), inner, *boxes, "</svg>", *self._labels(), "</svg>"])

    def _at(self, ns: float) -> int:
        return round(WIDE * ns / self.picture.length_ns)

    def _axis(self) -> Iterator[str]:
        """Times at the top: ten at first, twice as many with each doubling of the width that has room for them."""
        length_ms, seen = self.picture.length_ns / 1e6, set()
        for zoom in range(6):
            for value in ticks(0.0, length_ms, 8 << zoom):
                at = round(100 * value / length_ms, 3)
                if at in seen or at > 99.5:
                    continue
                seen.add(at)
                yield f'<line class="grid z{zoom}" x1="{at}%" x2="{at}%" y1="{_AXIS - 6}" y2="{self.height}"/>'
                yield f'<text class="tick z{zoom}" x="{at}%" y="13">{value:.6g} ms</text>'

    def _stage(self, stage: Stage, y: int) -> Iterator[str]:
        for row, of in enumerate(self.picture.passes):
            top = y + self.lane * row
            if self.picture.ideal_ns:
                yield from self._units([unit for unit in stage.ideal if unit.of == of], top, _IDEAL, "ideal ")
            real = top + (_IDEAL if self.picture.ideal_ns else 0)
            yield from self._units([unit for unit in stage.real if unit.of == of], real, _REAL, "")
        yield from self._waiting(stage, y + self.block - _GAP - _WAIT)

    def _shade(self, unit: Unit) -> int:
        return round((_SHADES - 1) * unit.chunk / max(self.picture.chunks - 1, 1))

    def _units(self, units: Sequence[Unit], y: int, height: int, kind: str) -> Iterator[str]:
        if not self.is_fine:
            for shade, own in groupby(sorted(units, key=self._shade), self._shade):
                boxes = "".join(f"M{self._at(one.begin_ns)} {y}h{self._width(one)}v{height - 1}h-{self._width(one)}z" for one in own)
                yield f'<path class="{kind}{units[0].of} k{shade}" d="{boxes}"/>'
            return
        for one in units:
            title = f"{kind}{one.of} {one.label}, tick {one.tick}, {one.begin_ns / 1e6:.3f} to {one.end_ns / 1e6:.3f} ms"
            place = f'x="{self._at(one.begin_ns)}" y="{y}" width="{self._width(one)}" height="{height - 1}"'
            yield f'<rect class="{kind}{one.of} k{self._shade(one)}" {place}><title>{title}</title></rect>'

    def _width(self, unit: Unit) -> int:
        return max(self._at(unit.end_ns) - self._at(unit.begin_ns), 1)

    def _waiting(self, stage: Stage, y: int) -> Iterator[str]:
        """Pieces of the step in which a device waited, by how much of each and over which axis most."""
        size_ns = self.picture.length_ns / _PIECES
        waited = np.zeros((len(WAIT_LANES), _PIECES))
        for lane, _, begin_ns, end_ns in stage.waits:
            first, last = int(begin_ns / size_ns), min(int(end_ns / size_ns), _PIECES - 1)
            edges_ns = np.clip(np.arange(first, last + 2) * size_ns, begin_ns, end_ns)
            waited[WAIT_LANES.index(lane), first : last + 1] += np.diff(edges_ns) / size_ns
        share, lane = waited.sum(axis=0), waited.argmax(axis=0)
        shade = np.minimum(np.ceil(share * _SHADES), _SHADES).astype(int)
        kinds = [None if not shade[piece] else (WAIT_LANES[lane[piece]], int(shade[piece])) for piece in range(_PIECES)]
        at = 0
        for kind, own in groupby(kinds):
            length = len(list(own))
            if kind is not None:
                left, right = round(WIDE * at / _PIECES), round(WIDE * (at + length) / _PIECES)
                yield f'<rect class="wait-{kind[0]} w{kind[1]}" x="{left}" y="{y}" width="{right - left}" height="{_WAIT}"/>'
            at += length

    def _labels(self) -> Iterator[str]:
        if not self.is_fine:
            return
        for number, stage in enumerate(self.picture.stages):
            for unit in stage.real:
                wide_px = _BASE_PX * (unit.end_ns - unit.begin_ns) / self.picture.length_ns
                needed = (len(unit.label) * _LETTER_PX + 3) / max(wide_px, 1e-9)
                zoom = max(0, int(np.ceil(np.log2(needed)))) if needed > 0 else 0
                if zoom <= _ZOOMS:
                    row = self.picture.passes.index(unit.of)
                    y = _AXIS + self.block * number + self.lane * (row + 1) - 7
                    at = 50 * (unit.begin_ns + unit.end_ns) / self.picture.length_ns
                    yield f'<text class="unit k{self._shade(unit)} z{zoom}" x="{at:.3f}%" y="{y}" text-anchor="middle">{unit.label}</text>'
