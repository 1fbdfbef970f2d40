"""All nodes together: which pairs meet next, and the verdict. Pure: outcomes may come from this process or over a wire.

Every node that was asked needs an outcome for what it was asked, also when it did not answer (`no_answer`), or it would be asked again.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

from megascale_jax.cluster.diagnose.checks import CHECKS, CORRUPTION, DEVICE, DIGEST, PAIR, SOFTWARE, Fault, Number, Outcome, Wire, outcome
from megascale_jax.cluster.diagnose.judge import CPU_FLOOR, FLOOR, compare
from megascale_jax.cluster.diagnose.network import CPU_PAIR_FLOOR, PAIR_FLOOR, Round, Scale, blame, pairs
from megascale_jax.cluster.diagnose.nic import Baseline
from megascale_jax.cluster.diagnose.request import Node, PairTask

EXIT_CODES: Mapping[Fault, int] = {"corruption": 15, "gpu": 11, "host": 10, "nic": 12, "network": 14, "slow": 13, "unable": 16}
"""By fault, the most severe first: of several, the first one gives the exit code."""
MUST_BE_ALIKE = ("driver", "megascale_jax", "jax", "jaxlib", "nvidia-nccl-cu13", "nvidia-cuda-runtime", "nvidia-cudnn-cu13")
"""Facts of `SOFTWARE` whose difference breaks a run; of others it is worth a warning."""

type Outcomes = Mapping[str, Sequence[Outcome]]
"""By node, in the order in which they came."""


class Finding(Wire):
    """Something about a node. ``node`` empty: about the fleet."""

    node: str
    check: str
    fault: Fault
    reason: str


class Verdict(Wire):
    """``bad``: proven; ``suspects``: bad or beside a bad one, which cannot be told; ``not_run``: what nobody knows."""

    bad: tuple[Finding, ...] = ()
    suspects: tuple[Finding, ...] = ()
    warnings: tuple[Finding, ...] = ()
    not_run: tuple[Finding, ...] = ()
    is_blind: bool = False
    """No check at all could run."""

    @property
    def bad_nodes(self) -> tuple[str, ...]:
        """Names, each once."""
        return tuple(dict.fromkeys(finding.node for finding in self.bad))

    @property
    def exit_code(self) -> int:
        """0, or that of the most severe fault of bad nodes and suspects."""
        faults = {finding.fault for finding in (*self.bad, *self.suspects)} | ({"unable"} if self.is_blind else set())
        return next((code for fault, code in EXIT_CODES.items() if fault in faults), 0)


def no_answer(check: str, task: PairTask | None = None, reason: str = "the node did not answer") -> Outcome:
    """The outcome of a check whose node did not answer."""
    return outcome(check, [("fail", reason)], facts=task.facts if task else None)


def plan_round(nodes: Mapping[str, Node], outcomes: Outcomes, baseline: Baseline) -> dict[str, PairTask]:
    """The task of each node in the next round of pairs; empty: there is nothing more to learn. `outcomes`: all so far."""
    able = _able(nodes, outcomes)
    rounds = _rounds(able, outcomes)
    number = 1 + max((int(o.facts["round"]) for found in outcomes.values() for o in found if o.check == PAIR), default=0)
    tasks = {}
    for one, other in pairs(able, _scale(nodes, outcomes, baseline), rounds):
        host = nodes[one]
        if len(host.ports) < number:
            break
        address = f"[{host.address}]" if ":" in host.address else host.address
        for index, (node, peer) in enumerate(((one, other), (other, one))):
            tasks[node] = PairTask.model_validate(
                {"round": number, "index": index, "peer": peer, "coordinator": f"{address}:{host.ports[number - 1]}"}
            )
    return tasks


def _able(nodes: Mapping[str, Node], outcomes: Outcomes) -> list[str]:
    """Nodes that could take part in pairs as far as it was tried."""
    return [node for node in nodes if not any(o.check == PAIR and o.status == "not_run" for o in outcomes.get(node, ()))]


def _rounds(able: Sequence[str], outcomes: Outcomes) -> list[Round]:
    """Rates of pairs by round. A pair that one side calls failed has failed; of two rates the lower one counts."""
    found: dict[int, dict[frozenset[str], list[float | None]]] = defaultdict(lambda: defaultdict(list))
    for node in able:
        for one in outcomes.get(node, ()):
            if one.check == PAIR and one.facts["peer"] in able:
                rate = one.numbers[0].value if one.status == "pass" and one.numbers else None
                found[int(one.facts["round"])][frozenset((node, one.facts["peer"]))].append(rate)
    order = {node: index for index, node in enumerate(able)}
    rounds = []
    for number in range(1, max(found, default=0) + 1):
        results: dict[tuple[str, str], float | None] = {}
        for names, rates in found[number].items():
            one, other = sorted(names, key=order.__getitem__)
            known = [rate for rate in rates if rate is not None]
            results[one, other] = min(known) if len(known) == len(rates) else None
        rounds.append(results)
    return rounds


def _scale(nodes: Mapping[str, Node], outcomes: Outcomes, baseline: Baseline) -> Scale:
    switches = {name: node.switch for name, node in nodes.items() if node.switch is not None}
    is_cpu = any(o.facts.get(DEVICE) == "cpu" for found in outcomes.values() for o in found if o.check == PAIR)
    return Scale(switches, CPU_PAIR_FLOOR if is_cpu else PAIR_FLOOR, baseline.rates.get(PAIR))


def judge_all(nodes: Mapping[str, Node], outcomes: Outcomes, baseline: Baseline, gone: Collection[str] = ()) -> Verdict:
    """Who is bad, and why. A node without any outcome could not run at all; one that has ``gone`` meanwhile is bad, too."""
    bad, suspects, warnings, blind = [], [], [], []
    for name in nodes:
        if not outcomes.get(name):
            bad.append(Finding(node=name, check="answer", fault="unable", reason="the node gave no outcome at all"))
        elif name in gone:
            bad.append(Finding(node=name, check="answer", fault="unable", reason="the node has gone in the middle"))
        for one in outcomes.get(name, ()):
            finding = Finding(node=name, check=one.check, fault=CHECKS[one.check].fault, reason=one.reason)
            if one.status == "not_run":
                blind.append(finding)
            elif one.status == "warn":
                warnings.append(finding)
            elif one.status == "fail" and one.check != PAIR:
                bad.append(finding)
    for more_bad, more_suspects, more_warnings in (
        _judge_rates(outcomes, baseline),
        _judge_versions(outcomes),
        _judge_digests(outcomes),
        _judge_pairs(nodes, outcomes, baseline),
        _judge_unable(outcomes),
    ):
        bad += more_bad
        suspects += more_suspects
        warnings += more_warnings
    known_bad = {finding.node for finding in bad}
    ran = [one for found in outcomes.values() for one in found if one.status != "not_run"]
    return Verdict(
        bad=tuple(bad),
        suspects=tuple(finding for finding in suspects if finding.node not in known_bad),
        warnings=tuple(warnings),
        not_run=tuple(blind),
        is_blind=not ran,
    )


type _Judged = tuple[list[Finding], list[Finding], list[Finding]]
"""Bad, suspects, warnings."""


def _judge_rates(outcomes: Outcomes, baseline: Baseline) -> _Judged:
    """Outliers among devices of one kind."""
    groups: dict[tuple[str, str, str, str], dict[str, tuple[str, Number]]] = defaultdict(dict)
    for node, found in outcomes.items():
        for one in found:
            for number in one.numbers if CHECKS[one.check].compared else ():
                key = (one.check, number.name, number.unit, one.facts.get(DEVICE, ""))
                groups[key][f"{node} {number.part}".strip()] = (node, number)
    bad, problems = [], {}
    for (check, name, unit, device), members in groups.items():
        rates = {key: number.value for key, (_, number) in members.items()}
        found = compare(rates, unit, floor=CPU_FLOOR if device == "cpu" else FLOOR, baseline=baseline.rates.get(check))
        for key, reason in found.slow.items():
            node, number = members[key]
            where = f"{number.part}: " if number.part else ""
            bad.append(Finding(node=node, check=check, fault=CHECKS[check].fault, reason=f"{where}{name}: {reason}"))
        if found.problem:
            problems[check] = Finding(node="", check=check, fault=CHECKS[check].fault, reason=found.problem)
    return bad, [], list(problems.values())


def _facts(outcomes: Outcomes, check: str) -> dict[str, dict[str, str]]:
    return {node: one.facts for node, found in outcomes.items() for one in found if one.check == check and one.facts}


def _others(values: Mapping[str, str]) -> tuple[str | None, list[str]]:
    """The value of more than half, and who has another one; without such a value ``None`` and everybody, if they differ at all."""
    ((value, count), *more) = Counter(values.values()).most_common()
    if not more:
        return value, []
    if 2 * count > len(values):
        return value, [node for node, own in values.items() if own != value]
    return None, list(values)


def _judge_versions(outcomes: Outcomes) -> _Judged:
    bad, suspects, warnings = [], [], []
    facts = _facts(outcomes, SOFTWARE)
    for name in sorted({name for own in facts.values() for name in own}):
        values = {node: own.get(name, "none") for node, own in facts.items()}
        usual, different = _others(values)
        for node in different:
            reason = f"{name} {values[node]}, others have {usual}" if usual else f"{name} {values[node]}, and there is no majority"
            finding = Finding(node=node, check=SOFTWARE, fault="host", reason=reason)
            (warnings if name not in MUST_BE_ALIKE else bad if usual else suspects).append(finding)
    return bad, suspects, warnings


def _judge_digests(outcomes: Outcomes) -> _Judged:
    """The bits of the same product: the same case must give the same bits on every node."""
    bad, suspects = [], []
    facts = {node: own for node, own in _facts(outcomes, CORRUPTION).items() if DIGEST in own}
    for case in sorted({own.get("case", "") for own in facts.values()}):
        values = {node: own[DIGEST] for node, own in facts.items() if own.get("case", "") == case}
        usual, different = _others(values)
        for node in different:
            reason = "the same product has other bits than on most nodes" if usual else "the same product has other bits on each side"
            (bad if usual else suspects).append(Finding(node=node, check=CORRUPTION, fault="corruption", reason=reason))
    return bad, suspects, []


def _judge_unable(outcomes: Outcomes) -> _Judged:
    """Nodes that cannot run what most nodes can: they may lack a tool only, or be unable to compute at all."""
    statuses: dict[str, dict[str, Outcome]] = defaultdict(dict)
    for node, found in outcomes.items():
        for one in found:
            statuses[one.check][node] = one
    suspects = []
    for check, of_nodes in statuses.items():
        unable = [(node, one) for node, one in of_nodes.items() if one.status == "not_run"]
        if 2 * len(unable) < len(of_nodes):
            suspects += [Finding(node=node, check=check, fault="unable", reason=f"only here: {one.reason}") for node, one in unable]
    return [], suspects, []


def _judge_pairs(nodes: Mapping[str, Node], outcomes: Outcomes, baseline: Baseline) -> _Judged:
    able = _able(nodes, outcomes)
    rounds = _rounds(able, outcomes)
    if not any(rounds):
        return [], [], []
    found = blame(able, _scale(nodes, outcomes, baseline), rounds)

    def findings(reasons: Mapping[str, str]) -> list[Finding]:
        return [Finding(node=node, check=PAIR, fault="network", reason=reason) for node, reason in reasons.items()]

    untested = dict.fromkeys(found.untested, "met no node that works")
    links = [Finding(node="", check=PAIR, fault="network", reason=reason) for reason in found.links.values()]
    return findings(found.bad), findings(found.suspects), findings(untested) + links
