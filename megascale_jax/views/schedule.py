"""The pipeline schedule as a picture: ticks to the right, stages downwards, a forward and a backward lane each.

A cell is one unit: the number of its micro-batch, and its chunk as a letter (text) or a shade (SVG). Empty cells are idle
slots. Reads `parallel/pipeline/schedule.py` only, so what is drawn is what the step runs.
"""

from colorsys import hls_to_rgb
from html import escape

from megascale_jax.parallel.pipeline.schedule import Schedule, Unit

CELL_WIDTH, LANE_HEIGHT, GAP, LEFT, TOP = 22, 18, 8, 74, 74
_FORWARD_HUE, _BACKWARD_HUE, _TEXT, _MUTED = 203, 18, "#212529", "#6c757d"


def schedule_text(schedule: Schedule, width: int = 100, max_ticks: int | None = None) -> str:
    """The schedule as text, cut into blocks of at most ``width`` columns; the first ``max_ticks`` ticks, default all."""
    ticks = min(max_ticks or schedule.ticks, schedule.ticks)
    cell = len(_label(Unit(schedule.micro_batches - 1, schedule.virtual_stages - 1, 0))) + 1
    across = max((width - 10) // cell, 1)
    blocks = []
    for start in range(0, ticks, across):
        shown = range(start, min(start + across, ticks))
        lines = [f"{'tick':<10}" + "".join(f"{tick:>{cell}}" for tick in shown)]
        for stage in range(schedule.pipe):
            for name, unit_at in (("F", schedule.forward), ("B", schedule.backward)):
                head = f"stage {stage:<2} {name}" if name == "F" else f"{'':<9}{name}"
                lines.append(f"{head:<10}" + "".join(f"{_label(unit_at(tick, stage)):>{cell}}" for tick in shown))
        blocks.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join(blocks)


def schedule_summary(schedule: Schedule) -> str:
    """One line of numbers."""
    return (
        f"{_counted(schedule.pipe, 'stage')} x {_counted(schedule.virtual_stages, 'chunk')}, "
        f"{_counted(schedule.micro_batches, 'micro-batch', 'es')}: "
        f"{schedule.warmup} warm-up + {schedule.steady} steady + {schedule.warmup} cool-down ticks, bubble {schedule.bubble:.1%}, "
        f"{schedule.slots} residual slots (GPipe: {schedule.gpipe_slots})"
    )


def _counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural if number > 1 else ''}"


def schedule_svg(schedule: Schedule, heading: str) -> str:
    """The whole schedule as an SVG document."""
    lane = 2 * LANE_HEIGHT + GAP
    width, height = LEFT + CELL_WIDTH * schedule.ticks + 20, TOP + lane * schedule.pipe + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{max(width, 760)}" height="{height}" '
        f'font-family="sans-serif" font-size="11" text-anchor="middle">',
        '<rect width="100%" height="100%" fill="white"/>',
        _words(12, 26, heading, _TEXT, 'font-size="17" font-weight="bold" text-anchor="start"'),
        _words(12, 46, schedule_summary(schedule), _MUTED, 'text-anchor="start"'),
    ]
    for name, start, length in _parts_of(schedule):
        if length:
            x = LEFT + CELL_WIDTH * start
            parts.append(f'<line x1="{x}" y1="{TOP - 14}" x2="{x}" y2="{height - 34}" stroke="#adb5bd" stroke-dasharray="3 3"/>')
            parts.append(_words(x + 4, TOP - 6, name, _MUTED, 'text-anchor="start"'))
    for stage in range(schedule.pipe):
        y = TOP + lane * stage
        parts.append(_words(12, y + LANE_HEIGHT + 4, f"stage {stage}", _TEXT, 'font-size="12" text-anchor="start"'))
        for row, (unit_at, hue) in enumerate(((schedule.forward, _FORWARD_HUE), (schedule.backward, _BACKWARD_HUE))):
            units = ((LEFT + CELL_WIDTH * tick, unit_at(tick, stage)) for tick in range(schedule.ticks))
            parts += [_cell(unit, x, y + LANE_HEIGHT * row, hue, schedule.virtual_stages) for x, unit in units]
    legend = "blue: forward, red: backward; the number is the micro-batch, a darker shade a later chunk; pale: idle"
    parts.append(_words(LEFT, height - 14, legend, _MUTED, 'text-anchor="start"'))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _parts_of(schedule: Schedule) -> list[tuple[str, int, int]]:
    begin_cooldown = schedule.warmup + schedule.steady
    return [
        ("warm-up", 0, schedule.warmup),
        ("steady", schedule.warmup, schedule.steady),
        ("cool-down", begin_cooldown, schedule.warmup),
    ]


def unit_label(micro_batch: int, chunk: int) -> str:
    """A unit's name: its micro-batch, and its chunk as a letter."""
    return f"{micro_batch}{_letters(chunk)}"


def _label(unit: Unit | None) -> str:
    return "." if unit is None else unit_label(unit.micro_batch, unit.chunk)


def _letters(chunk: int) -> str:
    """a to z, then aa, ab, ..."""
    more, last = divmod(chunk, 26)
    return (_letters(more - 1) if more else "") + chr(ord("a") + last)


def _cell(unit: Unit | None, x: int, y: int, hue: int, chunks: int) -> str:
    box = f'<rect x="{x}" y="{y}" width="{CELL_WIDTH - 1}" height="{LANE_HEIGHT - 1}"'
    if unit is None:
        return f'{box} fill="#f1f3f5"/>'
    lightness = 82 - round(42 * unit.chunk / max(chunks - 1, 1))
    ink = "white" if lightness < 62 else _TEXT
    return f'{box} fill="{_colour(hue, lightness)}"/>' + _words(x + CELL_WIDTH / 2, y + 13, str(unit.micro_batch), ink)


def _colour(hue: int, lightness: int) -> str:
    """As hexadecimal red, green and blue: not every viewer of SVG knows other notations."""
    parts = hls_to_rgb(hue / 360, lightness / 100, 0.6)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


def _words(x: float, y: float, text: str, colour: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" {more}>{escape(text)}</text>'
