"""One loader per host: bytes asked of storage, and the rate of the hand-over, each as a ratio within one run.

    python benchmarks/bench_data.py --json benchmarks/results/data.json

Three questions, eight ranks (processes without JAX) on this machine:

- **Bytes.** Eight ranks that need the same rows (tensor parallel), and eight that need an eighth each (data parallel): what the
  loader and they ask of files for a number of batches, over what one process asks that reads these rows once; beside it the same for ranks
  that read each for itself. Counted by the kernel (``rchar`` of /proc/PID/io), between moments at which nobody reads.
- **Hand-over.** Batches of 16 MiB that lie ready in the loader's memory are copied once into the ring, and by each of the eight
  ranks out of it into private arrays: bytes per second of a rank, over those of the same copy between private arrays of
  the same number and size in the same eight processes at once. Both in turn, several rounds.
- **Waiting.** One rank that sleeps after each batch as if a device computed: its time in ``next`` over all its time.

The hand-over and memcpy share the cores of this machine in the same way, so their ratio says what the ring costs, not how fast a
server is. Nothing is asserted.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from bench_step import ROOT
from data_worker import asked_bytes
from step_report import birth_certificate

from megascale_jax.data.manifest import read_manifest
from megascale_jax.data.prepare import prepare

RANKS = 8
SEQUENCE_LENGTH = 2048
ROWS = 512
"""Rows of a batch: 512 x 2048 positions x 4 arrays of int32 are 16 MiB."""

BYTES_BATCHES = 6
STEP_S = 0.5

Command = Any


def main(
    json_path: Annotated[Path, typer.Option("--json", help="file for every number")],
    rounds: Annotated[int, typer.Option(min=1, help="rounds of hand-over and memcpy in turn")] = 15,
    batches: Annotated[int, typer.Option(min=4, help="batches of a round")] = 16,
) -> None:
    """Measure, print and write JSON."""
    record: dict[str, Any] = birth_certificate(ROOT, f"python benchmarks/bench_data.py --json PATH --rounds {rounds} --batches {batches}")
    record["hardware"] = record["hardware"].removesuffix(", virtual CPU devices")
    with tempfile.TemporaryDirectory() as folder:
        data = synthetic_data(Path(folder))
        record["batch_mib"] = ROWS * SEQUENCE_LENGTH * 4 * 4 / 2**20
        record["storage"] = [storage(data, shared=shared) for shared in (True, False)]
        record["hand_over"] = hand_over(data, rounds, batches)
        record["waiting"] = waiting(data)
    record["load_after"] = os.getloadavg()
    json_path.write_text(json.dumps(record, indent=1) + "\n")
    for row in record["storage"]:
        print(f"{row['ranks']}: with a loader {row['loader_x']:.2f}x what one reader asks for, each for itself {row['alone_x']:.2f}x")
    own = record["hand_over"]
    spread = f"{min(own['ratios']):.2f} to {max(own['ratios']):.2f}"
    print(f"hand-over: {own['ratio']:.2f} of memcpy (median; {spread}) at {own['readers']} readers")
    print(f"waiting for data: {record['waiting']['fraction']:.2%} of steps of {STEP_S} s")


def synthetic_data(folder: Path) -> Path:
    """Bytes without meaning: rows for all batches of the storage part, none of them twice."""
    rng = np.random.default_rng(0)
    needed = ROWS * (BYTES_BATCHES + 12) * SEQUENCE_LENGTH
    corpus = folder / "corpus"
    corpus.mkdir()
    for number in range(20):
        text = rng.integers(97, 123, needed // 18, np.uint8).tobytes().decode()
        (corpus / f"{number}.txt").write_text(text)
    prepare(str(corpus), folder / "data", sequence_length=SEQUENCE_LENGTH, held_out_fraction=0.04, progress=False)
    return folder / "data"


def storage(data: Path, *, shared: bool) -> dict[str, Any]:
    """Bytes asked of files, for ranks that need the same rows or each its own."""
    size = 1 if shared else RANKS
    indices = [[0] if shared else [rank] for rank in range(RANKS)]
    wanted = request(data, size, ROWS // size)
    row_bytes = (SEQUENCE_LENGTH + 1) * np.dtype(read_manifest(data).dtype).itemsize
    with ranks(wanted, indices) as ask:
        first = ask("take", 4)
        loader = first[0]["loader"]
        before = settled(loader)
        taken = ask("take", BYTES_BATCHES)
        by_loader = settled(loader) - before
        by_ranks = sum(answer["asked_bytes"] for answer in taken)
    alone = read_alone(wanted, indices)
    once = read_alone(request(data, 1, ROWS), [[0]])
    return {
        "ranks": f"{RANKS} ranks, the same rows" if shared else f"{RANKS} ranks, an eighth of the rows each",
        "batches": BYTES_BATCHES,
        "row_bytes": row_bytes * ROWS * BYTES_BATCHES,
        "one_reader_bytes": once,
        "loader_bytes": by_loader,
        "ranks_with_loader_bytes": by_ranks,
        "ranks_alone_bytes": alone,
        "loader_x": (by_loader + by_ranks) / once,
        "alone_x": alone / once,
        "one_reader_over_row_bytes": once / (row_bytes * ROWS * BYTES_BATCHES),
    }


def read_alone(wanted: dict[str, Any], indices: Sequence[Sequence[int]]) -> int:
    """Bytes that ranks ask of files which read each for itself, opening the data not counted."""
    with ranks(wanted, indices) as ask:
        opening = sum(answer["asked_bytes"] for answer in ask("read", 0))
        return sum(answer["asked_bytes"] for answer in ask("read", BYTES_BATCHES)) - opening


def hand_over(data: Path, rounds: int, batches: int) -> dict[str, Any]:
    """Rates of a rank out of the ring and between private arrays, in turn."""
    batch_bytes = ROWS * SEQUENCE_LENGTH * 4 * 4
    rates: dict[str, list[float]] = {"copy": [], "memcpy": []}
    with ranks(request(data, 1, ROWS), [[0]] * RANKS, from_memory=True) as ask:
        ask("copy", 8)
        ask("memcpy", 8)
        for _ in range(rounds):
            for what, collected in rates.items():
                seconds = [answer["s"] for answer in ask(what, batches)]
                collected.append(batches * batch_bytes / statistics.mean(seconds) / 1e9)
                print(f"{what}: {collected[-1]:.2f} GB/s a reader", file=sys.stderr)
    ratios = [own / plain for own, plain in zip(rates["copy"], rates["memcpy"], strict=True)]
    return {
        "readers": RANKS,
        "batches": batches,
        "ring_gb_per_s_per_reader": rates["copy"],
        "memcpy_gb_per_s_per_reader": rates["memcpy"],
        "ratios": ratios,
        "ratio": statistics.median(ratios),
    }


def waiting(data: Path) -> dict[str, Any]:
    """Share of a rank's time that it waits for batches of 16 MiB, read, decoded and handed over while it is busy elsewhere."""
    with ranks(request(data, 1, ROWS), [[0]]) as ask:
        ask("take", 2)
        (answer,) = ask("step", 10, STEP_S)
    return {"step_s": STEP_S, "steps": 10, "waited_s": answer["waited_s"], "fraction": answer["waited_s"] / answer["s"]}


