"""Small parts of the dashboard: packed arrays, ranges, fields, durations, colours, templates; and what reading a run may not do."""

import json
import re
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_jax.errors import MegascaleError, UsageError
from megascale_jax.views.dashboard import run_view
from megascale_jax.views.dashboard.cube_scene import ranges
from megascale_jax.views.dashboard.packed import UNKNOWN, fractions, packed
from megascale_jax.views.dashboard.page import whole_number
from megascale_jax.views.dashboard.pages import PAGES
from megascale_jax.views.dashboard.render import _TEMPLATES, STATIC, content, duration, share, visible
from megascale_jax.views.dashboard.run_view import METRICS, Missing, RunView
from tests.views.dashboard import runs

STYLE = (STATIC / "style.css").read_text()
TEXTS = ("text", "muted", "accent", "good", "warn", "bad")
GROUNDS = ("ground", "surface", "raised")


def unpacked(content):
    length = int.from_bytes(content[:4], "little")
    facts = json.loads(content[4 : 4 + length])
    arrays = {name: np.frombuffer(content, kind, count, 4 + length + at) for name, (kind, at, count) in facts.pop("arrays").items()}
    return facts, arrays, 4 + length


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["uint8", "int16", "int32", "float32"]), max_size=4), st.text(max_size=20), st.integers(0, 9))
def test_what_is_packed_is_unpacked(kinds, text, count):
    arrays = {f"a{number}": np.arange(count).astype(kind) for number, kind in enumerate(kinds)}
    facts, found, begin = unpacked(packed({"text": text}, arrays))
    assert facts == {"text": text} and begin % 8 == 0
    assert {name: one.tolist() for name, one in found.items()} == {name: one.tolist() for name, one in arrays.items()}


def test_other_types_are_not_packed():
    with pytest.raises(ValueError, match="float64"):
        packed({}, {"a": np.zeros(1)})


def test_fractions_keep_what_is_not_known_and_what_is_too_large():
    assert fractions(np.array([0.1234, -0.5, np.nan, 99.0, -99.0])).tolist() == [1234, -5000, UNKNOWN, 32767, -32767]


@settings(max_examples=30, deadline=None)
@given(st.sets(st.integers(0, 50), max_size=20))
def test_ranges_say_every_number(numbers):
    found = set()
    for part in filter(None, ranges(sorted(numbers), most=1000).split(", ")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    assert found == numbers


def test_of_many_ranges_the_number_of_the_others_is_said():
    assert ranges(range(0, 40, 2), most=2) == "0, 2 and 18 more"


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=20))
def test_a_field_is_a_number_or_refused(text):
    try:
        found = whole_number({"at": text}, "at", most=99)
    except UsageError:
        return
    assert (found is None and not text.strip()) or (found is not None and 0 <= found <= 99)


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=20))
def test_what_is_shown_is_seen(text):
    assert all(sign.isprintable() or sign == "\n" for sign in visible(text))


def test_durations_have_a_unit_that_fits():
    told = [duration(seconds) for seconds in (0, 4.8e-4, 0.0015, 12, 185, 7380, 360000, None, float("nan"))]
    assert told == ["0 s", "480 us", "1.5 ms", "12.0 s", "3 min 05 s", "2 h 03 min", "4 d 04 h", "unknown", "unknown"]
    assert [share(one) for one in (0.98, -0.001, None, float("nan"))] == ["98 %", "0 %", "?", "?"]


def palettes():
    """Light, dark as chosen, dark as the system's."""
    blocks = re.findall(r":root[^{]*\{([^}]*--ground[^}]*)\}", STYLE)
    return [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in blocks]


def luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_text_is_readable_on_every_ground_in_both_themes():
    light, dark, system = palettes()
    assert dark == system and set(light) == set(dark)
    for colours in (light, dark):
        pairs = [(text, ground) for text in TEXTS for ground in GROUNDS]
        pairs += [(text, f"{kind}-ground") for kind in ("good", "warn", "bad") for text in ("text", "muted", kind)]
        pairs += [("on-accent", "accent")]
        faint = [pair for pair in pairs if contrast(*(colours[name] for name in pair)) < 4.5]
        assert faint == []
        drawn = [f"state-{number}" for number in range(7)] + ["state-named", "line-strong", "ring"]
        assert [name for name in drawn if contrast(colours[name], colours["surface"]) < 3.0] == []


