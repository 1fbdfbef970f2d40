"""Digests of what several devices hold alike, to find a device whose copy is another: silent corruption (paper section 4.3).

Compared are all arrays of the state that devices share (counters, rng, and each parameter and moment that some mesh axis does not
split), and over ``data`` the weights as each device gathers them for a step. An fp32 master or moment that ZeRO gives to one device alone
has no second copy, and a wrong gradient is added up into every copy alike: neither is seen here.

A digest is exact: two wrap-around sums over an array's bit patterns, mixed with their places by a function that is one-to-one, so one
changed element always changes it, and moved ones do. One program computes all digests of a device and gives every device those of all
(16 bytes an array and device); the host compares.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from megascale_jax import axes
from megascale_jax.parallel.plan import Plan
from megascale_jax.train.saved import named_arrays
from megascale_jax.train.state import TrainState, state_partitions

GATHERED = "weights"
"""First word of the names of gathered weights."""
_GOLDEN, _FIRST, _SECOND = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35
"""Odd, so that a product is one-to-one: the golden ratio, and the multipliers of MurmurHash3's finalizer."""
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


@dataclass(frozen=True)
class Finding:
    """Copies of one array that differ. ``devices``: places on the mesh (pipe, data, tensor) of the odd ones.

    Without a strict majority ``is_certain`` is false, and all copies are among them.
    """

    array: str
    devices: tuple[tuple[int, int, int], ...]
    copies: int
    is_certain: bool


class Digests:
    """The program and what it compares. ``arrays``: names, with the mesh axes over which each is the same; empty: no array has a copy."""

    def __init__(self, plan: Plan, optimizer: optax.GradientTransformation):
        self._plan, partitions = plan, state_partitions(plan, optimizer)
        sizes = dict(plan.mesh.shape)
        shared: dict[str, tuple[str, ...]] = {}
        for name, partition in named_arrays(partitions).items():
            used = {axis for entry in partition for axis in ((entry,) if isinstance(entry, str) else entry or ())}
            if copied := tuple(axis for axis in axes.MESH_AXES if axis not in used and sizes[axis] > 1):
                shared[name] = copied
        weights = jax.eval_shape(plan.shard_map(plan.zero.gather, (partitions.params,), PartitionSpec()), _shapes(plan))
        gathered = [f"{GATHERED}.{group}" for tree in weights.values() for group in tree] if sizes[axes.DATA] > 1 else []
        self.arrays: Mapping[str, tuple[str, ...]] = shared | dict.fromkeys(gathered, (axes.DATA,))

        def digests(state: TrainState) -> jax.Array:
            named: dict[str, jax.Array] = named_arrays(state)
            if gathered:
                for tree in plan.zero.gather(state.params).values():
                    named |= {f"{GATHERED}.{group}": weight for group, weight in tree.items()}
            return jax.lax.all_gather(jnp.stack([digest(named[name]) for name in self.arrays]), axes.MESH_AXES)

        self._program = jax.jit(plan.shard_map(digests, (partitions,), PartitionSpec()))

    def compare(self, state: TrainState) -> list[Finding]:
        """Copies that differ; waits for the state. All processes call it together, and find the same."""
        if not self.arrays:
            return []
        found = np.asarray(self._program(state)).reshape(*self._plan.mesh.devices.shape, len(self.arrays), 2)
        return [finding for row, (name, over) in enumerate(self.arrays.items()) for finding in differing(name, found[..., row, :], over)]


def digest(array: jax.Array) -> jax.Array:
    """uint32 [2] of an array's bits and their places; inside ``jit``."""
    bits = jax.lax.bitcast_convert_type(array, _UNSIGNED[array.dtype.itemsize]).astype(jnp.uint32).reshape(-1)
    place = jax.lax.iota(jnp.uint32, bits.size)
    mixed = bits + place * jnp.uint32(_GOLDEN)
    for shift, factor in ((16, _FIRST), (13, _SECOND)):
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    mixed ^= mixed >> 16
    return jnp.stack([mixed.sum(dtype=jnp.uint32), (mixed * (2 * place + 1)).sum(dtype=jnp.uint32)])


def differing(name: str, digests: np.ndarray, over: tuple[str, ...]) -> list[Finding]:
    """The odd ones among digests ``[pipe, data, tensor, 2]`` that should be equal along the mesh axes ``over``."""
    places: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    for place in np.ndindex(digests.shape[:3]):
        group = tuple(-1 if axis in over else index for axis, index in zip(axes.MESH_AXES, place, strict=True))
        places.setdefault(group, []).append((place[0], place[1], place[2]))
    findings = []
    for copies in places.values():
        holders: dict[bytes, list[tuple[int, int, int]]] = {}
        for place in copies:
            holders.setdefault(digests[place].tobytes(), []).append(place)
        if len(holders) > 1:
            most = max(holders.values(), key=len)
            is_certain = 2 * len(most) > len(copies)
            odd = [place for place in copies if place not in most] if is_certain else copies
            findings.append(Finding(name, tuple(odd), len(copies), is_certain))
    return findings


def decisive(findings: list[Finding]) -> list[Finding]:
    """Those that say who it was: copies of the state before weights gathered from them, and the certain ones first."""
    of_state = [finding for finding in findings if not finding.array.startswith(f"{GATHERED}.")]
    judged = of_state or findings
    return [finding for finding in judged if finding.is_certain] or judged


def _shapes(plan: Plan) -> dict[str, Any]:
    return {name: jax.ShapeDtypeStruct(array.shape, jnp.float32) for name, array in plan.zero.arrays.items()}
