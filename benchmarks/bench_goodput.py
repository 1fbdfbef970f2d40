"""What it costs to book a run of a million steps, a week of 0.6 s each: seconds and memory of `megascale goodput`.

    python benchmarks/bench_goodput.py --json benchmarks/results/goodput.json

The event files of so many ranks are made as their trainers make them, stamps' sums included, and compacted; then the whole reading
is timed in a process of its own. Nothing is asserted.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from step_report import birth_certificate

from megascale_jax.observe.event_compaction import compact
from megascale_jax.observe.events import EVENTS_FOLDER, Events

ROOT = Path(__file__).resolve().parent.parent
STEP_NS, AT_ONCE = 600_000_000, 10_000
SUMS = ("forward", "backward", "optimizer", "step")


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="result file")] = None,
    steps: Annotated[int, typer.Option(min=1)] = 1_000_000,
    ranks: Annotated[int, typer.Option(min=1)] = 4,
    read: Annotated[Path | None, typer.Option(hidden=True, help="only read this run, and print what it cost")] = None,
) -> None:
    """Measure."""
    if read is not None:
        print(json.dumps(reading(read)))
        return
    with tempfile.TemporaryDirectory(prefix="bench-goodput-") as folder:
        run = Path(folder) / "run"
        run.mkdir()
        for rank in range(ranks):
            write_rank(run, rank, steps)
        compact(run)
        size = sum(path.stat().st_size for path in (run / EVENTS_FOLDER).iterdir())
        command = [sys.executable, __file__, "--read", str(run)]
        seen = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=1800).stdout)
    result = birth_certificate(ROOT, f"python benchmarks/bench_goodput.py --steps {steps} --ranks {ranks}")
    result |= {"steps": steps, "ranks": ranks, "megabytes": size / 1e6, **seen}
    print(json.dumps(result, indent=1))
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=1) + "\n")


def write_rank(run: Path, rank: int, steps: int) -> None:
    """Passes, and the sums of one device, of every step."""
    events = Events(run / EVENTS_FOLDER, rank=rank)
    events.describe(mesh=(1, 1, 1), devices=[0])
    rng, begin = np.random.default_rng(rank), time.monotonic_ns()
    for first in range(1, steps + 1, AT_ONCE):
        step = np.arange(first, min(first + AT_ONCE, steps + 1))
        at = begin + step * STEP_NS
        waits = rng.integers(1_000_000, 3_000_000, step.size)
        events.many(name="data", begin_ns=at, duration_ns=waits, step=step)
        events.many(name="compile" if first == 1 and steps == 1 else "step", begin_ns=at + waits, duration_ns=STEP_NS - waits, step=step)
        for number, name in enumerate(SUMS):
            lasted = STEP_NS // 4 if name != "step" else STEP_NS - 4_000_000
            begins = at + 2_000_000 + (number * STEP_NS // 4 if name != "step" else 0)
            events.many(name=name, begin_ns=begins, duration_ns=lasted, lane="compute", device=0, step=step)
        assert events.flush(60), "the disk is too slow"
    events.close(60)


def reading(run: Path) -> dict[str, float]:
    """Seconds of wall time and of processor time, and the most memory, GB."""
    from megascale_jax.views.goodput import read_goodput

    began, spent = time.monotonic(), time.process_time()
    found = read_goodput(run)
    found.timeline.shares(1000)
    lasted, cpu = time.monotonic() - began, time.process_time() - spent
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return {"read_s": lasted, "cpu_s": cpu, "peak_gb": peak, "stretches": found.timeline.codes.size, "counted_steps": found.steps}


if __name__ == "__main__":
    typer.run(main)
