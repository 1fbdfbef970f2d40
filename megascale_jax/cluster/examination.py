"""A diagnosis as the driver conducts it: who checks what, until nothing more can be learned; then a verdict (paper section 4.3).

First each node checks itself. When nobody knows which node it was, devices are measured too, and neighbours meet in pairs, round
by round, until the one that is bad is told from those it was tried with.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pydantic import ValidationError

from megascale_jax.cluster.diagnose.checks import CHECKS, GROUPS, PAIR, Outcome, alone
from megascale_jax.cluster.diagnose.fleet import judge_all, no_answer, plan_round
from megascale_jax.cluster.diagnose.nic import Baseline
from megascale_jax.cluster.diagnose.request import Node, PairTask
from megascale_jax.cluster.messages import Diagnosis, DiagnosisOrder

QUICK = alone(("host", "gpu", "nic"))
"""Without measuring: seconds. For an incident whose node is known."""
FULL = alone(GROUPS)
LOOPBACK = "nic_tcp"
_ROUNDS = 100
"""More than the rounds of one diagnosis. The first number is random, so a driver that begins anew takes no answer for another's."""


class Found(NamedTuple):
    """By node: what is bad, and what else a person should know."""

    bad: dict[str, str]
    findings: dict[str, str]


class Examination:
    """One diagnosis of nodes that can be reached."""

    def __init__(self, nodes: Mapping[str, Node], baseline: Baseline, limit_s: float, *, is_full: bool):
        """``limit_s``: of the whole, for the probes; that it ends is the driver's to see. ``is_full``: devices are measured, too."""
        self._nodes, self._baseline, self._limit_s, self._is_full = dict(nodes), baseline, limit_s, is_full
        self._share_machines = len({node.address for node in nodes.values()}) < len(nodes)
        """Then each of them slows the others down, and no rate says anything about one of them."""
        self._speak_for_machine = {node.address: name for name, node in sorted(nodes.items(), reverse=True)}
        """The one node of each machine that measures its loopback, which is the same for all of them."""
        self._outcomes: dict[str, list[Outcome]] = {name: [] for name in nodes}
        self._round = secrets.randbelow(1 << 40) * _ROUNDS
        self._tasks: dict[str, PairTask] = {}
        self._waiting = set(nodes)
        self._gone: set[str] = set()

    def order(self, name: str) -> DiagnosisOrder | None:
        """What a node should check now; ``None`` for one that has no part in it."""
        if name not in self._waiting:
            return None
        if self._tasks:
            return DiagnosisOrder(round=self._round, checks=(PAIR,), limit_s=self._limit_s, pair=self._tasks[name])
        checks = FULL if self._is_full else QUICK
        if self._speak_for_machine[self._nodes[name].address] != name:
            checks = tuple(check for check in checks if check != LOOPBACK)
        return DiagnosisOrder(round=self._round, checks=checks, limit_s=self._limit_s)

    def heard(self, name: str, diagnosis: Diagnosis) -> None:
        """A node's outcomes; what is of another round, or is none, counts for nothing."""
        if diagnosis.round != self._round or name not in self._waiting:
            return
        self._waiting.discard(name)
        try:
            self._outcomes[name] += [Outcome.model_validate(outcome, strict=False) for outcome in diagnosis.outcomes]
        except ValidationError:
            self._outcomes[name].append(no_answer(PAIR if self._tasks else QUICK[0], self._tasks.get(name), "its outcomes are no outcomes"))
        if not self._waiting and self._is_full:
            self._tasks = plan_round(self._nodes, self._outcomes, self._baseline)
            self._waiting = set(self._tasks)
            self._round += 1

    def lost(self, name: str) -> None:
        """A node went away meanwhile: that it did not answer is no word on what it is; its loss is dealt with as such."""
        self._gone.add(name)
        if name in self._waiting:
            checks: Sequence[str] = (PAIR,) if self._tasks else QUICK[:1]
            outcomes = tuple(no_answer(check, self._tasks.get(name)).model_dump(mode="json") for check in checks)
            self.heard(name, Diagnosis.model_validate({"round": self._round, "outcomes": outcomes}))

    def rates(self, name: str) -> str:
        """What was measured on a node, in words."""
        measured = [one for one in self._outcomes[name] if one.check in CHECKS and CHECKS[one.check].compared]
        return ", ".join(str(number) for one in measured for number in one.numbers)

    def result(self) -> Found | None:
        """The verdict once all have answered."""
        if self._waiting:
            return None
        verdict = judge_all(self._nodes, self._outcomes, self._baseline)
        bad: dict[str, str] = {}
        suspects = [*verdict.suspects]
        for finding in verdict.bad:
            if finding.node in self._gone:
                continue
            if (
                self._share_machines
                and finding.check in CHECKS
                and CHECKS[finding.check].group in ("compute", "network")
                and finding.fault != "corruption"
            ):
                suspects.append(finding)
            elif finding.node:
                bad[finding.node] = "; ".join(filter(None, (bad.get(finding.node), f"{finding.check}: {finding.reason}")))
        findings = {finding.node: f"suspect: {finding.check}: {finding.reason}" for finding in suspects if finding.node not in bad}
        return Found(bad, findings)
