"""The cube of devices, pipe x data x tensor, for the 3D view: of every device its rank, state and the operation that its rank is in."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megascale_jax.views.cube import LETTERS
from megascale_jax.views.dashboard.packed import packed
from megascale_jax.views.progress import Place, Progress
from megascale_jax.views.why import Judgement, RankState, operation_of

MOST_OPERATIONS = 7
"""That have a colour of their own, the most frequent; the others share one."""
STATES = tuple(LETTERS)
NONE = 255
"""State of a device that no rank says is its own, and operation that has no colour of its own."""
Ranks = Sequence[int]


@dataclass(frozen=True)
class Operation:
    """An operation, the ``ranks`` in it, and its ``colour``: 0 to `MOST_OPERATIONS` - 1, `NONE`: the others'."""

    name: str
    ranks: Ranks
    colour: int


@dataclass(frozen=True)
class Scene:
    """``is_mesh``: it is the plan's cube, otherwise ranks in a line: none states a mesh. ``rank`` [pipe, data, tensor], -1: not known."""

    mesh: Place
    is_mesh: bool
    rank: np.ndarray
    operations: tuple[Operation, ...]
    judgement: Judgement

    def places(self, rank: int) -> tuple[Place, ...]:
        """Of a rank's devices."""
        return tuple((int(pipe), int(data), int(tensor)) for pipe, data, tensor in np.argwhere(self.rank == rank))

    def peers(self, rank: int) -> dict[str, Ranks]:
        """Other ranks in the rank's groups, by mesh axis, in their order."""
        found: dict[str, set[int]] = {"tensor": set(), "pipe": set(), "data": set()}
        for pipe, data, tensor in self.places(rank):
            found["tensor"] |= set(self.rank[pipe, data, :].tolist())
            found["data"] |= set(self.rank[pipe, :, tensor].tolist())
            found["pipe"] |= set(self.rank[:, data, tensor].tolist())
        return {axis: sorted(ranks - {rank, -1}) for axis, ranks in found.items()}

    def state(self, rank: int) -> RankState | None:
        """Of a rank."""
        return next((one for one in self.judgement.ranks if one.rank == rank), None)


def scene_of(progress: Progress, judgement: Judgement) -> Scene:
    """The cube of a run as judged."""
    mesh = progress.mesh or (1, 1, max((one.rank for one in progress.ranks), default=0) + 1)
    rank = np.full(mesh, -1, np.int32)
    by_operation: dict[str, list[int]] = {}
    for one in progress.ranks:
        for place in one.places if progress.mesh else ((0, 0, one.rank),):
            rank[place] = one.rank
        by_operation.setdefault(operation_of(one) or "not known", []).append(one.rank)
    ordered = Counter({name: len(ranks) for name, ranks in by_operation.items()}).most_common()
    operations = tuple(
        Operation(name, tuple(by_operation[name]), number if number < MOST_OPERATIONS else NONE) for number, (name, _) in enumerate(ordered)
    )
    return Scene(mesh, progress.mesh is not None, rank, operations, judgement)


def cube_bytes(scene: Scene) -> bytes:
    """What the drawing shows."""
    count = int(scene.rank.max()) + 1
    states, operations = np.full(count + 1, NONE, np.uint8), np.full(count + 1, NONE, np.uint8)
    for one in scene.judgement.ranks:
        if one.rank < count:
            states[one.rank] = STATES.index(one.state)
    for operation in scene.operations:
        operations[[rank for rank in operation.ranks if rank < count]] = operation.colour
    at = scene.rank.ravel()  # -1 is the last one, which nobody has
    facts = {
        "mesh": scene.mesh,
        "is_mesh": scene.is_mesh,
        "states": STATES,
        "looked_for": scene.judgement.named or scene.judgement.suspects,
        "operations": [one.name for one in scene.operations],
    }
    return packed(facts, {"rank": at, "state": states[at], "operation": operations[at]})


def ranges(numbers: Sequence[int], most: int = 12) -> str:
    """``0-7, 12, 16-23``, and how many more there are."""
    parts = list(_ranges(numbers))
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts[:most])
    return text + (f" and {sum(last - first + 1 for first, last in parts[most:])} more" if len(parts) > most else "")


def _ranges(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    begin = before = None
    for number in sorted(numbers):
        if begin is None or before is None or number != before + 1:
            if begin is not None and before is not None:
                yield begin, before
            begin = number
        before = number
    if begin is not None and before is not None:
        yield begin, before
