"""One tick of a compiled step as a picture: what the compute stream, NVLink and the network do at the same time.

Reads the spans of a compile report, so what is drawn is the compiled schedule with the report's times.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

WIDTH, LANE_HEIGHT, LEFT, TOP, GAP = 1240, 46, 92, 84, 14
LANES = {"compute": "compute", "tensor": "NVLink", "network": "network"}
"""Lanes from top to bottom, and what readers call them."""
_COLOURS = {"gemm": "#3a6ea5", "attention": "#7a5195", "memory": "#9aa5b1", "transfer": "#d98841"}
_WORDS = {"gemm": "GEMM", "attention": "attention", "memory": "memory-bound kernel", "transfer": "transfer"}
_TEXT, _MUTED = "#212529", "#6c757d"
_LETTER = 6.2
"""Width of a letter of a label."""


def lanes_svg(spans: Sequence[Mapping[str, Any]], heading: str) -> str:
    """An SVG document of the spans (``lane``, ``name``, ``kind``, ``start_s``, ``seconds``)."""
    whole_s = max((span["start_s"] + span["seconds"] for span in spans), default=1e-3)
    scale = (WIDTH - LEFT - 20) / whole_s
    height = TOP + len(LANES) * (LANE_HEIGHT + GAP) + 46
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        _words(12, 26, heading, _TEXT, 'font-size="17" font-weight="bold"'),
        *_legend(),
    ]
    for row, (lane, name) in enumerate(LANES.items()):
        y = TOP + row * (LANE_HEIGHT + GAP)
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 20}" height="{LANE_HEIGHT}" fill="#f1f3f5"/>')
        parts.append(_words(12, y + LANE_HEIGHT / 2 + 4, name, _TEXT, 'font-size="12"'))
        own = [span for span in spans if span["lane"] == lane]
        parts += [_bar(span, LEFT + span["start_s"] * scale, y, span["seconds"] * scale) for span in own]
    bottom = TOP + len(LANES) * (LANE_HEIGHT + GAP) + 4
    for tick in range(int(whole_s * 1e3) + 1):
        x = LEFT + tick * 1e-3 * scale
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#adb5bd" stroke-dasharray="2 4"/>')
        parts.append(_words(x, bottom + 16, f"{tick} ms", _MUTED, 'text-anchor="middle"'))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend() -> list[str]:
    parts, x = [], LEFT
    for kind, colour in _COLOURS.items():
        parts.append(f'<rect x="{x}" y="46" width="14" height="14" fill="{colour}"/>')
        parts.append(_words(x + 20, 57, _WORDS[kind], _MUTED))
        x += 44 + int(len(_WORDS[kind]) * _LETTER)
    return parts


def _bar(span: Mapping[str, Any], x: float, y: float, width: float) -> str:
    label = span["name"].split("/")[-1]
    title = f"{label or 'unnamed'}: {span['seconds'] * 1e6:.0f} us"
    box = (
        f'<rect x="{x:.2f}" y="{y}" width="{max(width - 0.6, 0.4):.2f}" height="{LANE_HEIGHT}" fill="{_COLOURS[span["kind"]]}">'
        f"<title>{escape(title)}</title></rect>"
    )
    middle = x + width / 2
    if label and width > len(label) * _LETTER + 4:
        return box + _words(middle, y + LANE_HEIGHT / 2 + 4, label, "white", 'text-anchor="middle"')
    if label and span["kind"] != "memory" and width > 11:
        turned = f'text-anchor="middle" font-size="9" transform="rotate(-90 {middle + 3:.2f} {y + LANE_HEIGHT / 2})"'
        return box + _words(middle + 3, y + LANE_HEIGHT / 2, label, "white", turned)
    return box


def _words(x: float, y: float, text: str, colour: str, more: str = "") -> str:
    return f'<text x="{x:.2f}" y="{y}" fill="{colour}" {more}>{escape(text)}</text>'
