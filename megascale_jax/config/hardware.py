"""What a simulated step needs to know of one kind of node: constants of arithmetic, memory, links, and of a fleet's slow nodes.

Finer than ``system.rates``, which has one flat rate for each kind of a compiled kernel: here a matrix product has tiles and waves, a
collective steps. Read by `megascale_jax.sim` alone. Grade and source of every value stand in the ``system`` file beside it: *published*
(who printed it), *assumed* (our choice, with its range), *calibrated* (fitted, with the rows).
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Rate = Annotated[float, Field(gt=0)]
Latency = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class LinkConfig(_Section):
    """A link as a ring collective sees it: seconds are start + steps x hop + bytes / rate."""

    gbps: Rate = Field(description="what a long message achieves, of one device, GB/s each way")
    start_us: Latency = Field(description="start of a collective, microseconds")
    hop_us: Latency = Field(description="one step of a ring, microseconds")


class HardwareConfig(_Section):
    """Constants of one kind of node, for `megascale simulate`."""

    multiprocessors: Annotated[int, Field(ge=1)] = Field(description="streaming multiprocessors of one device")
    gemm_ceiling: Share = Field(description="share of the peak that a matrix product reaches inside full waves of tiles")
    tile_overhead_k: Annotated[int, Field(ge=0)] = Field(
        description="begin and end of a tile, in elements of the inner dimension that could be multiplied meanwhile"
    )
    small_tile_slowdown: Annotated[float, Field(ge=1)] = Field(description="of tiles of 128 x 128, two a multiprocessor, to 128 x 256")
    kernel_us: Latency = Field(description="start and end of one kernel, microseconds")
    memory_gbps: Rate = Field(description="memory of a kernel that streams, GB/s")
    node_link: LinkConfig = Field(description="fast link between the devices of a node")
    network_link: LinkConfig = Field(description="network of one device")
    message_us: Latency = Field(description="latency of one message over the network between pipeline stages, microseconds")
    slow_node_share: Annotated[float, Field(ge=0, lt=1)] = Field(description="chance that a node computes slowly for the whole run")
    slow_node_slowdown: Annotated[float, Field(ge=0)] = Field(description="how much longer such a node computes, a fraction")
