"""Everything that this project does not know without a GPU, in one short run: are the kernels right, how fast are they, which tile is best.

    make gpu-check                                       # on one H100 or H200; results in benchmarks/results/gpu_check/
    python benchmarks/gpu_check.py --dry --out /tmp/dry  # on a CPU: tiny sizes, kernels in Triton's interpreter, every code path

Five parts, the most wanted first, each a process of its own with a time limit, so that neither a kernel that ends the device's context nor
a slow compile costs more than its part: rates of every operator beside cuDNN, XLA and the device's ceilings of a large GEMM and a
large copy; MFU of a 1.3 B step; the operators' shared suites on the device; a rank of the table's tiles; steps with each operator
swapped. ``results.json`` and ``results.md`` are written anew after every row; what did not fit in time says so.
Exit code 1 when a suite found a wrong value or a step another loss, 2 without a GPU and without ``--dry`` (nothing is written then).

Needs jax 0.11.2 with CUDA, jax-triton with Triton 3.6 or newer, and the plain dependencies; no network.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

DRY = "--dry" in sys.argv
if DRY:
    os.environ |= {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")  # the largest batch that fits is asked for
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the shared suites are in tests/

import typer  # noqa: E402
from gpu_report import markdown, ranking, verdicts  # noqa: E402
from rich.console import Console  # noqa: E402
from step_report import birth_certificate  # noqa: E402

PARTS = {"rates": 0.25, "step": 0.4, "suites": 0.62, "tiles": 0.8, "swaps": 1.0}
"""Each part and the share of the time limit by which it ends."""
GRACE_S = 20
"""A job that is running when its part's time is over may end within this."""
Row = dict[str, Any]


def main(
    out: Annotated[Path, typer.Option(help="folder for results.json and results.md")] = ROOT / "benchmarks/results/gpu_check",
    dry: Annotated[bool, typer.Option("--dry", help="tiny sizes on the CPU, kernels in Triton's interpreter")] = False,
    limit_s: Annotated[float, typer.Option(min=1, help="seconds for everything")] = 450,
    only: Annotated[str, typer.Option(help=f"parts, of {','.join(PARTS)}")] = ",".join(PARTS),
    worker: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Check the kernels and measure them on the device of this machine."""
    if worker:
        serve(worker, dry, limit_s)
        return
    parts, console, began_s = only.split(","), Console(stderr=True), time.monotonic()
    if unknown := set(parts) - set(PARTS):
        raise typer.BadParameter(f"unknown part {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    kind = device_kind()
    if not dry and kind is None:
        console.print("error: no GPU here; on a CPU add --dry, which exercises every code path and measures nothing")
        raise typer.Exit(2)
    record = birth_certificate(ROOT, "python benchmarks/gpu_check.py" + (" --dry" if dry else ""))
    record |= {"kind": "dry run, nothing measured" if dry else "measured", "hardware": "CPU" if dry else kind}
    for part in parts:
        record[part] = []
        for row in rows_of(part, dry, PARTS[part] * limit_s - (time.monotonic() - began_s)):
            record[part].append(row)
            console.print(f"{time.monotonic() - began_s:6.1f} s  {part:7} {row['name']}  {row['result']}", highlight=False, soft_wrap=True)
            write(record, out)
    console.print(f"results in {out}")
    if any(row["result"].startswith("wrong") for part in parts for row in record[part]):
        raise typer.Exit(1)


def device_kind() -> str | None:
    """Name of the first GPU; a process of its own asks, so that this one holds no memory of it."""
    ask = "import jax; d = jax.devices()[0]; print(d.platform, d.device_kind, sep='|')"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=120, check=False)
    platform, _, kind = done.stdout.strip().rpartition("\n")[2].partition("|")
    return kind if platform == "gpu" else None


def rows_of(part: str, dry: bool, seconds: float) -> Iterator[Row]:
    """Rows of a part from its process, which is ended when it is far over its time."""
    if seconds <= 0:
        yield {"name": part, "result": "not run: no time left"}
        return
    command = [sys.executable, __file__, "--worker", part, "--limit-s", str(max(seconds, 1.0)), *(["--dry"] if dry else [])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None, "asked for as a pipe"
    watch = threading.Timer(seconds + GRACE_S, process.kill)
    watch.start()
    try:
        yield from (json.loads(line) for line in process.stdout if line.startswith("{"))
        if code := process.wait():
            yield {"name": part, "result": f"not run to its end: the process ended with {code}, out of time or by a fault of the device"}
    finally:
        watch.cancel()
        process.kill()


def serve(part: str, dry: bool, limit_s: float) -> None:
    """Run the jobs of a part, each a name and a function that gives a row, until its time is up; a line of JSON each."""
    began_s = time.monotonic()
    from megascale_jax.kernels.target import Target

    for name, job in jobs_of(part, Target.here(), dry):
        if time.monotonic() - began_s > limit_s:
            print(json.dumps({"name": name, "result": "not run: no time left"}), flush=True)
            continue
        job_began_s = time.monotonic()
        try:
            row = job()
        except Exception as error:  # any one job may fail on a device that was never seen; the others still count
            row = {"result": f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]}
        print(json.dumps({"name": name, **row, "seconds": round(time.monotonic() - job_began_s, 1)}), flush=True)


def jobs_of(part: str, target: Any, dry: bool) -> Iterator[tuple[str, Any]]:
    """The jobs of a part."""
    if part in ("rates", "tiles"):
        from gpu_operators import rate_jobs, tile_jobs

        return rate_jobs(target, dry) if part == "rates" else tile_jobs(target, dry)
    if part == "suites":
        from gpu_suites import suite_jobs

        return suite_jobs(target, dry)
    from gpu_steps import step_jobs

    return step_jobs(dry, swaps=part == "swaps")


def write(record: Row, out: Path) -> None:
    """Both files, as far as the run has come."""
    out.mkdir(parents=True, exist_ok=True)
    record["targets"], record["ranking"] = verdicts(record), ranking(record)
    (out / "results.json").write_text(json.dumps(record, indent=1) + "\n")
    (out / "results.md").write_text(markdown(record))


if __name__ == "__main__":
    typer.run(main)
