"""The claims about the network, over seeds with their spread: the split helps, ToR-local placement helps, a hybrid pauses less than DCQCN.

    python benchmarks/bench_network.py                 20 seeds: about 8 minutes of one core
    python benchmarks/bench_network.py --seeds 3       a quick look, written nowhere

Everything is *simulated*. A claim is an ordering between two variants with the same flows, seed by seed; it holds where it holds for every
seed. The orderings were written down before the first run of all seeds; those that fail are in the table like the others.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from step_report import birth_certificate

from megascale_jax.config.load import load_experiment
from megascale_jax.sim.congestion import study, workloads
from megascale_jax.sim.congestion.parameters import Algorithm
from megascale_jax.sim.network import ecmp
from megascale_jax.sim.placement_study import scores

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
SEEDS = 20
EQUAL = 0.98
"""Throughput of at least so many times the other's is "equal or better"."""
LARGE = study.Workload(
    "all-to-all incast, 512 KB",
    "512 KB a pair, all to one host after the other",
    lambda fabric, g: workloads.all_to_all_incast(fabric, 2**19, g),
)
LARGE_ALGORITHMS: tuple[Algorithm, ...] = ("dcqcn-paper", "dcqcn-firmware", "hybrid")


def main(seeds: Annotated[int, typer.Option(min=2, help="fewer than 20: only printed")] = SEEDS) -> None:
    """Run all studies; write benchmarks/results/network.json and network.md."""
    began = time.process_time()
    experiment = load_experiment("gpt-175b", ["system=a100"])
    network = experiment.system.network
    assert network is not None and experiment.system.devices_per_node is not None

    def told(row: study.Row) -> None:
        print(f"{time.process_time() - began:.0f} s: {json.dumps(asdict(row))}", file=sys.stderr)

    packets = study.rows(network, seeds, told=told) + study.rows(network, seeds, LARGE_ALGORITHMS, (LARGE,), told)
    placed = scores(experiment, seeds)
    rings = ecmp.rings(network, placed.nodes, 64, seeds)
    uplinks = ecmp.uplinks(network, 4000 * seeds, 0)
    claims = [*_fabric_claims(rings), _placement_claim(placed), *_packet_claims(packets)]
    result = birth_certificate(ROOT, f"python benchmarks/bench_network.py --seeds {seeds}") | {
        "kind": "simulated",
        "seeds": seeds,
        "cpu_s": time.process_time() - began,
        "claims": claims,
        "uplinks": [asdict(row) for row in uplinks],
        "rings": {name: [asdict(row) for row in rows] for name, rows in rings.items()},
        "placement": {"by_name": [asdict(one) for one in placed.by_name], "placed": [asdict(one) for one in placed.placed]},
        "packets": [asdict(row) for row in packets],
    }
    page = _page(result, rings, packets)
    print(page)
    if seeds >= SEEDS:
        (RESULTS / "network.json").write_text(json.dumps(result, indent=1) + "\n")
        (RESULTS / "network.md").write_text(page)


def _claim(words: str, better: Sequence[float], other: Sequence[float], holds: Sequence[bool]) -> dict[str, Any]:
    return {"claim": words, "better": _spread(better), "other": _spread(other), "held": sum(holds), "of": len(holds)}


def _fabric_claims(rings: dict[str, list[ecmp.FabricRow]]) -> list[dict[str, Any]]:
    def ring(name: str) -> list[float]:
        return [row.ring for row in rings[name]]

    found = []
    for pairs in ("1 queue pair", "4 queue pairs", "16 queue pairs"):
        for where in ("scattered", "placed"):
            split, whole = ring(f"split, {where}, {pairs}"), ring(f"no split, {where}, {pairs}")
            words = f"split ports: data rings, {where}, {pairs}, are not slower"
            found.append(_claim(words, split, whole, [a >= b for a, b in zip(split, whole, strict=True)]))
    for fabric in ("split", "no split"):
        placed, scattered = ring(f"{fabric}, placed, 1 queue pair"), ring(f"{fabric}, scattered, 1 queue pair")
        found.append(
            _claim(
                f"ToR-local: data rings, {fabric}, are faster", placed, scattered, [a > b for a, b in zip(placed, scattered, strict=True)]
            )
        )
    return found


