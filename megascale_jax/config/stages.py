"""Which layers lie on which stage and chunk of a pipeline. No JAX.

Virtual stage ``chunk * pipe + stage`` holds consecutive layers. All chunks are arrays of one depth: a virtual stage with
fewer layers than the deepest is filled up with layers whose weights are zero, which pass their input on unchanged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd

from megascale_jax.errors import ConfigError

EMPTY = -1
"""In place of a layer's number: a place that is filled up."""


@dataclass(frozen=True)
class Stages:
    """Layers of every virtual stage, in order."""

    pipe: int
    layers: tuple[tuple[int, ...], ...]

    @property
    def depth(self) -> int:
        """Layers of the deepest virtual stage."""
        return max(map(len, self.layers))

    @property
    def is_even(self) -> bool:
        """Whether no place is filled up."""
        return all(len(own) == self.depth for own in self.layers)

    @property
    def table(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Layer number at ``[stage][chunk][place]``, ``EMPTY`` where there is none."""
        padded = [(*own, *[EMPTY] * (self.depth - len(own))) for own in self.layers]
        return tuple(tuple(padded[stage :: self.pipe]) for stage in range(self.pipe))

    def windows(self, of_layer: Sequence[int | None]) -> tuple[int | None, ...]:
        """Window of every place in a chunk, which all chunks must share: one program runs them all.

        Raises ConfigError that names two layers which differ.
        """
        result: list[int | None] = []
        for place in range(self.depth):
            here = [own[place] for own in self.layers if place < len(own)]
            other = next((layer for layer in here if of_layer[layer] != of_layer[here[0]]), None)
            if other is not None:
                names = [of_layer[layer] or "full" for layer in (here[0], other)]
                raise ConfigError(
                    f"model.window gives layer {here[0]} {names[0]} and layer {other} {names[1]}, but both are layer {place} of "
                    f"their chunk and one program runs all chunks; use a pattern whose length divides {gcd(*map(len, self.layers))}, "
                    "or change parallel.virtual_stages"
                )
            result.append(of_layer[here[0]])
        return tuple(result)


def most_chunks(windows: Sequence[int | None], pipe: int, counts: Sequence[int] | None = None) -> int:
    """Chunks of a stage where each has as few layers as can be: every chunk with the same windows, the layers dividing.

    One where nothing does; with a list of ``counts``, as many as it has virtual stages for.
    """
    if counts is not None:
        return max(len(counts) // pipe, 1)

    def fits(chunks: int) -> bool:
        try:
            place_layers(len(windows), pipe, chunks).windows(windows)
        except ConfigError:
            return False
        return True

    return next((chunks for chunks in range(len(windows) // pipe, 1, -1) if fits(chunks)), 1)


def place_layers(num_layers: int, pipe: int, virtual_stages: int, counts: Sequence[int] | None = None) -> Stages:
    """Place layers evenly, or ``counts[i]`` of them on virtual stage ``i``.

    Raises ConfigError when the layers do not divide, or a list loses or doubles some.
    """
    virtual = pipe * virtual_stages
    if counts is None:
        if num_layers % virtual:
            near = ", ".join(str(n) for n in (num_layers - num_layers % virtual, num_layers - num_layers % virtual + virtual) if n)
            raise ConfigError(
                f"model.num_layers {num_layers} is not divisible by parallel.pipe * parallel.virtual_stages = {pipe} * "
                f"{virtual_stages} = {virtual}; nearest: {near}; or list the layers of each virtual stage in parallel.layers"
            )
        counts = [num_layers // virtual] * virtual
    if len(counts) != virtual:
        raise ConfigError(
            f"parallel.layers lists {len(counts)} virtual stages, expected parallel.pipe * parallel.virtual_stages = {virtual}"
        )
    if sum(counts) != num_layers:
        fault = "loses" if sum(counts) < num_layers else "doubles"
        raise ConfigError(
            f"parallel.layers {fault} {abs(sum(counts) - num_layers)} layers: its numbers add up to {sum(counts)}, "
            f"model.num_layers is {num_layers}"
        )
    ends = list(accumulate(counts))
    return Stages(pipe, tuple(tuple(range(end - count, end)) for end, count in zip(ends, counts, strict=True)))
