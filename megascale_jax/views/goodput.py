"""Where the time of a job went: every second of its wall time booked, each interruption with what it cost. No JAX, no picture.

From the event files alone, of all attempts and ranks and of the driver, if there was one. The rules are `booking.py`'s, and these:

- A step that was executed again counts once, by the execution whose result the model has: the newest. The former ones are *recomputed*:
  their time was spent and their result thrown away. So is what was done of a step when its process died.
- `Goodput.effective` is the paper's effective training time ratio (section 6.3): training time that counted / wall time. Evaluation,
  compilation, blocking saves, waits for rows, restarts, diagnosis and idle time are no training.
- A wait for rows counts from where the devices have done the step before; without stamps as the main thread saw it.
- A step that did not end is training, or recomputed, for as long as the longest that ended; beyond that it is a hang, and idle.
- The first step of a process is its compilation; the wait for the last checkpoint at a run's end is a blocking save.

A run that goes on is booked up to its newest event. What damaged or missing files do not tell is idle, with the reason.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megascale_jax.config.load import read_resolved
from megascale_jax.errors import ConfigError, RunFolderError, UsageError
from megascale_jax.observe.booked import Kind
from megascale_jax.observe.event_store import read_events
from megascale_jax.observe.metrics import read_metrics
from megascale_jax.views.booking import CODES, HANG, UNSEEN, Timeline, book
from megascale_jax.views.driver_phases import DriverEvents, read_driver
from megascale_jax.views.incidents import Incident, find_incidents
from megascale_jax.views.mfu_trend import MfuTrend, find_trend
from megascale_jax.views.passes import Passes, chosen_ranks, read_passes
from megascale_jax.views.ranks import facts_of, files_of_trainers
from megascale_jax.views.step_seconds import step_seconds

_ACTIVITY = {
    **dict.fromkeys(("start", "join", "restore"), "restart"),
    "compile": "compile",
    "evaluate": "evaluation",
    **dict.fromkeys(("checkpoint", "end"), "checkpoint"),
}
_PHASES = {
    "diagnosing": "driver diagnoses",
    **dict.fromkeys(("suspended", "replacing", "restoring"), "driver restarts"),
    **dict.fromkeys(("running", "stopping"), UNSEEN),
}


@dataclass(frozen=True)
class Goodput:
    """A job's time. ``steps``: distinct ones whose result counts; ``recomputed_steps``: executions that were thrown away, of one rank.

    ``tokens_per_s``: of the steps that count over the wall time, padding included; ``None``: not known. ``ranks``: those that were
    read. ``is_over``: ``False`` when a process still writes. ``notes``: one line each.
    """

    run: str
    timeline: Timeline
    booked_ns: Mapping[Kind, int]
    idle_ns: Mapping[str, int]
    incidents: tuple[Incident, ...]
    steps: int
    recomputed_steps: int
    tokens_per_s: float | None
    trend: MfuTrend
    ranks: tuple[int, ...]
    is_over: bool
    notes: tuple[str, ...]

    @property
    def wall_ns(self) -> int:
        """From the first event to the newest, the sum of all classes."""
        return self.timeline.wall_ns

    @property
    def effective(self) -> float | None:
        """Effective training time ratio, a fraction; ``None`` without any time."""
        return self.booked_ns["training"] / self.wall_ns if self.wall_ns else None


def read_goodput(run: Path, ranks: Sequence[int] | None = None) -> Goodput:
    """The time of a run, by some of its ranks (`chosen_ranks` by default).

    Raises RunFolderError when the run has no events, or none that can be booked, and UsageError for a rank that has none.
    """
    known = {facts.rank for paths in files_of_trainers(run).values() if (facts := facts_of(paths[0]) or facts_of(paths[-1])) is not None}
    if unknown := sorted(set(ranks or ()) - known):
        raise UsageError(f"--ranks {unknown[0]}: {run} has no events of it; there are those of {len(known)} ranks")
    chosen = sorted(set(ranks)) if ranks is not None else chosen_ranks(sorted(known))
    notes = [f"{len(chosen)} of {len(known)} ranks were read; what another rank waited for alone is training here"]
    with read_events(run, ranks={*chosen, 0}) as store:
        passes = read_passes(store, chosen)
        driver = read_driver(store, passes.ahead_ns)
        lost = lost_passes(passes)
        timeline = book(*_activities(passes, lost, driver))
        if not timeline.wall_ns:
            raise RunFolderError(f"{run} has no events of a process's passes or of a driver's phases; wait for the first ones")
        seconds = step_seconds(passes, lost)
        metrics = _metrics(run)
        trend = find_trend(run, seconds, metrics, is_peak_measured=_is_peak_measured(run))
        writers = {file.writer for file in store.files}
        if not passes.has_stamps and passes.of("data").any():
            notes.append("the run has no stamps of devices, so waits for rows are those of the main thread: some of them cost nothing")
        notes += store.notes
    trained = passes.of("compile", "step") & (passes.step > 0) & (passes.is_open == 0)
    counted = np.unique(passes.step[trained & ~lost]).size
    activities = timeline.activities_ns()
    return Goodput(
        run=run.resolve().name,
        timeline=timeline,
        booked_ns=timeline.booked_ns(),
        idle_ns={name: activities[name] for name in activities if CODES[name] >= CODES[HANG] and activities[name]},
        incidents=find_incidents(passes, lost, timeline, driver),
        steps=counted,
        recomputed_steps=_executions(passes, trained & lost),
        tokens_per_s=_tokens_per_s(metrics, counted, timeline.wall_ns),
        trend=trend,
        ranks=tuple(chosen),
        is_over="alive" not in writers,
        notes=tuple(notes[0 if len(chosen) < len(known) else 1 :]),
    )


def lost_passes(passes: Passes) -> np.ndarray:
    """Which passes of steps have no effect on the model, bool[n]: a later process went on from a step before."""
    begun = [(one.begin_ns, one.first_step) for one in passes.processes if one.first_step is not None]
    if not begun:
        return np.zeros(passes.step.size, bool)
    begin_ns, first = (np.array(column, np.int64) for column in zip(*sorted(begun), strict=True))
    lowest = np.append(np.minimum.accumulate(first[::-1])[::-1], 1 << 62)
    later = lowest[np.searchsorted(begin_ns, passes.begin_ns, "right")]
    return (passes.step > 0) & (passes.step >= later)


def _activities(passes: Passes, lost: np.ndarray, driver: DriverEvents) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Begin, end and code (`CODES`) of all that went on."""
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def add(rows: np.ndarray, begin_ns: np.ndarray, end_ns: np.ndarray, code: int | np.ndarray) -> None:
        codes = np.broadcast_to(np.asarray(code, np.int8), passes.step.shape)
        found.append((begin_ns[rows], end_ns[rows], codes[rows]))

    for section, activity in _ACTIVITY.items():
        add(passes.of(section), passes.begin_ns, passes.end_ns, CODES[activity])
    waits, steps = passes.of("data"), passes.of("step")
    trains = np.where(lost, CODES["recomputed"], CODES["training"])
    add(waits & (passes.step <= 0), passes.begin_ns, passes.end_ns, CODES["restart"])  # the preparation
    add(waits & (passes.step > 0), passes.rows_from_ns, passes.end_ns, CODES["data wait"])
    add(waits & (passes.step > 0), passes.begin_ns, passes.rows_from_ns, trains)
    hang_from_ns = np.where(passes.is_open > 0, np.minimum(passes.end_ns, passes.begin_ns + _longest_ns(passes)), passes.end_ns)
    add(steps, passes.begin_ns, hang_from_ns, trains)
    add(steps & (passes.is_open > 0), hang_from_ns, passes.end_ns, CODES[HANG])
    for phase, begin_ns, end_ns in driver.phases:
        if phase in _PHASES:
            found.append((np.array([begin_ns]), np.array([end_ns]), np.array([CODES[_PHASES[phase]]], np.int8)))
    begins, ends, codes = (np.concatenate(columns) for columns in zip(*found, strict=True))
    return begins, ends, codes


