"""Which iterator feeds this process, and who shares its host."""

import hashlib
import uuid
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from megascale_jax.comm.init import Processes
from megascale_jax.config.schema import TrainConfig
from megascale_jax.data.host import HostGroup, host_group, host_identity
from megascale_jax.data.host_iterator import HostIterator
from megascale_jax.data.mixture import TrainingData
from megascale_jax.data.pipeline import BatchIterator, TrainIterator
from megascale_jax.data.prepared import Prepared

_IDENTITY_BYTES = 16


def train_batches(data: TrainingData | Prepared, train: TrainConfig, layout: Mapping[str, Any]) -> BatchIterator:
    """The batches of this process, by ``train.data.loader``; all processes call it together.

    Raises DataError when the layout does not fit the batch, or the launcher's local ranks cannot be.
    """
    skip = (*train.data.skip, *((first, end) for _, first, end in train.rewinds))
    options: dict[str, Any] = {"seed": train.seed, "shuffle": train.data.shuffle, "skip": skip, **layout}
    if train.data.loader == "thread":
        return TrainIterator(data, **options)
    return HostIterator(data, group=_group(), **options)


def _group() -> HostGroup:
    if jax.process_count() == 1:
        return host_group([host_identity()], 0, uuid.uuid4().hex, {})
    from jax.experimental import multihost_utils

    own = hashlib.sha256(host_identity().encode()).digest()[:_IDENTITY_BYTES]
    hosts = multihost_utils.process_allgather(np.frombuffer(own, np.uint32))
    # All processes of a run were told one coordinator, and no other run that lives has it.
    run = Processes.from_environment().coordinator or "megascale"
    return host_group([row.tobytes().hex() for row in np.asarray(hosts)], jax.process_index(), run)
