"""What a node is told to check, and what it tells of itself. These travel from the driver to executors and into the probe."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from megascale_jax.cluster.diagnose.checks import Wire
from megascale_jax.cluster.diagnose.network import MOST_ROUNDS
from megascale_jax.cluster.diagnose.nic import Baseline

type Port = Annotated[int, Field(ge=1, le=65535)]


class Node(Wire):
    """A node in a round of pairs. ``ports``: free ones at ``address``, one for each round; ``switch``: where it hangs, if known."""

    address: str = Field(max_length=255)
    ports: tuple[Port, ...] = Field(max_length=MOST_ROUNDS)
    switch: str | None = Field(default=None, max_length=512)


class PairTask(Wire):
    """This node's part of a pairwise all-reduce: process ``index`` of two, met at ``coordinator`` (``host:port`` of process 0)."""

    round: int
    index: Literal[0, 1]
    peer: str = Field(max_length=255)
    coordinator: str = Field(max_length=300)

    @property
    def facts(self) -> dict[str, str]:
        """What an outcome of it says, whatever else: who met whom, and when."""
        return {"round": str(self.round), "peer": self.peer}


class Options(Wire):
    """Arguments of checks. ``clock_offset_s``: this host's clock less the asker's; ``cpu_devices``: those without a GPU."""

    folders: tuple[str, ...] = Field(default=(), max_length=100)
    clock_offset_s: float | None = None
    baseline: Baseline = Baseline()
    cpu_devices: int = Field(default=2, ge=1, le=64)
    pair: PairTask | None = None


def switch_of(environment: Mapping[str, str]) -> str | None:
    """The switch of this node: ``MEGASCALE_SWITCH``, else what Slurm's topology says; ``None`` where nobody says."""
    if given := environment.get("MEGASCALE_SWITCH"):
        return given
    address, pattern = environment.get("SLURM_TOPOLOGY_ADDR", ""), environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")
    switch, _, node = address.rpartition(".")
    return switch if node and switch and pattern.startswith("switch") else None
