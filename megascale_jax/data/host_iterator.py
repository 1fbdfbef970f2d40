"""Batches of the train split that one loader process assembles for all processes of a host.

The same order, state and interface as `TrainIterator`, whose work moves out of the training process: there it shared the
interpreter lock with the loop, and every process of a host read and decoded for itself. The arrays lie in shared memory, read-only
and without a copy. A batch stays valid until the second ``next`` after it: the step that uses it may still run, or its
transfer to the device, when the next one is asked for (the loop looks at step n - 1 before it asks for batch n + 1).

Failure cases: a loader that dies is started again and goes on at the very batch, with a warning; a damaged row, a dead
rank, or ``limit_s`` seconds without a batch are a ``DataError``.
"""

from typing import Any

from megascale_jax.data.batch import Batch
from megascale_jax.data.host import HostGroup
from megascale_jax.data.loader_client import LoaderClient
from megascale_jax.data.mixture import TrainingData
from megascale_jax.data.pipeline import BatchIterator
from megascale_jax.data.prepared import Prepared

LIMIT_S = 600.0
"""Longest wait for a batch, and for the other processes of the host to come."""

_HELD = 2
"""Batches that are valid at the same time."""


class HostIterator(BatchIterator):
    """Batches from the loader of this host. Every process of ``group`` makes one, for the same data and at the same position."""

    def __init__(self, data: TrainingData | Prepared, *, group: HostGroup, limit_s: float = LIMIT_S, **layout: Any):
        """``layout`` is that of ``BatchIterator``. Nothing is started before the first ``next``."""
        super().__init__(data, **layout)
        self._group, self._limit_s = group, limit_s
        self._client: LoaderClient | None = None

    @property
    def loader_pid(self) -> int | None:
        """Process id of the loader, on local rank 0 while it runs."""
        return self._client.loader.pid if self._client is not None and self._client.loader is not None else None

    def _next(self) -> Batch:
        if self._client is None:
            self._client = LoaderClient(self._group, self._request(), self._layout.data_indices, self._samples, self._limit_s)
        else:
            self._client.release(self._samples - (_HELD - 1) * self._layout.global_batch_size)
        return self._client.take()

    def close(self) -> None:
        """End the loader, unless others of the host still use it; the position stays, and the next ``next`` starts again from it."""
        client, self._client = self._client, None
        if client is not None:
            client.close()
