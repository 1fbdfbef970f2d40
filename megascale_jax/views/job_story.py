"""Interruptions of a driven run, for a page and a report: what was suspected and found, how long each phase took, what was lost. No JAX.

From the driver's journal (`cluster/history.py`); log lines of the named nodes where their folders are below the run's, as those of a
local or shared-disk job are. A run without a driver has none, which is said.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megascale_jax.cluster.attempts import attempt_folder
from megascale_jax.cluster.history import JobHistory, Line, PastIncident, PhaseSpan, read_history
from megascale_jax.cluster.job import job_folder
from megascale_jax.cluster.link.tokens import NAME
from megascale_jax.cluster.log_reader import clean_lines
from megascale_jax.cluster.policy import ranks_of
from megascale_jax.cluster.state import Incident, State
from megascale_jax.cluster.story import described, spent

MOST_SUSPICIONS, MOST_LOGS, LOG_LINES, LOG_BYTES = 8, 4, 30, 16 << 10
"""Of an incident: suspicions and logs that are shown; of a log its last lines, out of so many bytes."""
_WITH_LOGS = 20
"""Newest incidents whose logs are looked for: nodes keep those of a few attempts."""


@dataclass(frozen=True)
class Log:
    """The end of the log of a process that an incident named."""

    node: str
    path: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class IncidentStory:
    """One incident; times in seconds, ``began_unix_s`` since 1970.

    ``spent_s``: seconds by phase, those that are over; ``took_s``: until the training went on, ``None``: it is not over;
    ``lost_steps``: steps that were done again; ``followers``: suspicions that were consequences.
    """

    number: int
    attempt: int
    began_unix_s: float
    step: int
    suspicions: tuple[str, ...]
    num_suspicions: int
    followers: int
    named: tuple[str, ...]
    evicted: tuple[str, ...]
    findings: tuple[tuple[str, str], ...]
    spent_s: tuple[tuple[str, float], ...]
    took_s: float | None
    resumed_step: int | None
    lost_steps: int | None
    rewind: tuple[int, int, int] | None
    is_planned: bool
    logs: tuple[Log, ...]


@dataclass(frozen=True)
class NodeStory:
    """A node as the journal knows it; ``rank``: of its seat, if it has one."""

    name: str
    rank: int | None
    status: str
    reason: str


@dataclass(frozen=True)
class JobStory:
    """A job of a driver; the newest line and incident last."""

    phase: str
    outcome: str
    has_ended: bool
    incidents: tuple[IncidentStory, ...]
    lines: tuple[Line, ...]
    phases: tuple[PhaseSpan, ...]
    nodes: tuple[NodeStory, ...]
    alarms: tuple[str, ...]
    attempt: int
    step: int
    saved_step: int
    saved_unix_s: float | None
    note: str


def read_stories(run: Path) -> tuple[JobStory, ...]:
    """All jobs of a run's drivers, oldest first; none: it was never driven. Never raises for what is in the files."""
    folder = job_folder(run)
    return tuple(story_of(job, folder / "nodes") for job in read_history(folder))


def story_of(job: JobHistory, nodes: Path | None = None) -> JobStory:
    """A job's story; ``nodes``: where the folders of its nodes are, if logs are wanted."""
    state = job.state
    first = max(0, len(job.incidents) - _WITH_LOGS)
    incidents = tuple(_incident(one, nodes if number >= first else None) for number, one in enumerate(job.incidents))
    return JobStory(
        phase="unknown" if state is None else state.phase.value,
        outcome="" if state is None else state.outcome,
        has_ended=job.has_ended,
        incidents=incidents,
        lines=job.lines,
        phases=job.phases,
        nodes=() if state is None else tuple(_nodes(state)),
        alarms=() if state is None else state.alarms,
        attempt=0 if state is None else state.attempt,
        step=0 if state is None else state.best_step,
        saved_step=0 if state is None else state.saved_step,
        saved_unix_s=job.saved_unix_s,
        note=job.note,
    )


def _nodes(state: State) -> Iterator[NodeStory]:
    ranks = ranks_of(state)
    for name, node in sorted(state.nodes.items(), key=lambda item: (ranks.get(item[0], len(ranks)), item[0])):
        yield NodeStory(name, ranks.get(name), node.status.value, node.reason)


def _incident(past: PastIncident, nodes: Path | None) -> IncidentStory:
    one = past.incident
    primary = [suspicion for suspicion in one.suspicions if suspicion.is_primary] or list(one.suspicions)
    resumed, is_over = one.resumed_step, one.restored_s is not None
    return IncidentStory(
        number=one.number,
        attempt=past.attempt,
        began_unix_s=past.began_unix_s,
        step=one.step,
        suspicions=tuple(described(suspicion) for suspicion in primary[:MOST_SUSPICIONS]),
        num_suspicions=len(primary),
        followers=len(one.suspicions) - len(primary),
        named=one.named,
        evicted=one.evicted,
        findings=tuple(one.findings.items()),
        spent_s=tuple(spent(one)),
        took_s=one.restored_s - one.began_s if one.restored_s is not None else None,
        resumed_step=resumed,
        lost_steps=max(0, one.step - (resumed or 0)) if is_over else None,
        rewind=one.rewind,
        is_planned=one.is_planned,
        logs=() if nodes is None else tuple(_logs(nodes, past.attempt, _suspected(one))),
    )


def _suspected(incident: Incident) -> list[str]:
    nodes = [one.node for one in incident.suspicions if one.is_primary and one.node is not None]
    return list(dict.fromkeys((*incident.named, *nodes)))


def _logs(nodes: Path, attempt: int, names: Sequence[str]) -> Iterator[Log]:
    safe = [name for name in names if re.fullmatch(NAME, name)]  # a journal is a file: its names choose no other folder
    for name in safe[:MOST_LOGS]:
        for path in sorted(attempt_folder(nodes / name, attempt).glob("rank-*.log"))[:1]:
            if lines := _tail(path):
                yield Log(name, f"{name}/{path.parent.name}/{path.name}", lines)


def _tail(path: Path) -> tuple[str, ...]:
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - LOG_BYTES))
            return tuple(clean_lines(stream.read(LOG_BYTES))[-LOG_LINES:])
    except OSError:
        return ()
