"""Small pictures as SVG for pages and reports: curves, a bar of parts, a band over time. Text is escaped; colours are CSS classes.

Shapes lie in an inner SVG that stretches with the page; words lie outside of it and do not. Classes are those of `figures.css`: ``c0`` to
``c9`` for series and parts, so a picture is readable in light and dark without a script.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from markupsafe import Markup

from megascale_jax.observe.output import printable

WIDE = 1000
"""Units of the inner picture from left to right."""
MOST_POINTS = 400
"""Of a curve: of more the least and the greatest of each piece are drawn."""
_TOP, _BOTTOM = 10, 26
"""Room for words, pixels; that at the left is a margin of the class ``axes``."""


@dataclass(frozen=True)
class Curve:
    """``x`` and ``y``: float64 of one length, x rising; NaN is a gap. ``points``: dots in place of a line."""

    name: str
    x: np.ndarray
    y: np.ndarray
    points: bool = False


@dataclass(frozen=True)
class Part:
    """One part of a bar; ``colour``: number of its class."""

    name: str
    value: float
    colour: int
    text: str = ""


def words(text: str) -> str:
    """Any text as it may stand in HTML and SVG: one line, control characters and changes of direction as escapes."""
    return escape(printable(text))


def curves_svg(curves: Sequence[Curve], label: str, *, height: int = 220, low: float | None = None, unit: str = "") -> Markup:
    """Curves over one axis; empty text where none has a finite point. ``low``: lowest end of the axis; ``label``: for who cannot see it."""
    drawn = [Curve(one.name, *_thinned(one.x, one.y), one.points) for one in curves]
    every = np.concatenate([one.y[np.isfinite(one.y)] for one in drawn]) if drawn else np.empty(0)
    if not every.size:
        return Markup()
    xs = np.concatenate([one.x for one in drawn])
    x_begin, x_end = float(xs.min()), float(xs.max())
    y_low, y_high = _range(every, low)
    inner = height - _TOP - _BOTTOM
    parts = [_open(height, label, "axes")]
    for value in ticks(y_low, y_high, 5):
        y = _TOP + inner * (1 - (value - y_low) / (y_high - y_low))
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="-8" y="{y + 4:.1f}" text-anchor="end">{_number(value)}{words(unit)}</text>')
    across = max(x_end - x_begin, 1e-12)
    for value in ticks(x_begin, x_end, 6):
        at = 100 * (value - x_begin) / across
        parts.append(f'<text class="tick" x="{at:.2f}%" y="{height - 8}" text-anchor="middle">{_number(value)}</text>')
    parts.append(f'<svg y="{_TOP}" width="100%" height="{inner}" viewBox="0 0 {WIDE} {inner}" preserveAspectRatio="none">')
    for number, one in enumerate(drawn):
        up = inner * (1 - (one.y - y_low) / (y_high - y_low))
        parts.append(_path((one.x - x_begin) / across * WIDE, up, number, dots=one.points or one.x.size == 1))
    return Markup("".join([*parts, "</svg></svg>"]))


def bar_svg(parts: Sequence[Part], label: str, *, whole: float | None = None, height: int = 18) -> Markup:
    """Parts side by side, their sum (or ``whole``) as wide as the page. A part's name and text are its tooltip."""
    total = max(whole or 0.0, sum(part.value for part in parts))
    if not total > 0:
        return Markup()
    lines, at = (
        [_open(height, label), f'<svg width="100%" height="{height}" viewBox="0 0 {WIDE} {height}" preserveAspectRatio="none">'],
        0.0,
    )
    for part in parts:
        wide = WIDE * part.value / total
        title = words(f"{part.name}: {part.text}" if part.text else part.name)
        lines.append(f'<rect class="c{part.colour}" x="{at:.2f}" y="0" width="{wide:.2f}" height="{height}"><title>{title}</title></rect>')
        at += wide
    return Markup("".join([*lines, "</svg></svg>"]))


def band_svg(shares: np.ndarray, names: Sequence[str], label: str, *, height: int = 64) -> Markup:
    """Shares float64[pieces, parts] of a time as columns, stacked; the classes are the parts' numbers."""
    pieces = len(shares)
    if not pieces:
        return Markup()
    lines = [_open(height, label), f'<svg width="100%" height="{height}" viewBox="0 0 {WIDE} {height}" preserveAspectRatio="none">']
    top = np.cumsum(shares[:, ::-1], axis=1)[:, ::-1]
    for number, name in enumerate(names):
        if not shares[:, number].any():
            continue
        boxes = []
        for piece in np.flatnonzero(shares[:, number] > 0):
            high, low = height * (1 - top[piece, number]), height * (1 - top[piece, number] + shares[piece, number])
            left, right = WIDE * piece / pieces, WIDE * (piece + 1) / pieces
            boxes.append(f"M{left:.1f} {high:.1f}H{right:.1f}V{low:.1f}H{left:.1f}z")
        lines.append(f'<path class="c{number}" d="{"".join(boxes)}"><title>{words(name)}</title></path>')
    return Markup("".join([*lines, "</svg></svg>"]))


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers within a range, at most so many and one more."""
    span = high - low
    if not span > 0:
        return [low]
    step = 10.0 ** math.floor(math.log10(span / most))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= most)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _open(height: int, label: str, more: str = "") -> str:
    look = f'class="{f"figure {more}".rstrip()}" role="img" aria-label="{words(label)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {look} width="100%" height="{height}">'


def _range(values: np.ndarray, low: float | None) -> tuple[float, float]:
    """Ends of the axis: the bulk of the values; a rare outlier runs out of the picture."""
    begin = float(values.min()) if low is None else low
    end = max(float(np.quantile(values, 0.995)), float(values[0]))
    margin = 0.05 * (end - begin) or max(abs(end), 1.0) * 0.05
    return (begin if low is not None else begin - margin), end + margin


def _thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most `MOST_POINTS` points: the least and the greatest of each piece, so no spike is lost."""
    if x.size <= MOST_POINTS:
        return x, y
    first = np.linspace(0, x.size, MOST_POINTS // 2, endpoint=False).astype(int)
    middle = x[first]
    low, high = np.fmin.reduceat(y, first), np.fmax.reduceat(y, first)
    return np.repeat(middle, 2), np.stack([low, high], axis=1).ravel()


def _path(at: np.ndarray, up: np.ndarray, number: int, *, dots: bool) -> str:
    if dots:
        boxes = "".join(f"M{x:.1f} {y:.1f}h.01" for x, y in zip(at, up, strict=True) if math.isfinite(y))
        return f'<path class="dots l{number}" d="{boxes}"/>'
    line, is_open = [], False
    for x, y in zip(at, up, strict=True):
        if not math.isfinite(y):
            is_open = False
            continue
        line.append(f"{'L' if is_open else 'M'}{x:.1f} {y:.1f}")
        is_open = True
    return f'<path class="line l{number}" d="{"".join(line)}"/>'


def _number(value: float) -> str:
    """Short, for an axis."""
    if value == 0:
        return "0"
    for limit, sign in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if sign == 'k' else limit):.6g}{sign}"
    return f"{value:.6g}"
