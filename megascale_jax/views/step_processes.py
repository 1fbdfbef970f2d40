"""Which processes trained a step, and with which mesh: a run may change it between attempts, or between starts of one. No JAX."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from megascale_jax.errors import UsageError
from megascale_jax.observe.event_segments import Facts
from megascale_jax.observe.event_store import read_events
from megascale_jax.views.ranks import files_of_trainers, newest_facts

SPANS = "role = 'trainer' and device >= 0 and step >= 0 and not is_instant"
"""What devices did: pulses of a hang are no step."""
_PROBES = 4
"""Ranks that are asked for a step, one after the other."""


@dataclass(frozen=True)
class StepProcesses:
    """``facts``: by rank, of its newest process in that attempt and with that ``mesh``; ``detailed``: steps with details, in order."""

    step: int
    attempt: int
    mesh: tuple[int, int, int]
    facts: Mapping[int, Facts]
    detailed: tuple[int, ...]


def find_step(run: Path, step: int | None = None, ranks: Collection[int] | None = None) -> StepProcesses:
    """Who trained a step last, of some ranks only if given; by default the newest step with details, without any the newest.

    The lowest of the ranks is asked, and the next ones if it knows nothing of the step. Raises RunFolderError when the run has no
    events, and UsageError when they tell nothing of such ranks, devices or step.
    """
    known = {process: facts for process, paths in files_of_trainers(run).items() if (facts := newest_facts(paths)) is not None}
    present = sorted({facts.rank for facts in known.values()})
    if not any(facts.mesh is not None for facts in known.values()):
        raise UsageError(f"the events of {run} tell of no devices; expected a run that has begun to train")
    if unknown := sorted(set(ranks or ()) - set(present)):
        raise UsageError(f"--ranks {unknown[0]}: no events of it; there are those of {len(present)} ranks, {present[0]} to {present[-1]}")
    seen: set[int] = set()
    for rank in [rank for rank in present if ranks is None or rank in ranks][:_PROBES]:
        with read_events(run, ranks={rank}) as store:
            rows = store.sql(
                "select step, process, attempt, max(unix_ns) as newest, bool_or(tick >= 0) as has_details "
                f"from events where {SPANS} group by step, process, attempt"
            ).to_pylist()
        steps = {row["step"] for row in rows}
        detailed = sorted({row["step"] for row in rows if row["has_details"]})
        chosen = max(detailed or steps, default=None) if step is None else step
        seen |= steps
        if chosen is None or chosen not in steps:
            continue
        last = max((row for row in rows if row["step"] == chosen), key=lambda row: (row["attempt"], row["newest"]))
        mesh = known[last["process"]].mesh if last["process"] in known else None
        if mesh is None:
            raise UsageError(f"the events of step {chosen} do not say of which mesh they are: their files are damaged")
        return StepProcesses(chosen, last["attempt"], mesh, _newest_by_rank(known, last["attempt"], mesh), tuple(detailed))
    if not seen:
        raise UsageError(f"{run} has no events of devices; train.events.stamps has them written")
    raise UsageError(f"{run} has no events of devices in step {step}; there are steps {min(seen)} to {max(seen)}")


def _newest_by_rank(known: Mapping[str, Facts], attempt: int, mesh: tuple[int, int, int]) -> dict[int, Facts]:
    of_step = [facts for facts in known.values() if facts.attempt == attempt and facts.mesh == mesh]
    return {facts.rank: facts for facts in sorted(of_step, key=lambda facts: max((unix_ns for _, unix_ns in facts.anchors), default=0))}
