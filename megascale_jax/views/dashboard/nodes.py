"""The nodes of a driven run, and commands to its driver, each with a step in which a person reads what will happen before it is sent.

A command goes over the driver's own link with the visitor's own token, so roles, the rule of two persons and the audit log are the
driver's; what it refuses is shown in its words. Without a driver or a token the commands are there, but disabled, with how to get at them.
"""

from collections.abc import Sequence
from typing import Any

from megascale_jax.cluster.asking import ask_driver
from megascale_jax.cluster.lifecycle import NodeStatus
from megascale_jax.cluster.link.operators import REQUIRED, Command, needed
from megascale_jax.cluster.link.tokens import Role
from megascale_jax.errors import UsageError
from megascale_jax.views.dashboard.incidents import stories_of
from megascale_jax.views.dashboard.page import Action, Page, Query, Visitor, whole_number
from megascale_jax.views.dashboard.run_view import RunView
from megascale_jax.views.job_story import JobStory

OF_NODES = (Command.CORDON, Command.UNCORDON, Command.EVICT)
OF_THE_JOB = (Command.RESTART, Command.REWIND, Command.STOP, Command.CONFIRM)
MEANING: dict[Command, str] = {
    Command.CORDON: "It keeps the place that it has, and gets no new one until somebody uncordons it. Training goes on.",
    Command.UNCORDON: "It is taken back as a spare, or keeps its place. Training goes on.",
    Command.EVICT: "It leaves the job for good, and a spare takes its place: if it has one, training is interrupted and goes on from the "
    "newest state that the others have. Another admin must confirm it, unless the job was started without that rule.",
    Command.RESTART: "All training processes save, end, and start again. Training is interrupted.",
    Command.STOP: "All training processes save, and the job ends. The same `megascale drive` begins it again where it was.",
    Command.REWIND: "What was trained after the step is given up, checkpoints too, and these samples are never trained on. It cannot be "
    "undone.",
    Command.CONFIRM: "What another admin asked for is done now. The number is the one that he was told; check with him what it is.",
}
"""What a person reads before a command is sent."""
_MOST_ROWS = 2000


def _run(command: Command) -> Any:
    def run(view: RunView, visitor: Visitor, form: Query) -> str:
        values = _values(command, form)
        answer = ask_driver(view.folder, None, command.value, shown=visitor.token, **values)
        if not answer.is_done:
            raise UsageError(answer.text)
        return answer.text

    return run


def _values(command: Command, form: Query) -> dict[str, Any]:
    """What the driver is told beside the command's name. Raises UsageError."""
    if command in OF_NODES:
        if not form.get("node"):
            raise UsageError(f"{command} needs the name of a node")
        return {"node": form["node"]}
    if command is Command.CONFIRM:
        return {"number": _given(form, "number")}
    if command is Command.REWIND:
        step, first, end = (_given(form, name) for name in ("step", "first", "end"))
        if first >= end:
            raise UsageError(f"samples {first} to {end}: expected an end above the first")
        return {"rewind": (step, first, end)}
    return {}


def _given(form: Query, name: str) -> int:
    number = whole_number(form, name)
    if number is None:
        raise UsageError(f"{name} is empty; expected a whole number")
    return number


def _context(run: RunView, query: Query) -> dict[str, Any]:
    stories = stories_of(run)
    job = stories[-1] if stories else None
    status = run.status
    rows = _live(status) if status else _past(job) if job is not None else []
    asked = _asked(query, rows) if status else None
    return {
        "stories": stories,
        "job": job,
        "status": status,
        "rows": rows[:_MOST_ROWS],
        "hidden": max(0, len(rows) - _MOST_ROWS),
        "counts": {one.value: count for one in NodeStatus if (count := sum(row["status"] == one for row in rows))},
        "asked": asked,
        "commands": [{"name": one.value, "role": REQUIRED[one]} for one in OF_THE_JOB],
    }


def _live(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows by what the driver says now."""
    ranks = {name: rank for rank, name in enumerate(status["seats"]) if name is not None}
    rows = []
    for name, node in status["nodes"].items():
        process = node["processes"][0] if node["processes"] else {}
        doing = f"{process['section']} {process['in_section_s']:.1f} s" if process.get("section") else ""
        live = {"step": process.get("step"), "doing": doing, "process": process.get("state"), "silent_s": node["silent_s"]}
        rows.append(_row(name, ranks.get(name), node["status"], node["reason"], **live))
    return sorted(rows, key=lambda row: (row["rank"] is None, row["rank"], row["name"]))


def _past(job: JobStory) -> list[dict[str, Any]]:
    """Rows by the journal of a job that nobody drives now."""
    return [_row(one.name, one.rank, one.status, one.reason) for one in job.nodes]


def _row(name: str, rank: int | None, status: str, reason: str, **live: Any) -> dict[str, Any]:
    is_evicted, is_out = status == NodeStatus.EVICTED, status in (NodeStatus.EVICTED, NodeStatus.CORDONED)
    possible = (Command.UNCORDON,) if is_evicted else (Command.UNCORDON, Command.EVICT) if is_out else (Command.CORDON, Command.EVICT)
    commands = [{"name": one.value, "role": needed(one, is_evicted=is_evicted)} for one in possible]
    base = {"name": name, "rank": rank, "status": status, "reason": reason, "commands": commands}
    return {"step": None, "doing": "", "process": None, "silent_s": None, **base, **live}


def _asked(query: Query, rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The command that the address asks to confirm. Raises UsageError for one that there is not."""
    if not (name := query.get("ask")):
        return None
    commands = {one.value: one for one in (*OF_NODES, *OF_THE_JOB)}
    if (command := commands.get(name)) is None:
        raise UsageError(f"there is no command {name[:40]!r}; there are {', '.join(commands)}")
    row = next((row for row in rows if row["name"] == query.get("node")), None)
    if command in OF_NODES and row is None:
        raise UsageError(f"there is no node {query.get('node', '')[:80]!r} to {command}")
    is_evicted = row is not None and row["status"] == NodeStatus.EVICTED
    return {
        "name": command.value,
        "node": row if command in OF_NODES else None,
        "role": needed(command, is_evicted=is_evicted),
        "number": whole_number(query, "number"),
        "meaning": MEANING[command],
        "is_grave": REQUIRED[command] is Role.ADMIN,
    }


NODES = Page(
    "nodes",
    "Nodes",
    "nodes.html",
    _context,
    refresh_s=3.0,
    actions={one.value: Action(REQUIRED[one], _run(one)) for one in (*OF_NODES, *OF_THE_JOB)},
)
