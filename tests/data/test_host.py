"""Which processes share a host."""

import pytest

from megascale_jax.data.host import LOCAL_RANK, LOCAL_SIZE, HostGroup, host_group, host_identity
from megascale_jax.errors import DataError

HOSTS = ["a", "b", "a", "a", "b"]


def test_processes_with_one_host_identity_are_a_group_in_the_order_of_their_ranks():
    groups = [host_group(HOSTS, rank, "run", {}) for rank in range(len(HOSTS))]
    assert [(group.local_rank, group.local_size) for group in groups] == [(0, 3), (0, 2), (1, 3), (2, 3), (1, 2)]
    assert {group.name for group in groups} == {"run"}


def test_environment_decides_when_the_launcher_sets_it():
    assert host_group(HOSTS, 1, "run", {LOCAL_RANK: "3", LOCAL_SIZE: "8"}) == HostGroup(3, 8, "run")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({LOCAL_RANK: "3"}, "sets both or none"),
        ({LOCAL_SIZE: "3"}, "sets both or none"),
        ({LOCAL_RANK: "x", LOCAL_SIZE: "3"}, "expected two numbers"),
        ({LOCAL_RANK: "3", LOCAL_SIZE: "3"}, r"LOCAL_RANK is 3; expected a number in \[0, MEGASCALE_LOCAL_SIZE = 3\)"),
        ({LOCAL_RANK: "0", LOCAL_SIZE: "0"}, "LOCAL_RANK is 0"),
    ],
)
def test_half_of_a_pair_or_numbers_that_cannot_be_are_refused(environment, message):
    with pytest.raises(DataError, match=message):
        host_group(HOSTS, 0, "run", environment)


def test_identity_of_this_host_is_stable_and_names_it():
    import socket

    assert host_identity() == host_identity()
    assert host_identity().startswith(socket.gethostname())
