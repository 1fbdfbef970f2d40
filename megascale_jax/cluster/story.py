"""What a change of a job is called, in lines for a terminal and a log."""

from collections.abc import Iterator

from megascale_jax.cluster.lifecycle import ENDS, Phase
from megascale_jax.cluster.state import Advanced, Event, Incident, Joined, Lost, Ordered, State, Suspicion

PARTS = ("suspend", "diagnose", "replace", "restore")
"""Phases of an incident."""


def told(before: State, after: State, event: Event) -> Iterator[str]:
    """Lines for people, none for what changes nothing."""
    if isinstance(event, Joined) and before != after:
        yield f"{event.node} is here ({event.address}), {after.nodes[event.node].status}"
    if isinstance(event, Lost) and before != after and after.phase not in ENDS:
        yield f"{event.node} is lost: {event.reason}"
    if isinstance(event, Ordered) and before != after:
        yield f"{event.by} ordered: {event.action}{f' {event.node}' if event.node else ''}"
    for name, node in after.nodes.items():
        if name in before.nodes and before.nodes[name].status != node.status == "evicted":
            yield f"{name} is evicted: {node.reason}"
    yield from _governed(before, after)
    for alarm in after.alarms if after.alarms is not before.alarms else ():
        if alarm not in before.alarms:
            yield f"alarm: {alarm}"
    if len(after.incidents) > len(before.incidents):
        yield from _began(after.incidents[-1])
    if before.phase == after.phase:
        return
    if after.phase == Phase.RESTORING:
        seats = ", ".join(str(name) for name in after.seats)
        yield f"attempt {after.attempt} on {len(after.seats)} nodes: {seats}"
    elif after.phase == Phase.RUNNING and isinstance(event, Advanced):
        yield from _recovered(after, event)
    elif after.phase == Phase.REPLACING and after.incident is not None:
        yield f"diagnosed: {_findings(after.incident)}"
    elif after.outcome:
        yield f"{after.phase}: {after.outcome}"


def _governed(before: State, after: State) -> Iterator[str]:
    for name in dict.fromkeys((*before.slow, *after.slow)):
        old, new = before.slow.get(name), after.slow.get(name)
        if (old.stage if old is not None else "") == (new.stage if new is not None else ""):
            continue
        if new is None or (old is not None and (old.stage, new.stage) == ("suspected", "returned")):
            yield f"{name} is not suspected of being slow any more"
        elif new.stage == "suspected":
            yield f"{name} is suspected of being slow: {new.evidence}"
        elif new.stage == "isolated":
            yield f"{name} is isolated, for the {new.isolations}. time: {new.evidence}"
        else:
            what = "is a spare again, after those never suspected" if new.stage == "returned" else "is archived"
            yield f"{name} {what}; its checks: {new.findings or 'nothing found'}"


def described(suspicion: Suspicion) -> str:
    """One suspicion in words."""
    where = suspicion.node or "no node in particular"
    rank = "" if suspicion.rank is None else f" (rank {suspicion.rank})"
    return f"{suspicion.rule}: {where}{rank}: {suspicion.detail}"


def _began(incident: Incident) -> Iterator[str]:
    primary = [one for one in incident.suspicions if one.is_primary] or list(incident.suspicions)
    yield f"incident {incident.number} at step {incident.step}: {described(primary[0])}"
    for one in primary[1:]:
        yield f"  and {described(one)}"
    if incident.rewind is not None:
        step, first, end = incident.rewind
        yield f"  rewound to a checkpoint of at most step {step}; samples {first} to {end - 1} are never trained on"
    followed = len(incident.suspicions) - len(primary)
    if followed:
        yield f"  {followed} other process(es) ended with it"


def _findings(incident: Incident) -> str:
    if incident.findings:
        return "; ".join(f"{name}: {reason}" if name else reason for name, reason in incident.findings.items())
    return "no node is bad" if incident.diagnosed_s is not None else "not needed"


def _recovered(after: State, event: Advanced) -> Iterator[str]:
    if not after.incidents or after.incidents[-1].restored_s != event.at_s:
        yield f"running from step {event.step - 1}"
        return
    incident = after.incidents[-1]
    lost = max(0, incident.step - (incident.resumed_step or 0))
    yield (
        f"running again from step {incident.resumed_step} after {event.at_s - incident.began_s:.1f} s "
        f"({lost} step(s) to do again; {times(incident)})"
    )


def spent(incident: Incident) -> Iterator[tuple[str, float]]:
    """Seconds of each phase that is over, in their order (`PARTS`); one that was not needed is left out."""
    last_s = incident.began_s
    marks = (incident.suspended_s, incident.diagnosed_s, incident.replaced_s, incident.restored_s)
    for name, mark_s in zip(PARTS, marks, strict=True):
        if mark_s is not None:
            yield name, mark_s - last_s
            last_s = mark_s


def times(incident: Incident) -> str:
    """How long each phase took."""
    return ", ".join(f"{name} {lasted_s:.1f} s" for name, lasted_s in spent(incident))


def summed_up(incident: Incident) -> str:
    """One incident on one line."""
    first = next((one for one in incident.suspicions if one.is_primary), incident.suspicions[0])
    end = "not over yet" if incident.restored_s is None else f"{incident.restored_s - incident.began_s:.1f} s"
    gone = f", evicted {', '.join(incident.evicted)}" if incident.evicted else ""
    return f"{incident.number}. step {incident.step}: {described(first)}{gone}; {end} ({times(incident)})"
