"""A job as JSON values, for people and programs that ask."""

from typing import Any

from megascale_jax.cluster.driver import Driver
from megascale_jax.cluster.state import Incident, State
from megascale_jax.cluster.story import summed_up

STEADY = {"step": 1000}
"""Passes of a process that has been training for a while."""
_TOLD = {"rank", "pid", "state", "exit_code", "signal", "step", "section", "in_section_s", "loss", "saved_step", "durable_step", "step_s"}
"""Of a process; thousands of them must fit into one answer (`link/wire.py`)."""
_SUSPICIONS = 8
"""Of an incident: on a large job all ranks may have one."""
_SHOWN = 20
"""Incidents, and slow nodes, in a status: an answer has a limited size, and the journal has them all."""


def _incident(incident: Incident) -> dict[str, Any]:
    shown = [one for one in incident.suspicions if one.is_primary][:_SUSPICIONS]
    told = incident.model_copy(update={"suspicions": tuple(shown), "named": incident.named[:_SUSPICIONS]})
    return told.model_dump(mode="json") | {"num_suspicions": len(incident.suspicions), "text": summed_up(incident)}


def status_of(driver: Driver) -> dict[str, Any]:
    """Phase, nodes with what their processes do, the newest incidents, alarms."""
    state: State = driver.state
    return {
        "now_s": driver.clock.now(),
        "phase": state.phase.value,
        "attempt": state.attempt,
        "step": driver.step,
        "steps": driver.total_steps,
        "seats": list(state.seats),
        "nodes": {
            name: {
                "status": node.status.value,
                "reason": node.reason,
                "silent_s": None if name not in driver.beats else round(driver.silent_s(name), 1),
                "processes": [process.model_dump(include=_TOLD) for process in driver.beats[name].processes]
                if name in driver.beats
                else [],
            }
            for name, node in state.nodes.items()
        },
        "num_incidents": len(state.incidents),
        "incidents": [_incident(incident) for incident in state.incidents[-_SHOWN:]],
        "observed": [[at_s, text] for at_s, text in driver.observed],
        "slow": {name: one.model_dump(mode="json") for name, one in list(state.slow.items())[-_SHOWN:]},
        "slow_windows": len(state.slow_windows),
        "step_limit_s": driver.watcher.limits.limit_s("step", STEADY),
        "compile_limit_s": driver.watcher.limits.limit_s("compile", {}),
        "alarms": list(state.alarms),
        "where": dict(driver.backend.facts()),
        "outcome": state.outcome,
        "exit_code": state.exit_code,
    }