def test_templates_have_nothing_that_the_policy_or_escaping_forbids():
    for path in _TEMPLATES.glob("*.html"):
        text = path.read_text()
        assert not re.search(r"\|\s*safe|Markup|autoescape|\son\w+=|\sstyle=|javascript:|https?://", text), path.name
        assert "<style" not in text or path.name == "report.html", "which is a file of its own, with a policy of its own"
        assert all(" src=" in script for script in re.findall(r"<script[^>]*>", text)), path.name
    for path in STATIC.glob("*.js"):
        text = path.read_text()
        found = re.search(r"\beval\(|new Function|\.(inner|outer)HTML\s*=[^=]|document\.write|insertAdjacentHTML|https?://", text)
        assert found is None, path.name


@pytest.mark.parametrize("name", ["empty", "broken", "hostile"])
def test_every_page_of_a_damaged_run_says_what_is_missing(tmp_path, name):
    run = RunView(getattr(runs, name)(tmp_path / name), patience_s=60.0)
    for page in PAGES:
        html = content(page, run, {}, data_link=lambda *_: "data")
        assert html.startswith("<h1>") and "<img" not in html and "<script" not in html, page.key
        for make in page.data.values():
            try:
                assert isinstance(make(run, {}), bytes)
            except MegascaleError as error:  # the answer is its words
                assert str(error)
    run.close()


class Counted:
    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1
        return self.count


@pytest.fixture
def view(tmp_path, monkeypatch):
    monkeypatch.setattr(run_view, "REST", 0.0)
    monkeypatch.setattr(run_view, "LEAST_REST_S", 0.0)
    made = RunView(tmp_path, patience_s=30.0)
    yield made
    made.close()


def settled(view, make, watch, wanted):
    """Asks until a reading in the background is done."""
    for _ in range(2000):
        if view.known("count", make, watch) == wanted:
            return True
        threading.Event().wait(0.005)
    return False


def test_a_result_is_read_again_only_when_its_files_change(view, tmp_path):
    make = Counted()
    assert [view.known("count", make, METRICS) for _ in range(3)] == [1, 1, 1]
    (tmp_path / "metrics.jsonl").write_text("{}")
    assert settled(view, make, METRICS, 2) and make.count == 2


def test_what_takes_long_is_pending_and_then_there(tmp_path):
    view, gate = RunView(tmp_path, patience_s=0.01), threading.Event()
    found = view.known("slow", lambda: gate.wait(30), METRICS)
    assert isinstance(found, Missing) and found.is_pending and not found
    gate.set()
    for _ in range(2000):
        if view.known("slow", lambda: False, METRICS) is True:
            break
        threading.Event().wait(0.005)
    assert view.known("slow", lambda: False, METRICS) is True
    view.close()


def test_whatever_a_reading_raises_is_words(view):
    found = view.known("bad", lambda: 1 // 0, METRICS)
    assert isinstance(found, Missing) and "ZeroDivisionError" in found.why and not found.is_pending


def test_few_results_are_kept(view):
    for number in range(3 * run_view.MOST_KEPT):
        view.known(number, lambda: 1, METRICS)
    assert len(view._entries) == run_view.MOST_KEPT


def test_a_closed_view_says_so(view):
    view.close()
    found = view.known("late", lambda: 1, METRICS)
    assert isinstance(found, Missing) and "stopped" in found.why


@settings(max_examples=10, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_as_files_are_said_to_be_damaged(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("run")
    for name in ("config.yaml", "metrics.jsonl"):
        (folder / name).write_bytes(content)
    view = RunView(folder, patience_s=30.0)
    assert isinstance(view.record, Missing) and isinstance(view.progress, Missing) and isinstance(view.status, Missing)
    assert isinstance(view.config, Missing | dict)
    view.close()
