"""Faults for a live local job, and what became of each: found when, named right, healed when, at what cost.

An injected fault is a real one: signals to real processes of the real trainer, nodes switched off, bytes flipped in checkpoints.
What the driver knows comes from its own status, asked over the control link like any operator does.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from megascale_jax.cluster.faults import KINDS
from megascale_jax.cluster.injury import Fault, Injury, Job, nothing
from megascale_jax.errors import UsageError

POLL_S = 0.2
STEADY_LIMIT_S = 300.0
"""Longest wait for a job that trains."""
SETTLED_STEPS = 3


@dataclass
class Record:
    """One fault. Seconds from its injection, by the driver's clock; ``None``: it did not come to that."""

    kind: str
    node: str | None
    step: int
    recovered: bool = False
    is_interruption: bool | None = True
    """Training had to be interrupted; ``None``: it may have been."""
    detected_s: float | None = None
    suspended_s: float | None = None
    diagnosed_s: float | None = None
    replaced_s: float | None = None
    restored_s: float | None = None
    total_s: float | None = None
    interruptions: int = 0
    steps_lost: int = 0
    named: Sequence[str] = ()
    right_node_named: bool | None = None
    healthy_evicted: Sequence[str] = ()
    observed: Sequence[str] = ()
    """What the driver said of it without acting."""
    limit_s: float | None = None
    """Limit of a step when it was injected, as learned from the run."""
    step_s: float | None = None
    """What a step took then."""
    measured: dict[str, float] = field(default_factory=dict)
    """What only this kind has, seconds."""
    note: str = ""


@dataclass
class Drill:
    """Faults of a job one after the other, each once the one before is over."""

    job: Job
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    records: list[Record] = field(default_factory=list)

    def kinds(self) -> dict[str, Fault]:
        """What can be injected into this job; what cannot is said, with the reason."""
        lacking = {kind: fault.lacks(self.job) for kind, fault in KINDS.items()}
        for kind, why in lacking.items():
            if why:
                self.say(f"{kind}: not here, {why}")
        return {kind: fault for kind, fault in KINDS.items() if not lacking[kind]}

    def run(self, kind: str, choice: int, pause_s: float) -> Record:
        """Inject one fault once training has advanced for ``pause_s``, and wait until it goes on.

        Raises UsageError for a fault that there is not, or not for this job.
        """
        if kind not in KINDS:
            raise UsageError(f"no fault {kind!r}; there are {', '.join(KINDS)}")
        fault = KINDS[kind]
        if why := fault.lacks(self.job):
            raise UsageError(f"{kind} cannot be injected into this job: {why}")
        status = self._steady(pause_s, fault.after_steps)
        seats = [name for name in status["seats"] if status["nodes"][name]["processes"]]
        node = seats[choice % len(seats)]
        record = Record(kind, node if fault.hits_node else None, status["step"], is_interruption=fault.interrupts)
        record.limit_s, record.step_s = status["step_limit_s"], status["nodes"][node]["processes"][0]["step_s"]
        known, began_s, at = status["num_incidents"], status["now_s"], self.clock()
        injury = fault.inject(self.job, status, node)
        try:
            after = self._until_over(fault, injury, status)
        finally:
            injury.undo()
        if after is None:
            record.note = f"not over after {fault.limit_s:.0f} s"
        else:
            self._note(record, injury, after, known, began_s)
            record.total_s = self.clock() - at if record.total_s is None else record.total_s
        self.records.append(record)
        self.say(_line(record))
        return record

    def _steady(self, pause_s: float, steps: int) -> dict[str, Any]:
        """The status once the job runs, has a checkpoint to spare, and has gone on for a while."""
        limit, since, step = self.clock() + STEADY_LIMIT_S, self.clock(), None
        while self.clock() < limit:
            status = self.job.status()
            if status is None or status["phase"] != "running" or any(not status["nodes"][n]["processes"] for n in status["seats"]):
                since, step = self.clock(), None
            elif step is None:
                since, step = self.clock(), status["step"]
            elif status["step"] >= step + steps and self.clock() > since + pause_s:
                return status
            if status is not None and status["outcome"]:
                break
            time.sleep(POLL_S)
        raise UsageError("the job does not run, so no fault can be injected; see `megascale job status`")

    def _until_over(self, fault: Fault, injury: Injury, before: dict[str, Any]) -> dict[str, Any] | None:
        """The status once every interruption is over and training went on for a few steps with nothing being hurt any more."""
        limit, seats, steps = self.clock() + fault.limit_s, len(before["seats"]), set[int]()
        while self.clock() < limit:
            status = self.job.status()
            if injury.is_enough is not None:
                if injury.is_enough(status):
                    injury.undo()
                    injury.undo, injury.is_enough = nothing, None
                    steps.clear()
            elif status is None or status["phase"] != "running" or len(status["seats"]) < seats:
                steps.clear()
            else:
                incidents = _new(status, before["num_incidents"])
                is_healed = bool(incidents) and incidents[-1]["restored_s"] is not None  # one that another cut short is part of that
                steps.add(status["step"])
                if is_healed or (not fault.interrupts and not incidents and len(steps) > SETTLED_STEPS):
                    return status
            time.sleep(POLL_S)
        return None

    def _note(self, record: Record, injury: Injury, status: dict[str, Any], known: int, began_s: float) -> None:
        incidents = _new(status, known)
        record.observed = [text for at_s, text in status["observed"] if at_s > began_s]
        if (rule := KINDS[record.kind].looks_for) is not None and not incidents and not any(rule in text for text in record.observed):
            record.note = f"{rule} did not see it"
        evicted = {name for incident in incidents for name in incident["evicted"]}
        wanted = KINDS[record.kind].interruptions
        if wanted is not None and (len(incidents) != wanted or evicted):
            what = "; ".join(incident["text"] for incident in incidents)
            record.note = f"{len(incidents)} interruption(s), expected {wanted}, and no eviction: {what}"
        record.note, record.measured = record.note or injury.amiss(), injury.measured
        record.recovered = not record.note
        record.healthy_evicted = sorted(evicted - injury.nodes)
        if not incidents:
            return
        first, last = incidents[0], incidents[-1]
        record.interruptions = len(incidents)
        record.detected_s = first["began_s"] - began_s
        marks = [last[name] for name in ("began_s", "suspended_s", "diagnosed_s", "replaced_s", "restored_s")]
        spans = [None if one is None or other is None else other - one for one, other in pairwise(marks)]
        record.suspended_s, record.diagnosed_s, record.replaced_s, record.restored_s = spans
        record.total_s = last["restored_s"] - began_s
        record.steps_lost = max(0, first["step"] - (last["resumed_step"] or 0))
        record.named = sorted({name for incident in incidents for name in incident["named"]})
        record.right_node_named = None if record.node is None else record.node in record.named and set(record.named) <= injury.nodes


