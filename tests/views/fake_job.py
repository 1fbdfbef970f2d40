"""Event files of a job on a clock of its own: what is told at second t is read at `EPOCH_NS` + t, to the nanosecond."""

import time
from contextlib import contextmanager
from types import SimpleNamespace

from megascale_jax.observe import event_segments, events
from megascale_jax.observe.events import EVENTS_FOLDER, Events
from megascale_jax.observe.pulse import ALIVE, Alive

EPOCH_NS = 1_700_000_000 * 10**9
DATA_S, STEP_S = 0.25, 0.75


def ns(seconds):
    return round(seconds * 1e9)


class Told:
    """What one process tells; seconds since `EPOCH_NS`."""

    def __init__(self, out, ahead_s=0.0):
        self.out, self.ahead_ns = out, ns(ahead_s)

    def span(self, name, begin, end, step=-1, **columns):
        self.out.record(name, ns(begin) + self.ahead_ns, ns(end) - ns(begin), step=step, **columns)
        return end

    def instant(self, name, at, step=-1, **columns):
        self.out.instant(name, begin_ns=ns(at) + self.ahead_ns, step=step, **columns)

    def begin(self, at, resume=None, start=2.0, prepare=1.0, join=3.0, restore=4.0):
        """The passes before the first step; where the last one ends."""
        at = self.span("start", at, at + start)
        at = self.span("data", at, at + prepare)
        at = self.span("join", at, at + join)
        at = self.span("restore", at, at + restore)
        if resume is not None:
            self.instant("resume", at, resume, text="from storage")
        return at

    def steps(self, at, first, last, compiled=True, data=DATA_S, step=STEP_S):
        """Passes of so many steps, the first one with its compilation of 5 s; where the last one ends."""
        for number in range(first, last + 1):
            at = self.span("data", at, at + data, number)
            is_first = compiled and number == first
            at = self.span("compile" if is_first else "step", at, at + (5.0 if is_first else step), number)
        return at

    def pulse(self, at, section, since, step=-1):
        text = Alive(section=section, since_ns=ns(since) + self.ahead_ns).model_dump_json()
        self.instant(ALIVE, at, step, text=text)


class Job:
    """``job(rank=..., attempt=..., role=...)``: the writer of one process, in the folder ``run``."""

    def __init__(self, folder, monkeypatch):
        frozen = {"monotonic_ns": lambda: 0, "time_ns": lambda: EPOCH_NS, "time": time.time}
        monkeypatch.setattr(event_segments, "time", SimpleNamespace(**frozen))
        monkeypatch.setattr(events, "time", SimpleNamespace(**frozen))
        self.run = folder / "run"
        self.run.mkdir()

    @contextmanager
    def __call__(self, rank=0, attempt=0, role="trainer", host=None, ahead_s=0.0):
        out = Events(self.run / EVENTS_FOLDER, role=role, rank=rank, attempt=attempt, run="r", clock=lambda: 0)
        if host is not None:
            out.describe(host=host, boot_id=host)
        yield Told(out, ahead_s)
        assert out.flush(30)
        out.close(30)
