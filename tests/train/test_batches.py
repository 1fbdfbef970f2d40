"""Which iterator feeds a run."""

import numpy as np
import pytest

from megascale_jax.config.schema import DataConfig
from megascale_jax.data.host_iterator import HostIterator
from megascale_jax.data.pipeline import TrainIterator
from megascale_jax.train.batches import train_batches
from tests.build import experiment

LAYOUT = {"global_batch_size": 8, "data_size": 2, "data_indices": (1, 0), "micro_batch_size": 2}


@pytest.mark.parametrize(("loader", "kind"), [("process", HostIterator), ("thread", TrainIterator)])
def test_loader_is_chosen_by_the_configuration_and_decides_no_number(loader, kind, prepared):
    train = experiment(2, 1, train={"data": DataConfig(source="unused", loader=loader), "seed": 5}).train
    with train_batches(prepared, train, LAYOUT) as batches, TrainIterator(prepared, seed=5, **LAYOUT) as expected:
        assert type(batches) is kind
        for _ in range(4):
            own, reference = next(batches), next(expected)
            assert all(np.array_equal(own[key], reference[key]) for key in reference)
        assert batches.state() == expected.state()


def test_runs_on_one_machine_have_loaders_of_their_own(prepared):
    train = experiment(2, 1, train={"data": DataConfig(source="unused")}).train
    with train_batches(prepared, train, LAYOUT) as one, train_batches(prepared, train, LAYOUT) as other:
        assert np.array_equal(next(one)["tokens"], next(other)["tokens"])
        assert isinstance(one, HostIterator) and isinstance(other, HostIterator)
        assert one.loader_pid != other.loader_pid