def _longest_ns(passes: Passes) -> np.ndarray:
    """Of the process of each pass, its longest step that ended, without any the longest compilation; int64[n]."""
    ended, longest = passes.is_open == 0, np.zeros(len(passes.processes) + 1, np.int64)
    for section in ("compile", "step"):
        rows, of_section = ended & passes.of(section), np.zeros_like(longest)
        np.maximum.at(of_section, passes.process[rows], (passes.end_ns - passes.begin_ns)[rows])
        longest = np.where(of_section > 0, of_section, longest)
    return longest[passes.process]


def _executions(passes: Passes, rows: np.ndarray) -> int:
    """Passes of the rank that has most of them."""
    ranks = np.array([one.rank for one in passes.processes], np.int64)
    return int(np.unique(ranks[passes.process[rows]], return_counts=True)[1].max(initial=0))


def _metrics(run: Path) -> list[dict]:
    with suppress(RunFolderError, OSError):
        return read_metrics(run, "train")
    return []


def _is_peak_measured(run: Path) -> bool:
    """Whether every start measures its devices' peak: the configuration names none."""
    with suppress(ConfigError, OSError):
        return read_resolved(run / "config.yaml").system.peak_tflops is None
    return False


def _tokens_per_s(metrics: Sequence[Mapping], steps: int, wall_ns: int) -> float | None:
    per_step = [line["tokens"] / line["step"] for line in metrics[-1:] if line["step"] > 0 and isinstance(line.get("tokens"), int)]
    return per_step[0] * steps / (wall_ns / 1e9) if per_step and wall_ns else None
