"""Run folders as a dashboard meets them: healthy, hanging, large, empty, broken, and with names that want to be more than names."""

import json
import time

import numpy as np

from megascale_jax.config.layout import MeshShape
from megascale_jax.observe.events import EVENTS_FOLDER
from megascale_jax.observe.pulse import Passed
from megascale_jax.views.dashboard.heat_window import window_of
from megascale_jax.views.dashboard.run_view import Missing, RunView
from megascale_jax.views.progress import DevicePosition, Progress, RankProgress
from megascale_jax.views.slow_devices import find_slow
from megascale_jax.views.step_times import StepTimes
from megascale_jax.views.why import judge
from tests.views.fake_ranks import ranks_of
from tests.views.fake_run import make_run
from tests.views.made_run import made_run

MESH = (2, 2, 2)
HOSTILE = "<script>document.title='owned'</script>\"><img src=x onerror=\"document.title='owned'\">\u202egnp.exe\x1b[31m"
"""A name that runs, closes attributes, turns directions, and colours terminals."""


def healthy(folder, *, slow=1.0, steps=range(1, 17), mesh=MESH):
    """A small run that has ended; device 5 takes ``slow`` times as long backward."""
    make_run(folder, steps=max(steps), evaluate_every=8)
    place = tuple(int(one) for one in np.unravel_index(5, mesh))
    made_run(folder, mesh=mesh, steps=steps, scale=lambda of, *at: slow if of == "backward" and at[:3] == place else 1.0, noise=0.01)
    return folder


def hanging(folder, *, mesh=MESH, stuck=5):
    """A run in which one rank waits for its rows, and the others wait for it in collectives."""
    with ranks_of(folder, mesh) as ranks:
        for rank in ranks.events:
            ended = ranks.train(rank, 20)
            lane = ("tensor", "data", "pipe")[rank % 3]
            waits = ("step", 22, (22, 3, 12, f"G.{lane}", lane))
            ranks.stand(rank, ended, 200.0, *(("data", 21, None) if rank == stuck else waits))
        ranks.flush()
    return folder


def empty(folder):
    """A run that has not begun."""
    folder.mkdir(parents=True)
    return folder


def broken(folder):
    """Garbage in every file that a run has."""
    rng = np.random.default_rng(0)
    (folder / EVENTS_FOLDER).mkdir(parents=True)
    garbage = rng.bytes(4096)
    names = ("config.yaml", "metrics.jsonl", "summary.json", "cluster/journal.sqlite", "cluster/driver.json")
    for name in (*names, "events/trainer-00000-1-1.00000.arrows", "events/trainer-00001-1-1.00000.parquet"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(garbage)
    return folder


def hostile(folder):
    """A run whose folder, hosts and texts want to be more than text."""
    folder = folder.with_name("<img src=x onerror=alert(1)>")
    folder.mkdir(parents=True)
    with ranks_of(folder, (1, 2, 1)) as ranks:
        for rank, events in ranks.events.items():
            events.describe(host=HOSTILE)
            ended = ranks.train(rank, 20)
            events.instant(HOSTILE, begin_ns=ranks.at(ended), step=20, text=HOSTILE)
            waits = ("step", 22, (22, 3, 12, HOSTILE, "tensor"))
            ranks.stand(rank, ended, 200.0, *(("data", 21, None) if rank == 1 else waits))
        ranks.flush()
    (folder / "config.yaml").write_text(json.dumps({"name": HOSTILE}))
    return folder


def large_times(mesh=(8, 192, 8), steps=100, slow=((3, 100, 5), 1.25)):
    """The times of 12,288 devices over 100 steps as arrays; one is slower backward."""
    rng = np.random.default_rng(1)
    shape = (steps, *mesh)
    base = {"forward": 1.0, "backward": 2.0, "weight": 1.0, "optimizer": 0.05}
    computed = {name: seconds * (1 + 0.02 * rng.standard_normal(shape)) for name, seconds in base.items()}
    place, factor = slow
    computed["backward"][:, *place] *= factor
    total = np.sum([*computed.values()], axis=0)
    length = total.max(axis=(1, 2, 3), keepdims=True) * np.ones(shape)
    size = int(np.prod(mesh))
    hosts = tuple(f"host-{device // 8:04d}" for device in range(size))
    waits = {("backward wait", "data"): length - total}
    return StepTimes(
        MeshShape(*mesh), np.arange(1, steps + 1), hosts, computed, np.zeros(shape), waits, length, (), None, tuple(range(size))
    )


def large_progress(mesh=(8, 192, 8), stuck=4321):
    """12,288 ranks, one device each, that wait for one."""
    until_ns = time.time_ns()
    since_ns = until_ns - int(400e9)

    def rank(number):
        pipe, data, tensor = (int(one) for one in np.unravel_index(number, mesh))
        lane = "tensor" if data % 3 else "data"
        passed = Passed(stamps=12 if pipe % 2 else 14, of=40, name=f"G.{lane}" if pipe % 2 else "P.send", lane=lane if pipe % 2 else "pipe")
        at = {"section": "step", "step": 22, "since_ns": since_ns, "devices": (DevicePosition(number, 22, 3, passed),), "completed": 21}
        if number == stuck:
            at |= {"section": "data", "devices": (DevicePosition(number, 21, -1, passed.model_copy(update={"stamps": 40})),)}
        times = {"moved_ns": since_ns, "last_ns": until_ns, "longest_s": {"step": 1.0}, "passes": {"step": 20}}
        return RankProgress(number, f"host-{number // 8:04d}", ((pipe, data, tensor),), **at, **times)

    return Progress(0, mesh, tuple(rank(number) for number in range(int(np.prod(mesh)))), until_ns, until_ns)


class LargeRun(RunView):
    """12,288 ranks, 100 steps, of which one stands out, and a hang; from arrays, since so many files take a test too long."""

    def __init__(self, folder):
        super().__init__(folder)
        times = large_times()
        self._window = window_of(times, find_slow(times))
        found = large_progress()
        self._found = found, judge(found)

    def known(self, key, make, watch, patience_s=None):
        """The window; nothing else is there."""
        return self._window if key[0] == "heat" else Missing("not made here")

    @property
    def progress(self):
        """The hang."""
        return self._found

    @property
    def record(self):
        """None."""
        return Missing("not made here")
