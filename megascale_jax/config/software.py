"""Techniques of a training program, as a simulated step knows them: what is fused, what is hidden, what the host costs.

One file a program in ``configs/software``: ``megascale``, ``megatron-lm``, and those of other published runs. The same physics
(`hardware.py`) under two such files is two programs on one machine. Read by `megascale_jax.sim` alone; grade and source of every value
stand in the file.

A *pass* reads or writes an array once.
"""

from typing import Annotated, Literal

from pydantic import Field

from megascale_jax.config.schema import Section

Passes = Annotated[float, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Slowdown = Annotated[float, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Hidden = Annotated[float, Field(ge=0, le=1)]


class SoftwareConfig(Section):
    """Techniques of one program."""

    attention: Literal["fused", "unfused"] = Field(
        description="fused: only pairs that a query sees, at attention_*_share; unfused: two batched matrix products over all pairs, with "
        "the scores in memory"
    )
    attention_forward_share: Share = Field(description="share of the peak of fused attention, forward")
    attention_backward_share: Share = Field(description="the same backward, of 2.5 times the FLOPs")
    scores_forward_passes: Passes = Field(description="over the scores of unfused attention, forward")
    scores_backward_passes: Passes = Field(description="the same backward")
    norm_forward_passes: Passes = Field(description="over the residual stream for one norm")
    norm_backward_passes: Passes = Field(description="the same backward")
    residual_forward_passes: Passes = Field(description="over the residual stream for bias, dropout and residual add of one branch")
    residual_backward_passes: Passes = Field(description="the same backward")
    activation_forward_passes: Passes = Field(description="over the width of the feed-forward layer; a gate costs one more")
    activation_backward_passes: Passes = Field(description="the same backward; a gate costs two more")
    reorder_forward_passes: Passes = Field(description="over queries, keys and values, for their layout and rotary turns")
    reorder_backward_passes: Passes = Field(description="the same backward")
    logit_bytes: Annotated[float, Field(ge=0)] = Field(description="memory traffic of the loss for each logit, both passes, bytes")
    sequence_parallel: bool = Field(description="norms and residuals split over tensor ranks: gathers and scatters, not all-reduces")
    tensor_hidden: Hidden = Field(description="share of the tensor-parallel communication that hides under products")
    pipe_sends: Literal["blocking", "asynchronous"] = Field(description="whether a stage waits for every message it sends and receives")
    pipe_stall_us: Annotated[float, Field(ge=0)] = Field(description="what a blocking pair of messages costs besides, microseconds")
    data_overlap: bool = Field(description="gathers and scatters of the optimizer's shards run beside the passes, but the first and last")
    weights_sharded: bool = Field(description="weights are gathered for every pass of a layer and not kept (ZeRO-3, FSDP)")
    gradient_bytes: Literal[2, 4] = Field(description="bytes of one gradient on the network")
    shard_update_bytes: Annotated[float, Field(ge=0)] = Field(description="memory traffic of the update for each parameter of a shard")
    local_update_bytes: Annotated[float, Field(ge=0)] = Field(
        description="the same for each parameter that the device holds: norms, casts, zeroing"
    )
    collective_slowdown: Slowdown = Field(description="how much longer a collective takes beside computation")
    compute_slowdown: Slowdown = Field(description="how much longer computation takes beside a collective")
    data_wait_s: Seconds = Field(description="wait for the next batch in each iteration, seconds")
    host_s: Seconds = Field(description="what else the host costs in each iteration: launches, logging, garbage collection, seconds")
