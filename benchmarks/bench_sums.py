"""How long it takes to open the step times of a large run: by its file of sums, by its rows, and in SQL over the rows, as it was before.

    python benchmarks/bench_sums.py --json benchmarks/results/sums.json

Writes the segments of so many processes, one device each (the worst case: most files), with the sums of so many steps, and compacts them.
Each way then reads all of it in a process of its own, from its start until slow devices are found; the page cache is warm. The quick way
runs before and after the slow ones. Nothing is asserted.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from step_report import birth_certificate

ROOT = Path(__file__).resolve().parent.parent
MESH = (8, 192, 8)
WAYS = ("sums", "rows", "SQL")


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="file for all numbers; a .md beside it has them as a table")] = None,
    devices: Annotated[int, typer.Option(min=1, help="devices, of which each is a process")] = int(np.prod(MESH)),
    steps: Annotated[int, typer.Option(min=8, help="steps")] = 100,
    rounds: Annotated[int, typer.Option(min=1, help="rounds by sums; by rows and in SQL there is one")] = 3,
    folder: Annotated[Path | None, typer.Option(help="of the run, made if it is not there, and kept; default: temporary")] = None,
    way: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure, print and write JSON."""
    if way is not None and folder is not None:
        print(json.dumps(read(folder, way)))
        return
    command = f"python benchmarks/bench_sums.py --json PATH --devices {devices} --steps {steps} --rounds {rounds}"
    record: dict[str, Any] = birth_certificate(ROOT, command)
    with tempfile.TemporaryDirectory() if folder is None else nullcontext(folder) as name:
        run, about = Path(name), Path(name) / "made.json"
        if not about.exists():
            run.mkdir(parents=True, exist_ok=True)
            about.write_text(json.dumps({"devices": devices, "steps": steps, **made(run, devices, steps)}))
        record |= json.loads(about.read_text())
        print({key: record[key] for key in ("rows", "write", "compaction", "num_bytes")}, flush=True)
        found: dict[str, list[dict[str, Any]]] = {one: [] for one in WAYS}
        for one in (*["sums"] * rounds, "rows", "SQL", "sums"):
            found[one].append(measured(run, one))
            print(one, found[one][-1], flush=True)
    record["ways"], record["load_after"] = found, os.getloadavg()
    wall = {one: statistics.median(round_["wall_s"] for round_ in rounds_) for one, rounds_ in found.items()}
    record["wall_s"], record["faster"] = wall, {one: wall[one] / wall["sums"] for one in WAYS[1:]}
    if json_path is not None:
        json_path.write_text(json.dumps(record, indent=1) + "\n")
        json_path.with_suffix(".md").write_text(as_markdown(record))


def made(run: Path, devices: int, steps: int) -> dict[str, Any]:
    """Write a run of such a size and compact it: rows, seconds of CPU, bytes by kind of file."""
    from megascale_jax.observe.event_compaction import compact
    from megascale_jax.observe.event_segments import SegmentWriter
    from megascale_jax.observe.events import ROW, STEP_END
    from megascale_jax.observe.step_sums import COLUMNS

    mesh = MESH if devices == int(np.prod(MESH)) else (1, devices, 1)
    random, per_step = np.random.default_rng(0), len(COLUMNS) + 1
    names = (*dict.fromkeys([*(name for name, _ in COLUMNS), *(lane for _, lane in COLUMNS), STEP_END]),)
    rows = np.zeros(steps * per_step, ROW)
    codes = [(names.index(name), names.index(lane)) for name, lane in (*COLUMNS, (STEP_END, "compute"))]
    rows["name"], rows["lane"] = np.tile(np.array(codes).T, steps)
    rows["step"] = np.repeat(np.arange(1, steps + 1), per_step)
    rows["tick"] = rows["microbatch"] = rows["chunk"] = -1
    rows["is_instant"] = np.tile(np.arange(per_step) == per_step - 1, steps)
    began = time.process_time()
    for device in range(devices):
        rows["device"] = device
        rows["duration_ns"] = random.normal(2e8, 1e7, rows.size)
        rows["begin_ns"] = rows["step"].astype(np.int64) * 10**10 + np.arange(rows.size) * 1000
        writer = SegmentWriter(run / "events")
        facts = {"role": "trainer", "rank": device, "mesh": mesh, "devices": (device,), "host": f"h{device // 8}"}
        writer.write([(rows, None)], names, facts)
        writer.close()
    write_s, began = time.process_time() - began, time.process_time()
    done = compact(run)
    compact_s = time.process_time() - began
    kinds: dict[str, int] = {}
    for path in (run / "events").iterdir():
        kind = ".".join(path.name.split(".")[2:]) or path.suffix[1:]
        kinds[kind] = kinds.get(kind, 0) + path.stat().st_size
    return {"rows": done.rows, "write": {"cpu_s": write_s}, "compaction": {"cpu_s": compact_s}, "num_bytes": kinds}


