"""Every plan of benchmarks/results/compile.md, compiled for absent GPUs: about a minute each on two CPU cores. Needs `make aot`.

    python benchmarks/bench_compile.py                  all plans, then the table
    python benchmarks/bench_compile.py --only a100      those with "a100" in their name
    python benchmarks/bench_compile.py --only none      the table alone, from the reports that are there

All figures are estimates from the scheduled program, of `megascale compile`. A plan that does not compile ends the run with the
compiler's own words; the reports before it are kept.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from step_report import birth_certificate

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
SMALL = (
    "gpt-1b model.num_layers=8 model.hidden_size=4096 model.num_heads=32 model.mlp_size=16384 model.window=[512,full] parallel.pipe=2 "
    "parallel.tensor=2 parallel.virtual_stages=2 parallel.micro_batch_size=1 train.global_batch_size=128"
)
"""A step whose rings compile in seconds; those of 175 B over eight ranks take longer than ten minutes."""
PLANS: dict[str, tuple[str, str]] = {
    "gpt-175b_h100_12288": ("gpt-175b, 12,288 H100", "gpt-175b --target h100 --nodes 1536"),
    "gpt-175b-links-0.8_h100_12288": ("the same, both links at 0.8 of their rates", "gpt-175b --target h100 --nodes 1536 --links 0.8"),
    "gpt-175b_h100_256": ("gpt-175b, 256 H100, batch 768", "gpt-175b train.global_batch_size=768 --target h100 --nodes 32"),
    "gpt-175b_a100_12288": ("gpt-175b, 12,288 A100", "gpt-175b --target a100 --nodes 1536"),
    "gpt-175b_a100_256": ("gpt-175b, 256 A100, batch 768", "gpt-175b train.global_batch_size=768 --target a100 --nodes 32"),
    "gpt-175b-full-remat_h100_12288": ("full remat, 12,288 H100", "gpt-175b parallel.remat=full --target h100 --nodes 1536"),
    "gpt-175b-selective_h100_12288": ("selective remat, 12,288 H100", "gpt-175b parallel.remat=selective --target h100 --nodes 1536"),
    "gpt-175b-delay-0_h100_12288": ("no delay of the backward pass", "gpt-175b parallel.backward_delay=0 --target h100 --nodes 1536"),
    "gpt-175b-serial_h100_12288": ("serial block, 12,288 H100", "gpt-175b model.block=serial --target h100 --nodes 1536"),
    "gpt-530b_h100_11200": ("gpt-530b, 11,200 H100", "gpt-530b --target h100 --nodes 1400"),
    "gpt-13b_h100_64": ("gpt-13b, 64 H100, no pipeline", "gpt-13b --target h100 --nodes 8"),
    "gpt-1b_h100_8": ("gpt-1b, 8 H100, data parallel only", "gpt-1b --target h100 --nodes 1"),
    "gpt-175b-m16_h100_12288": ("16 micro-batches (batch 3,072)", "gpt-175b train.global_batch_size=3072 --target h100 --nodes 1536"),
    "gpt-175b-m64_h100_12288": ("64 micro-batches (batch 12,288)", "gpt-175b train.global_batch_size=12288 --target h100 --nodes 1536"),
    "small-plain_h100_64": ("eight layers of 4,096 on 64 H100, tensor 2, pipe 2", f"{SMALL} --target h100 --nodes 8"),
    "small-ring_h100_64": ("the same with rings", f"{SMALL} parallel.tensor_overlap=ring --target h100 --nodes 8"),
}
"""Name of the report's file: what readers call the plan, and arguments of `megascale compile`."""
COLUMNS = ("plan", "lower + compile s", "peak of device GiB", "step s", "MFU", "executed / model FLOPs", "tick / GEMMs")
PARTS = ("warmup", "steady", "cooldown", "whole")
LOOPS = PARTS[:3]
GIB = 2**30


def main(only: Annotated[str, typer.Option(help="compile plans with this in their name; none: no plan")] = "") -> None:
    """Compile the plans and write benchmarks/results/compile/*.json and compile.md."""
    for name, (title, arguments) in PLANS.items():
        if only not in name:
            continue
        print(title, file=sys.stderr)
        command = [sys.executable, "-m", "megascale_jax.cli.main", "compile", *arguments.split(), "--json", str(_report(name))]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise SystemExit(f"{title}: exit code {done.returncode}")
    path = RESULTS / "compile.md"
    path.write_text(_page())
    print(f"wrote {path.relative_to(ROOT)}")


def _report(name: str) -> Path:
    return RESULTS / "compile" / f"{name}.json"


def _page() -> str:
    born = birth_certificate(ROOT, "python benchmarks/bench_compile.py")
    versions = ", ".join(f"{name} {version}" for name, version in born["versions"].items() if name in ("python", "jax", "jaxlib"))
    heads = [*COLUMNS, *(f"hidden: {part}" if part == "warmup" else part for part in PARTS), "in loops synchronous, without a GEMM"]
    there = {name: json.loads(_report(name).read_text()) for name in PLANS if _report(name).exists()}
    lines = [
        "# The step compiled for absent GPUs",
        "",
        "Estimates from the scheduled program, not measurements: nothing has run on a GPU.",
        f"{born['date']}, {born['hardware'].split(',')[0]} of a CPU, {versions};",
        f"commit {born['commit']}{' and changes' if born['changed_since_commit'] else ''}.",
        "Rates of `configs/system/`; hidden fractions are strict (only GEMMs and attention hide), step time and MFU count every kernel,",
        "MFU counts causal keys. Embedding, head, loss, LAMB and the traffic of ZeRO-2 are in.",
        "",
        f"| {' | '.join(heads)} |",
        f"|{'---|' * len(heads)}",
        *(f"| {' | '.join(_cells(PLANS[name][0], report))} |" for name, report in there.items()),
        "",
        "All of them: `python benchmarks/bench_compile.py`. Each, with `--json benchmarks/results/compile/FILE`:",
        "",
        *(f"- `{name}.json`: `megascale compile {PLANS[name][1]}`" for name in there),
    ]
    return "\n".join(lines) + "\n"


def _cells(title: str, report: dict[str, Any]) -> list[str]:
    tick = report["tick_over_gemm"]
    return [
        title,
        f"{report['lower_s']:.0f} + {report['compile_s']:.0f}",
        f"{report['peak_bytes'] / GIB:.1f} of {report['device_bytes'] / GIB:.1f}",
        f"{report['modelled_step_s']:.3f}",
        f"{report['modelled_mfu']:.1%}".replace("%", " %"),
        f"{report['executed_over_model_flops']:.3f}",
        "-" if tick is None else f"{tick:.2f}",
        *("-" if (hidden := report["hidden_fraction"][part]) is None else f"{hidden:.3f}" for part in PARTS),
        f"{sum(label.startswith(LOOPS) for label in report['sync_collectives'])}, {len(report['uncovered_collectives'])}",
    ]


if __name__ == "__main__":
    typer.run(main)
