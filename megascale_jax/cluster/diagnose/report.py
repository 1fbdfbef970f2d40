"""What a verdict looks like: first who is bad and what to do, then a table; the same as JSON."""

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from megascale_jax.cluster.diagnose.checks import CHECKS, Number, Outcome
from megascale_jax.cluster.diagnose.fleet import Finding, Outcomes, Verdict

STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red", "not_run": "dim", "slow": "bold red"}
MOST_NUMBERS = MOST_REASONS = 3


def shown(outcomes: Outcomes, verdict: Verdict) -> Group:
    """Headline, what is wrong with what to do, and the table."""
    return Group(_headline(outcomes, verdict), *_wrong(outcomes, verdict), _table(outcomes, verdict), _unknown(outcomes, verdict))


def _headline(outcomes: Outcomes, verdict: Verdict) -> Text:
    count = f"{len(outcomes)} node{'s' if len(outcomes) != 1 else ''}"
    if verdict.bad_nodes:
        return Text(f"BAD {', '.join(verdict.bad_nodes)}  (of {count}, exit code {verdict.exit_code})", style="bold red")
    if verdict.suspects:
        names = ", ".join(dict.fromkeys(finding.node for finding in verdict.suspects))
        return Text(f"SUSPECT {names}: not proven to be bad, nor to be good  (of {count}, exit code {verdict.exit_code})", style="bold red")
    if verdict.is_blind:
        return Text(f"NOTHING COULD BE CHECKED  ({count}, exit code {verdict.exit_code})", style="bold red")
    warned = f", {len(verdict.warnings)} warnings" if verdict.warnings else ""
    return Text(f"NOTHING BAD FOUND  ({count}{warned}, exit code 0)", style="bold yellow" if verdict.warnings else "bold green")


def _wrong(outcomes: Outcomes, verdict: Verdict) -> list[Text]:
    lines = []
    for word, findings in (("bad", verdict.bad), ("suspect", verdict.suspects)):
        for finding in findings:
            node = f"{finding.node}  " if len(outcomes) > 1 else ""
            lines.append(Text.assemble("  ", (f"{word} ", STYLES["fail"]), f"{node}{finding.check}: {finding.reason}"))
            lines.append(Text(f"      do: {_advice(finding)}"))
    return lines


def _advice(finding: Finding) -> str:
    if finding.check not in CHECKS:
        return "look whether the node is up and reachable"
    check = CHECKS[finding.check]
    return f"make it run here as on the other nodes; it needs {check.needs}" if finding.fault == "unable" else check.advice


def _table(outcomes: Outcomes, verdict: Verdict) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    for name in ("check", "status", "measured", "why"):
        table.add_column(name, overflow="fold")
    last = ""
    for name, check in CHECKS.items():
        found = [one for results in outcomes.values() for one in results if one.check == name]
        if not found:
            continue
        if last not in ("", check.group):
            table.add_section()
        last = check.group
        beside = [finding for finding in verdict.warnings if finding.check == name and _is_of_fleet(finding, outcomes)]
        reasons = _reasons(found) + [f"{_where(finding, outcomes)}{finding.reason}" for finding in beside[:MOST_REASONS]]
        table.add_row(name, _status(found, name, verdict, is_warned=bool(beside)), _measured(found), "\n".join(reasons))
    return table


def _status(found: Sequence[Outcome], name: str, verdict: Verdict, *, is_warned: bool) -> Text:
    """One word for all nodes, or how many say what. A check may be fine by itself, and not beside others."""
    counts = Counter(one.status for one in found)
    accused = (finding for finding in (*verdict.bad, *verdict.suspects) if finding.fault != "unable")
    if not counts["fail"] and any(finding.check == name for finding in accused):
        return Text("slow" if CHECKS[name].compared else "differs", style=STYLES["fail"])
    if is_warned and set(counts) == {"pass"}:
        return _word("warn")
    if len(counts) == 1:
        return _word(found[0].status)
    return Text(", ").join(_word(one, count) for one, count in counts.most_common())


def _word(status: str, count: int | None = None) -> Text:
    word = status.replace("_", " ")
    return Text(word if count is None else f"{count} {word}", style=STYLES[status])


def _measured(found: Sequence[Outcome]) -> str:
    """Numbers of one node; over several their range and median."""
    numbers = [number for one in found for number in one.numbers]
    groups: dict[tuple[str, str, str], list[Number]] = {}
    for number in numbers:
        key = (number.name, number.unit, number.part if len(found) == 1 else "")
        groups.setdefault(key, []).append(number)
    lines = []
    for (name, unit, _), members in groups.items():
        if len(members) == 1:
            lines.append(str(members[0]))
            continue
        values = [number.value for number in members]
        low, middle, high = (Number(name="", value=value, unit="") for value in (min(values), median(values), max(values)))
        lines.append(f"{name} {low} .. {high} {unit}, median {middle}" if low != high else f"{name} {low} {unit}")
    more = [f"and {len(lines) - MOST_NUMBERS} more"] if len(lines) > MOST_NUMBERS + 1 else []
    return "\n".join([*lines[: MOST_NUMBERS if more else None], *more])


def _reasons(found: Sequence[Outcome]) -> list[str]:
    counts = Counter(one.reason for one in found if one.reason)
    return [reason if len(found) == 1 else f"{count} x {reason}" for reason, count in counts.most_common(MOST_REASONS)]


def _unknown(outcomes: Outcomes, verdict: Verdict) -> Text:
    """A reminder of what nobody looked at."""
    skipped = sorted({finding.check for finding in verdict.not_run}, key=list(CHECKS).index)
    if not skipped:
        return Text()
    where = " on some or all nodes" if len(outcomes) > 1 else ""
    return Text(f"not run is no pass: nothing is known of {', '.join(skipped)}{where}", style="yellow")


def _is_of_fleet(finding: Finding, outcomes: Outcomes) -> bool:
    """Whether no outcome of the node itself says it."""
    return not any(one.check == finding.check and one.reason == finding.reason for one in outcomes.get(finding.node, ()))


def _where(finding: Finding, outcomes: Outcomes) -> str:
    return f"{finding.node}: " if finding.node and len(outcomes) > 1 else ""


def as_data(outcomes: Outcomes, verdict: Verdict) -> dict[str, Any]:
    """For ``--json``."""
    return {
        "exit_code": verdict.exit_code,
        "bad_nodes": verdict.bad_nodes,
        "verdict": verdict,
        "outcomes": {node: list(found) for node, found in outcomes.items()},
    }