def _new(status: dict[str, Any], known: int) -> list[dict[str, Any]]:
    return [incident for incident in status["incidents"] if incident["number"] > known]


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """What a table needs: counts, and the mean of each part of the recoveries, seconds."""
    named = [record for record in records if record.right_node_named is not None]
    broken = [record for record in records if record.recovered and record.detected_s is not None]

    def mean(name: str) -> float | None:
        values = [value for record in broken if (value := getattr(record, name)) is not None]
        return sum(values) / len(values) if values else None

    return {
        "injected": len(records),
        "recovered": sum(record.recovered for record in records),
        "right_node_named": sum(bool(record.right_node_named) for record in named),
        "nodes_to_name": len(named),
        "healthy_evicted": sum(len(record.healthy_evicted) for record in records),
        "mttr_s": {
            "detect": mean("detected_s"),
            "suspend": mean("suspended_s"),
            "diagnose": mean("diagnosed_s"),
            "replace": mean("replaced_s"),
            "restore": mean("restored_s"),
            "total": mean("total_s"),
        },
        "faults": [asdict(record) for record in records],
    }


def losses(run: Path) -> dict[int, float | None]:
    """The loss of each step, as `metrics.jsonl` has it."""
    found: dict[int, float | None] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        with suppress(ValueError):
            record = json.loads(line)
            if record.get("kind") == "train":
                found[record["step"]] = record.get("loss")
    return found


def compared(broken: dict[int, float | None], whole: dict[int, float | None], tolerance: float) -> dict[str, Any]:
    """Losses of a run with faults beside those of one without: bit for bit, and the largest relative difference."""
    pairs = [(loss, whole.get(step)) for step, loss in broken.items()]
    gaps = [math.inf if one is None or other is None else abs(one - other) / abs(other) for one, other in pairs if one != other]
    largest = max(gaps, default=0.0)
    return {
        "loss_bit_equal": not gaps,
        "loss_max_difference": largest,
        "losses_agree": largest <= tolerance,
        "steps_compared": len(pairs),
    }


def _line(record: Record) -> str:
    where = f" on {record.node}" if record.node else ""
    measured = "".join(f", {name} {seconds:.1f}" for name, seconds in record.measured.items())
    if not record.recovered:
        return f"{record.kind}{where} at step {record.step}: NOT recovered; {record.note}{measured}"
    if record.detected_s is None:
        said = record.note or "; ".join(record.observed)
        return f"{record.kind}{where} at step {record.step}: training went on{f'; {said}' if said else ''}"
    verdict = {True: "right node named", False: f"WRONG: named {', '.join(record.named) or 'none'}", None: ""}[record.right_node_named]
    return (
        f"{record.kind}{where} at step {record.step}: detected in {record.detected_s:.1f} s, training after {record.total_s:.1f} s, "
        f"{record.steps_lost} step(s) again; {verdict}{measured}"
    )
