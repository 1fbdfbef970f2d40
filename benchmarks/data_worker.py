"""One process of `bench_data.py`: a rank that gets batches from a loader, a rank that reads for itself, or a loader that reads nothing.

A rank takes one JSON line on its standard input to begin with, then commands, ``WHAT COUNT``, and answers each with one JSON line:

    take N    N batches, not looked at                  copy N    N batches, each copied whole into the same private arrays
    read N    N batches read and decoded by itself      memcpy N  N copies between private arrays of that size and number
    step N S  N batches with S seconds of sleep after each, as if a device computed; answers with the seconds waited for data

``python data_worker.py loader ...`` is the loader of the hand-over benchmark: its batches come from memory, by one copy.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from megascale_jax.data import host_batches, loader, loader_process
from megascale_jax.data.batch import BATCH_KEYS, Batch, BatchLayout, assemble
from megascale_jax.data.host import HostGroup
from megascale_jax.data.loader_client import LoaderClient
from megascale_jax.data.manifest import read_manifest
from megascale_jax.data.order import RowOrder
from megascale_jax.data.prepared import stored_rows

LIMIT_S = 300.0
LAYOUT_KEYS = ("global_batch_size", "data_size", "micro_batch_size")


class FromMemory(host_batches.HostBatches):
    """Batches that are ready: what is left is the hand-over."""

    ready: list[Batch]

    def fill(self, slot: int, samples: int) -> None:
        """One copy of a batch that was made before."""
        if not hasattr(self, "ready"):
            self.ready = [{key: np.full_like(array, 1) for key, array in self.ring.block(slot, 0).items()}]
        for key, array in self.ring.block(slot, 0).items():
            np.copyto(array, self.ready[0][key])


class Rank:
    """Answers commands."""

    def __init__(self, wanted: dict[str, Any]):
        self._wanted, self._request = wanted, wanted["request"]
        self._client: LoaderClient | None = None
        self._samples = 0
        self._private: list[Batch] = []
        if wanted["from_memory"]:
            loader_process.COMMAND = (sys.executable, "-P", str(Path(__file__).resolve()), "loader")

    def answer(self, what: str, count: int, sleep_s: float = 0.0) -> dict[str, Any]:
        """Carry out a command; wall seconds, bytes read by this process, and the loader's process id on rank 0."""
        asked_before, began = asked_bytes(os.getpid()), time.monotonic()
        waited_s = getattr(self, what)(count) if what != "step" else self.step(count, sleep_s)
        answer = {"s": time.monotonic() - began, "asked_bytes": asked_bytes(os.getpid()) - asked_before, "waited_s": waited_s}
        if self._client is not None and self._client.loader is not None:
            answer["loader"] = self._client.loader.pid
        return answer

    def take(self, count: int) -> None:
        for _ in range(count):
            self._next()

    def copy(self, count: int) -> None:
        for _ in range(count):
            batch = self._next()
            self._make_private(batch)
            for key in BATCH_KEYS:
                np.copyto(self._private[0][key], batch[key])

    def memcpy(self, count: int) -> None:
        for number in range(count):
            source = self._private[1 + number % loader.SLOTS]  # as many places as the ring has
            for key in BATCH_KEYS:
                np.copyto(self._private[0][key], source[key])

    def step(self, count: int, sleep_s: float) -> float:
        waited_s = 0.0
        for _ in range(count):
            began = time.monotonic()
            self._next()
            waited_s += time.monotonic() - began
            time.sleep(sleep_s)
        return waited_s

    def read(self, count: int) -> None:
        folder = Path(self._request["folders"][0])
        manifest = read_manifest(folder)
        source, order = stored_rows(folder, manifest, "train"), RowOrder(manifest.train.rows, self._request["seed"], False)
        layout = BatchLayout(data_indices=tuple(self._wanted["data_indices"]), **{key: self._request[key] for key in LAYOUT_KEYS})
        for step in range(count):
            ids = order.ids(step * layout.global_batch_size + layout.offsets())
            assemble(source, ids, manifest.sequence_length, manifest.end_of_document)

    def _next(self) -> Batch:
        if self._client is None:
            group = HostGroup(self._wanted["rank"], self._wanted["size"], self._wanted["name"])
            self._client = LoaderClient(group, self._request, tuple(self._wanted["data_indices"]), 0, LIMIT_S)
        else:
            self._client.release(self._samples)
        batch = self._client.take()
        self._samples += self._request["global_batch_size"]
        return batch

    def _make_private(self, batch: Batch) -> None:
        if not self._private:
            self._private = [{key: np.full_like(array, 1) for key, array in batch.items()} for _ in range(1 + loader.SLOTS)]

    def close(self) -> None:
        """Leave the loader."""
        if self._client is not None:
            self._client.close()


def asked_bytes(pid: int) -> int:
    """Bytes that a process has asked of files so far, whether a disk or the page cache gave them."""
    return next(int(line.split()[1]) for line in Path(f"/proc/{pid}/io").read_text().splitlines() if line.startswith("rchar"))


def main() -> None:
    if sys.argv[1:2] == ["loader"]:
        del sys.argv[1]
        host_batches.HostBatches = FromMemory
        loader.main()
        return
    rank = Rank(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        what, *numbers = line.split()
        print(json.dumps(rank.answer(what, int(numbers[0]), *map(float, numbers[1:]))), flush=True)
    rank.close()


if __name__ == "__main__":
    main()
