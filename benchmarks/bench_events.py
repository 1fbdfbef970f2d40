"""What events cost: share of one core at 10,000 events/s, single and in bulk, and how fast they become Parquet and are queried.

    python benchmarks/bench_events.py --json benchmarks/results/events.json

A paced loop makes the events of one rank, in bursts of 10 ms; its process's CPU time, the writing thread's included, is compared with that
of the same loop whose events are switched off. Rounds alternate in one process. Nothing is asserted.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from step_report import birth_certificate

from megascale_jax.observe.event_compaction import compact
from megascale_jax.observe.event_store import read_events
from megascale_jax.observe.events import Events

ROOT = Path(__file__).resolve().parent.parent
RATE, BURST_S = 10_000, 0.01
BULK_ROWS = 5_000
DEVICES, TICKS = 8, 40


def main(
    json_path: Annotated[Path, typer.Option("--json", help="file for all numbers")],
    seconds: Annotated[float, typer.Option(min=1, help="length of a round")] = 5.0,
    rounds: Annotated[int, typer.Option(min=1, help="rounds of each kind")] = 5,
) -> None:
    """Measure, print and write JSON."""
    command = f"python benchmarks/bench_events.py --json PATH --seconds {seconds:g} --rounds {rounds}"
    record: dict[str, Any] = birth_certificate(ROOT, command)
    with tempfile.TemporaryDirectory() as folder:
        on, off = Events(Path(folder) / "events"), Events(None)
        on.instant("first")
        on.flush()  # pyarrow is imported by now, whose cost is stated by itself
        variants: dict[str, Callable[[], dict[str, float]]] = {
            "single": lambda: paced(on, single, seconds),
            "single, switched off": lambda: paced(off, single, seconds),
            "bulk": lambda: paced(on, bulk, seconds),
            "bulk, switched off": lambda: paced(off, bulk, seconds),
        }
        measured: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
        for _ in range(rounds):
            for name, run in variants.items():
                measured[name].append(run())
        record["rounds"] = measured
        shares = {name: statistics.median(one["cpu_share"] for one in found) for name, found in measured.items()}
        record["cpu_share"] = shares | {f"{name}, net": shares[name] - shares[f"{name}, switched off"] for name in ("single", "bulk")}
        record["call_ns"] = call_ns(on)
        on.close()
        record["dropped"] = on.dropped
        record |= stored(Path(folder))
    json_path.write_text(json.dumps(record, indent=1) + "\n")
    for key in ("cpu_share", "call_ns", "dropped", "bytes_per_event", "compaction", "query_s"):
        print(key, record[key])


def single(events: Events, step: int, number: int) -> None:
    """So many spans of the host, one call each."""
    for index in range(number):
        events.record(
            "forward", 1_000_000_000 * step + 1000 * index, 900, lane="compute", device=index % DEVICES, step=step, tick=index % TICKS
        )


def bulk(events: Events, step: int, number: int) -> None:
    """The rows of a step at once, once they are there."""
    if step % round(BULK_ROWS / (RATE * BURST_S)) == 0:
        index = np.arange(BULK_ROWS)
        name = (index % 3, ("forward", "backward", "weight gradient"))
        times = {"begin_ns": 1_000_000_000 * step + 1000 * index, "duration_ns": 900 + index % 7}
        events.many(name=name, lane="compute", **times, device=index % DEVICES, step=step, tick=index // DEVICES % TICKS)


def paced(events: Events, work: Callable[[Events, int, int], None], seconds: float) -> dict[str, float]:
    """`RATE` events a second for so long: share of a core that the process used."""
    began, cpu_s, bursts = time.perf_counter(), time.process_time(), round(seconds / BURST_S)
    for burst in range(bursts):
        work(events, burst, round(RATE * BURST_S))
        if (left_s := began + (burst + 1) * BURST_S - time.perf_counter()) > 0:
            time.sleep(left_s)
    events.flush()
    wall_s = time.perf_counter() - began
    return {"cpu_share": (time.process_time() - cpu_s) / wall_s, "events_per_s": bursts * RATE * BURST_S / wall_s, "wall_s": wall_s}


def call_ns(events: Events, number: int = 30_000) -> float:
    """CPU time of the caller for one record, nanoseconds, of the quickest round."""
    found: list[float] = []
    for _ in range(5):
        events.flush()
        began = time.thread_time_ns()
        single(events, 1, number)
        found.append((time.thread_time_ns() - began) / number)
    return min(found)


def stored(run: Path) -> dict[str, Any]:
    """Size of what was written, and CPU time to make Parquet of it and to ask it something."""
    num_bytes = sum(path.stat().st_size for path in (run / "events").glob("*.arrows"))
    cpu_s = time.process_time()
    done = compact(run)
    compact_s = time.process_time() - cpu_s
    parquet = sum(path.stat().st_size for path in (run / "events").glob("*.parquet"))
    began = time.perf_counter()
    with read_events(run) as store:
        store.sql("select device, tick, avg(duration_ns) from events where step between 10 and 20 group by all")
    return {
        "events": done.rows,
        "bytes_per_event": {"arrow": num_bytes / done.rows, "parquet": parquet / done.rows},
        "compaction": {"cpu_s_per_million": compact_s / done.rows * 1e6},
        "query_s": time.perf_counter() - began,
    }


if __name__ == "__main__":
    typer.run(main)
