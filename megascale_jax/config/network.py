"""The cluster's network: a three-layer CLOS of switches, one rail of top-of-rack switches for each NIC of a node.

All rates here are Gbit/s, as network gear prints them; `RatesConfig` has achieved GB/s. Read by `megascale network` and `megascale place`.
"""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(gt=0)]


class NetworkConfig(BaseModel):
    """A fabric by the sizes of its three layers. A *ToR set* is the switches, one a rail, that the same nodes hang under."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    rails: Count = Field(description="NICs of a node, each on a ToR switch of its own")
    nic_gbit_s: Amount = Field(description="rate of one NIC, Gbit/s each way")
    port_split: Count = Field(description="NICs that share one switch port by a splitting cable: 2 makes 2 x 200G of 400G")
    nodes_per_tor: Count = Field(description="nodes under one ToR set")
    tor_uplinks: Count = Field(description="links of a ToR switch to the aggregation layer, one to each switch of its pod")
    uplink_gbit_s: Amount = Field(description="rate of a link between switches, Gbit/s each way")
    tor_sets_per_pod: Count = Field(description="ToR sets whose switches meet in the same aggregation switches")
    aggregation_uplinks: Count = Field(description="links of an aggregation switch to the spines of its plane, one to each")
    buffer_mb: Amount = Field(description="packet buffer that all ports of a switch share, 1e6 bytes")
    hop_us: Amount = Field(description="delay of one link and of the switch at its end, without the time to send a packet, microseconds")

    @model_validator(mode="after")
    def _ports_are_whole(self) -> Self:
        if self.nodes_per_tor % self.port_split:
            raise ValueError(f"nodes_per_tor is {self.nodes_per_tor}, expected a multiple of port_split, {self.port_split}")
        return self

    @property
    def tor_oversubscription(self) -> float:
        """Rate of a ToR switch towards its nodes over that towards the aggregation layer; 1 is non-blocking."""
        return self.nodes_per_tor * self.nic_gbit_s / (self.tor_uplinks * self.uplink_gbit_s)

    @property
    def nodes_per_pod(self) -> int:
        """Nodes that meet below the spines."""
        return self.nodes_per_tor * self.tor_sets_per_pod

    def without_split(self) -> "NetworkConfig":
        """The same switches with whole ports: each NIC as fast as its port, fewer nodes to a ToR set, so the same rate into every ToR."""
        whole = {
            "port_split": 1,
            "nic_gbit_s": self.nic_gbit_s * self.port_split,
            "nodes_per_tor": self.nodes_per_tor // self.port_split,
        }
        return self.model_copy(update=whole)
