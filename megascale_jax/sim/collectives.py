"""Seconds of a collective and of a message, from bytes, ranks and links. No JAX.

Rings: ``start + steps x hop + bytes / rate``, the steps and bytes of NCCL's rings. A group that spans nodes with several ranks in each
has as many rings as ranks in a node, one over each of their network ports, so that a level's time is its own share of the bytes over its
own rate, and the slowest level decides.
"""

from dataclasses import dataclass
from math import ceil, log2

from megascale_jax.sim.device import Device, Link


@dataclass(frozen=True)
class Group:
    """Ranks of a collective; so many of them share a node."""

    ranks: int
    in_node: int

    @classmethod
    def of(cls, ranks: int, stride: int, per_node: int) -> "Group":
        """A mesh axis whose neighbours are ``stride`` device numbers apart."""
        return cls(ranks, max(1, min(ranks, per_node // stride)))

    @property
    def nodes(self) -> int:
        """Nodes that it spans."""
        return ceil(self.ranks / self.in_node)


def gathered_bytes(ranks: int, whole_bytes: float) -> float:
    """Bytes that each rank receives in a gather, or sends in a reduce-scatter, of ``whole_bytes``; an all-reduce is one of each."""
    return (ranks - 1) / ranks * whole_bytes


def ring_seconds(link: Link, ranks: int, whole_bytes: float) -> float:
    """A gather or a reduce-scatter in one ring over one link; nothing for one rank."""
    if ranks == 1:
        return 0.0
    return link.start_s + (ranks - 1) * link.hop_s + gathered_bytes(ranks, whole_bytes) / link.bytes_per_s


def gather_seconds(device: Device, group: Group, whole_bytes: float) -> float:
    """A gather, or a reduce-scatter, of ``whole_bytes`` over a group, one level or two."""
    if group.nodes == 1:
        return ring_seconds(device.node_link, group.ranks, whole_bytes)
    node, network = device.node_link, device.network_link
    inside_s = gathered_bytes(group.in_node, whole_bytes) / node.bytes_per_s
    outside_s = gathered_bytes(group.nodes, whole_bytes) / (group.in_node * network.bytes_per_s)
    return network.start_s + (group.nodes - 1) * network.hop_s + (group.in_node - 1) * node.hop_s + max(inside_s, outside_s)


def all_reduce_seconds(device: Device, group: Group, whole_bytes: float) -> float:
    """An all-reduce of ``whole_bytes``: the quicker of a scatter with a gather, and a double binary tree, which has few steps."""
    if group.ranks == 1:
        return 0.0
    node, network = device.node_link, device.network_link
    rings_s = 2 * gather_seconds(device, group, whole_bytes)
    if group.nodes == 1:
        return rings_s - node.start_s
    hops_s = (group.in_node - 1) * node.hop_s + ceil(log2(group.nodes)) * network.hop_s
    tree_s = network.start_s + 2 * hops_s + 2 * whole_bytes / (group.in_node * network.bytes_per_s)
    return min(rings_s - network.start_s, tree_s)


def message_seconds(device: Device, payload_bytes: float, in_node: bool) -> float:
    """One message between two devices."""
    if in_node:
        return device.node_link.hop_s + payload_bytes / device.node_link.bytes_per_s
    return device.message_s + payload_bytes / device.network_link.bytes_per_s