def measured(run: Path, way: str) -> dict[str, Any]:
    """One way in a process of its own: what it says, and seconds from its start to its end."""
    began = time.perf_counter()
    command = [sys.executable, __file__, "--folder", str(run), "--way", way]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=3600)
    return json.loads(done.stdout) | {"wall_s": time.perf_counter() - began, "load": os.getloadavg()[0]}


def read(run: Path, way: str) -> dict[str, Any]:
    """Read a run's step times one way and find its slow devices; seconds, and peak memory."""
    import resource

    from megascale_jax.observe import event_sums
    from megascale_jax.views.slow_devices import find_slow
    from megascale_jax.views.step_times import read_step_times

    found: dict[str, Any] = {}
    began = time.perf_counter()
    if way == "SQL":
        found["read"] = by_sql(run)
    else:
        if way == "rows":
            event_sums.read_frames = lambda path: ([], 0)
        times = read_step_times(run)
        found["read_s"] = time.perf_counter() - began
        assert not np.isnan(times.whole).any()
        find_slow(times)
        found["checksum"] = float(np.sum(times.whole) + sum(np.sum(one) for one in times.computed.values()))
    found["total_s"] = time.perf_counter() - began
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return found | {"cpu_s": usage.ru_utime + usage.ru_stime, "peak_mb": usage.ru_maxrss / 1000}


def by_sql(run: Path) -> int:
    """The sums by one query over all rows; how many there are."""
    from megascale_jax.observe.event_store import read_events
    from megascale_jax.observe.step_sums import COLUMNS

    codes = ", ".join(f"('{name}', '{lane}', {code})" for code, (name, lane) in enumerate(COLUMNS))
    sums = ", ".join(f"sum(duration_ns::double) filter (code = {code}) as c{code}" for code in range(len(COLUMNS)))
    with read_events(run) as store:
        return store.sql(
            f"with codes(name, lane, code) as (values {codes}) select step, device, min(unix_ns) as began_ns, {sums} "
            "from events join codes using (name, lane) where device >= 0 and step >= 0 group by step, device"
        ).num_rows


def as_markdown(record: dict[str, Any]) -> str:
    """The table of the results."""
    lines = [
        f"# Step times of {record['devices']:,} devices and {record['steps']} steps",
        "",
        f"*Measured*, {record['date']}, commit {record['commit']}, {record['hardware'].partition(', virtual')[0]}, load "
        f"{record['load_before'][0]:.1f} before and {record['load_after'][0]:.1f} after, page cache warm: `{record['command']}`",
        "",
        f"{record['rows']:,} rows in {2 * record['devices']:,} Parquet files, one process a device. Rows of devices have "
        f"{record['num_bytes']['detail.parquet'] / 1e6:.0f} MB, sums {record['num_bytes']['sums'] / 1e6:.0f}; compaction, sums included, "
        f"took {record['compaction']['cpu_s']:.0f} s of CPU.",
        "",
        "| way | from the process's start to slow devices found, s | read, s | CPU, s | peak memory, MB | times as long |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    names = {"sums": "file of sums", "rows": "rows, without the file", "SQL": "SQL over the rows (before; slow devices not included)"}
    for way, found in record["ways"].items():
        cells = [[one.get(key, one["total_s"]) for one in found] for key in ("wall_s", "read_s", "cpu_s", "peak_mb")]
        shown = [" ".join(f"{value:.{0 if key == 3 else 2}f}" for value in values) for key, values in enumerate(cells)]
        lines.append(f"| {names[way]} | {' | '.join(shown)} | {record['wall_s'][way] / record['wall_s']['sums']:.1f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
