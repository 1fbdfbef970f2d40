"""The picture of a tick: three lanes, every span in its own, labels only where they fit."""

import xml.etree.ElementTree as ET

from megascale_jax.views.lanes import LANES, lanes_svg

SPANS = [
    {"lane": "compute", "name": "steady/F0.in", "kind": "gemm", "start_s": 0.0, "seconds": 2e-3},
    {"lane": "compute", "name": "steady/F0.store", "kind": "memory", "start_s": 2e-3, "seconds": 1e-5},
    {"lane": "tensor", "name": "steady/L0.scatter", "kind": "transfer", "start_s": 1e-3, "seconds": 1e-4},
    {"lane": "network", "name": "steady/P.send_<g>", "kind": "transfer", "start_s": 0.0, "seconds": 1e-3},
]


def test_every_span_is_a_bar_with_its_time():
    root = ET.fromstring(lanes_svg(SPANS, "a & b"))
    titles = [element.text for element in root.iter() if element.tag.endswith("title")]
    assert titles == ["F0.in: 2000 us", "F0.store: 10 us", "L0.scatter: 100 us", "P.send_<g>: 1000 us"]
    words = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"a & b", "F0.in", *LANES.values()} <= set(words) and "F0.store" not in words


def test_no_spans_are_an_empty_picture():
    assert ET.fromstring(lanes_svg([], "nothing")).tag.endswith("svg")