def _placement_claim(found: Any) -> dict[str, Any]:
    placed, by_name = ([score.across_tor_bytes / 1e12 for score in one] for one in (found.placed, found.by_name))
    words = "ToR-local: fewer terabytes of a step of gpt-175b cross ToR sets than by name"
    return _claim(words, placed, by_name, [a < b for a, b in zip(placed, by_name, strict=True)])


def _packet_claims(rows: Sequence[study.Row]) -> list[dict[str, Any]]:
    found = []
    for workload in dict.fromkeys(row.workload for row in rows):
        for other in ("dcqcn-paper", "dcqcn-firmware", "swift"):
            others = {row.seed: row for row in rows if (row.workload, row.algorithm) == (workload, other)}
            hybrids = [row for row in rows if (row.workload, row.algorithm) == (workload, "hybrid")]
            pairs = [(row, others[row.seed]) for row in hybrids if row.seed in others]
            fields: dict[str, Callable[[study.Row], float]] = {
                "fewer pauses": lambda row: row.pauses,
                "less paused time": lambda row: row.paused_ms,
            }
            if not any(fields["fewer pauses"](one) for pair in pairs for one in pair):
                continue  # nobody pauses
            for words, value in fields.items():
                holds = [value(a) < value(b) and a.gbit_s >= EQUAL * b.gbit_s for a, b in pairs]
                values = [value(a) for a, _ in pairs], [value(b) for _, b in pairs]
                found.append(_claim(f"{workload}: hybrid has {words} than {other} at equal or better throughput", *values, holds))
    return found


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):,.4g} ± {statistics.stdev(values):.2g}"


def _page(result: dict[str, Any], rings: dict[str, list[ecmp.FabricRow]], packets: Sequence[study.Row]) -> str:
    changes = " and changes" if result["changed_since_commit"] else ""
    lines = [
        "# Claims about the network, simulated",
        "",
        f"*Simulated*, {result['date']}, commit {result['commit']}{changes}: `{result['command']}`, {result['cpu_s']:.0f} s of CPU.",
        f"Mean ± standard deviation over {result['seeds']} seeds. A claim compares the same flows seed by seed;",
        f"equal throughput: at least {EQUAL:g} times the other's.",
        "System a100: the fabric of the MegaScale paper. Models, constants and their grades: [docs/network.md](../../docs/network.md).",
        "",
        "| claim | it | the other | holds in |",
        "|---|---|---|---|",
        *(f"| {one['claim']} | {one['better']} | {one['other']} | {one['held']} of {one['of']} |" for one in result["claims"]),
        "",
        "## Flows of one ToR switch over its uplinks",
        "",
        "| port | load | delivered | closed form | any overload | slowest flow |",
        "|---|---|---|---|---|---|",
        *(
            f"| {'split' if row['split'] else 'whole'} | {row['load']:.3g} | {row['delivered']:.4f} | {row['delivered_exact']:.4f} | "
            f"{row['overload']:.3f} | {row['slowest']:.3f} |"
            for row in result["uplinks"]
        ),
        "",
        "## Data rings of 64 nodes on all rails of 1,536 nodes, rate over a NIC's",
        "",
        "| fabric | mean flow | mean ring | slowest flow |",
        "|---|---|---|---|",
        *(
            f"| {name} | {' | '.join(_spread([getattr(row, field) for row in rows]) for field in ('mean', 'ring', 'slowest'))} |"
            for name, rows in rings.items()
        ),
        "",
        "## Congestion control, 64 hosts under 4 ToR switches",
        "",
        "| workload | algorithm | Gbit/s | pauses | paused ms | p99 ms | slowdown of flow 0 | dropped |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for workload in dict.fromkeys(row.workload for row in packets):
        for algorithm in dict.fromkeys(row.algorithm for row in packets if row.workload == workload):
            chosen = [row for row in packets if (row.workload, row.algorithm) == (workload, algorithm)]
            cells = (_spread([getattr(row, field) for row in chosen]) for field in ("gbit_s", "pauses", "paused_ms", "p99_ms", "slowdown"))
            lines.append(f"| {workload} | {algorithm} | {' | '.join(cells)} | {sum(row.dropped for row in chosen)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