def request(data: Path, data_size: int, micro_batch_size: int) -> dict[str, Any]:
    """What the ranks ask for: stored order, one micro-batch."""
    return {
        "names": [""], "folders": [str(data)], "digests": [read_manifest(data).digest], "phases": None, "seed": 0, "shuffle": False,
        "global_batch_size": data_size * micro_batch_size, "data_size": data_size, "micro_batch_size": micro_batch_size,
    }  # fmt: skip


@contextmanager
def ranks(wanted: dict[str, Any], indices: Sequence[Sequence[int]], from_memory: bool = False) -> Iterator[Command]:
    """Worker processes; what comes out sends one command to all at once and returns their answers in order."""
    name = f"bench {os.getpid()} {time.monotonic_ns()}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    worker = [sys.executable, str(ROOT / "benchmarks/data_worker.py")]
    processes = [subprocess.Popen(worker, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in indices]

    def tell(process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()

    def ask(*words: object) -> list[dict[str, Any]]:
        answers = []
        for process in processes:
            tell(process, " ".join(map(str, words)))
        for process in processes:
            assert process.stdout is not None
            if not (line := process.stdout.readline()):
                raise SystemExit(f"a worker ended early with code {process.wait()}; its error is above")
            answers.append(json.loads(line))
        return answers

    try:
        for rank, (process, own) in enumerate(zip(processes, indices, strict=True)):
            options = {"rank": rank, "size": len(indices), "name": name, "data_indices": list(own), "from_memory": from_memory}
            tell(process, json.dumps({"request": wanted} | options))
        yield ask
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in processes:
            process.wait()


def settled(loader: int) -> int:
    """Bytes that a loader has asked for, once it has nothing left to do."""
    before = -1
    while before != (now := asked_bytes(loader)):
        before = now
        time.sleep(1.0)
    return now


if __name__ == "__main__":
    typer.run(main)
