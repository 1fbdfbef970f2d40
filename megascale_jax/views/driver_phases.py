"""What the driver did when, by its events: its phases, and why it interrupted the training. No JAX."""

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, TypeAdapter, ValidationError

from megascale_jax.cluster.lifecycle import Phase
from megascale_jax.cluster.state import Anomaly, Lost, Ordered
from megascale_jax.cluster.story import described
from megascale_jax.observe.event_store import EventStore
from megascale_jax.views.passes import KNOWN

_CAUSES: Mapping[str, type[BaseModel]] = {"anomaly": Anomaly, "lost": Lost, "ordered": Ordered}
Cause = Anomaly | Lost | Ordered


@dataclass(frozen=True)
class DriverEvents:
    """Nanoseconds since 1970. ``phases``: name, begin and end; ``causes``: when, and words; both in order, empty without a driver."""

    phases: tuple[tuple[str, int, int], ...]
    causes: tuple[tuple[int, str], ...]


def read_driver(store: EventStore, ahead_ns: Mapping[str, int]) -> DriverEvents:
    """A driver's events; ``ahead_ns``: by clock, as of `passes.Passes`. A clock that no training process shares is taken as right."""
    clocks = {file.process: file.facts.boot_id or file.facts.host for file in store.files if file.facts is not None}
    phases = ", ".join(f"'{phase}'" for phase in Phase)
    causes = ", ".join(f"'{kind}'" for kind in _CAUSES)
    table = store.sql(
        "select process::varchar as process, name, unix_ns, duration_ns, is_instant, text from events "
        f"where role = 'driver' and lane = 'driver' and {KNOWN} "
        f"and ((not is_instant and name in ({phases})) or (is_instant and name in ({causes}))) order by unix_ns"
    )
    spans: list[tuple[str, int, int]] = []
    instants: list[tuple[int, str]] = []
    for row in table.to_pylist():
        at_ns = row["unix_ns"] - ahead_ns.get(clocks.get(row["process"], ""), 0)
        if row["is_instant"]:
            instants.append((at_ns, _words(row["name"], row["text"] or "")))
        else:
            spans.append((row["name"], at_ns, at_ns + row["duration_ns"]))
    return DriverEvents(tuple(spans), tuple(instants))


def _words(kind: str, text: str) -> str:
    try:
        cause = TypeAdapter(_CAUSES[kind]).validate_json(text)
    except ValidationError:  # cut, since it was too long
        return kind
    match cause:
        case Anomaly():
            first = next((one for one in cause.suspicions if one.is_primary), None) or next(iter(cause.suspicions), None)
            return described(first) if first is not None else kind
        case Lost():
            return f"{cause.node} is lost: {cause.reason}"
        case Ordered():
            return f"{cause.by} ordered: {cause.action}{f' {cause.node}' if cause.node else ''}"
    return kind
