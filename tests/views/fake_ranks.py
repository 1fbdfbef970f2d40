"""Event files of ranks that stand still, as the trainer writes them; times are seconds since the begin of the run."""

import time
from contextlib import ExitStack, contextmanager

import numpy as np

from megascale_jax.observe.events import EVENTS_FOLDER, PULSE_S, Events
from megascale_jax.observe.pulse import ALIVE, PASSED, Alive, Passed

STEP_S, STAMPS = 1.0, 40


class Ranks:
    """Ranks of a mesh, one device each, that train in steps of a second until somebody stands still."""

    def __init__(self, run, mesh, held, attempt=0, absent=()):
        self.run, self.mesh, self.held = run, mesh, held
        self.begin_ns = time.monotonic_ns()
        count = int(np.prod(mesh))
        self.events = {}
        for rank in sorted(set(range(count)) - set(absent)):
            events = self.events[rank] = held.enter_context(opened(run, rank, attempt))
            events.describe(mesh=mesh, devices=[rank])

    def at(self, second):
        return self.begin_ns + int(second * 1e9)

    def train(self, rank, steps, first=1):
        """Passes of ``data`` and ``step`` of so many steps, and pulses meanwhile; where the last one ends."""
        events = self.events[rank]
        for step in range(first, first + steps):
            begin = (step - 1) * STEP_S
            events.record("data", self.at(begin), int(0.1 * STEP_S * 1e9), step=step)
            events.record("compile" if step == 1 else "step", self.at(begin + 0.1), int(0.9 * STEP_S * 1e9), step=step)
            if step % int(PULSE_S) == 0:
                self.pulse(rank, begin + 0.5, "step", step, begin + 0.1)
        return (first + steps - 1) * STEP_S

    def pulse(self, rank, at, section, step, since, device=None):
        """One pulse; ``device``: its step, tick, stamps, name, lane."""
        events = self.events[rank]
        text = Alive(section=section, since_ns=self.at(since)).model_dump_json()
        events.instant(ALIVE, begin_ns=self.at(at), step=step, text=text)
        if device is not None:
            of_step, tick, stamps, name, lane = device
            passed = Passed(stamps=stamps, of=STAMPS, name=name, lane=lane).model_dump_json()
            events.instant(PASSED, begin_ns=self.at(at), lane="compute", device=rank, step=of_step, tick=tick, text=passed)

    def stand(self, rank, since, until, section, step, device=None):
        """Pulses from one time to another in one place."""
        second = since
        while second <= until:
            self.pulse(rank, second, section, step, since, device)
            second += PULSE_S

    def flush(self):
        for events in self.events.values():
            assert events.flush(30)

    def end(self, rank):
        """Its process ends as if it was killed."""
        self.events[rank].close()


@contextmanager
def opened(run, rank, attempt):
    run.mkdir(exist_ok=True)
    events = Events(run / EVENTS_FOLDER, rank=rank, attempt=attempt, run="r")
    yield events
    events.close()


@contextmanager
def ranks_of(run, mesh, **options):
    with ExitStack() as held:
        yield Ranks(run, mesh, held, **options)
