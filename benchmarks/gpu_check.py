"""Everything that this project does not know without a GPU, in one short run: are the kernels right, how fast are they, which tile is best.

    make gpu-check                                       # on one H100 or H200; results in benchmarks/results/gpu_check/
    python benchmarks/gpu_check.py --dry --out /tmp/dry  # on a CPU: tiny sizes, kernels in Triton's interpreter, every code path

In this order, so that a run that is cut short has the most useful part: (a) the operators' shared suites on the device; (b) rates of
every operator and tile beside cuDNN, XLA and the device's own ceilings of a large GEMM and a large copy; (c) MFU of full training
steps, each operator swapped in turn. ``results.json`` and ``results.md`` are written anew after every part's row; with ``--limit-s``
(default 450) what does not fit in time is listed as not run. Exit code 1 when a suite found a wrong value or a step another loss.

Failure cases: no GPU and no ``--dry`` (exit code 2, nothing written); a case that raises is a row with its error, not the end.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

DRY = "--dry" in sys.argv
if DRY:
    os.environ |= {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the shared suites are in tests/

import jax  # noqa: E402
import typer  # noqa: E402
from gpu_operators import operator_rows  # noqa: E402
from gpu_report import markdown, verdicts  # noqa: E402
from gpu_steps import step_rows  # noqa: E402
from gpu_suites import suite_rows  # noqa: E402
from rich.console import Console  # noqa: E402
from step_report import birth_certificate  # noqa: E402

from megascale_jax.kernels.target import Target  # noqa: E402

PARTS = {"suites": (suite_rows, 0.35), "operators": (operator_rows, 0.75), "steps": (step_rows, 1.0)}
"""Each part and the share of the time limit by which it ends."""
Row = dict[str, Any]


def main(
    out: Annotated[Path, typer.Option(help="folder for results.json and results.md")] = ROOT / "benchmarks/results/gpu_check",
    dry: Annotated[bool, typer.Option("--dry", help="tiny sizes on the CPU, kernels in Triton's interpreter")] = False,
    limit_s: Annotated[float, typer.Option(min=1, help="seconds for everything")] = 450,
    only: Annotated[str, typer.Option(help=f"parts, of {','.join(PARTS)}")] = ",".join(PARTS),
) -> None:
    """Check the kernels and measure them on the device of this machine."""
    parts, console = only.split(","), Console(stderr=True)
    if unknown := set(parts) - set(PARTS):
        raise typer.BadParameter(f"unknown part {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    if not dry and jax.default_backend() != "gpu":
        console.print("error: no GPU here; on a CPU add --dry, which exercises every code path and measures nothing")
        raise typer.Exit(2)
    target, began_s = Target.here(), time.monotonic()
    record = birth_certificate(ROOT, "python benchmarks/gpu_check.py" + (" --dry" if dry else ""))
    record |= {"kind": "dry run, nothing measured" if dry else "measured", "hardware": jax.devices()[0].device_kind}
    for name in parts:
        rows, share = PARTS[name]
        record[name] = []
        for row in timed(rows(target, dry), began_s + share * limit_s):
            record[name].append(row)
            console.print(f"{time.monotonic() - began_s:6.1f} s  {name:9} {row.get('name')}  {row.get('result')}", highlight=False)
            write(record, out)
    console.print(f"results in {out}")
    if any(row["result"].startswith("wrong") for name in parts for row in record[name]):
        raise typer.Exit(1)


def timed(rows: Iterator[Any], end_s: float) -> Iterator[Row]:
    """Run the jobs of a part, each a name and a function that gives a row, until its time is up."""
    for name, job in rows:
        if time.monotonic() > end_s:
            yield {"name": name, "result": "not run: no time left"}
            continue
        began_s = time.monotonic()
        try:
            row = job()
        except Exception as error:  # any one case may fail on a device that was never seen; the others still count
            row = {"result": f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]}
        yield {"name": name, **row, "seconds": round(time.monotonic() - began_s, 1)}


def write(record: Row, out: Path) -> None:
    """Both files, as far as the run has come."""
    out.mkdir(parents=True, exist_ok=True)
    record["targets"] = verdicts(record)
    (out / "results.json").write_text(json.dumps(record, indent=1) + "\n")
    (out / "results.md").write_text(markdown(record))


if __name__ == "__main__":
    typer.run(main)
