"""Restore with one copy's worth of reading: of what several ranks of a data-parallel group need, one reads, all receive.

Paper section 4.4: storage is the bottleneck of a restart, the network between GPUs is not. A ZeRO shard that lies as it was saved is
needed by one rank, which reads it; what the group shares (after a change of the data-parallel size whole rows of blocks, and
always what is replicated) is dealt out among its members, and travels in rounds of one all-gather over ``data``. All
groups go through the same number of rounds, as one SPMD program must. A rank that cannot read goes on sending, so that no
other one hangs, and all agree on the failure at the end.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import PartitionSpec

from megascale_jax import axes
from megascale_jax.checkpoint.grid import StateGrid
from megascale_jax.checkpoint.restore import BlockSource, Key, Shards, in_order, local_ranks
from megascale_jax.checkpoint.stored import StoredArray, needed_chunks
from megascale_jax.comm.agree import all_gather_json
from megascale_jax.errors import CheckpointError

ROUND_BYTES = 32 << 20
"""Bytes that a device receives in a round, at most."""
_WORD = 4
Lane = tuple[int, int]
"""A data-parallel group: its ``pipe`` and ``tensor`` index."""


@dataclass(frozen=True)
class Deal:
    """Who reads what of one group: by data index, the blocks it reads for others too, in the order they are sent."""

    streams: Mapping[int, Sequence[Key]]
    num_words: Mapping[int, int]


def deal(grid: StateGrid, stored: Mapping[str, StoredArray], names: Sequence[str], lane: Lane, processes: Sequence[int]) -> Deal:
    """Blocks that more than one process of a group needs, each given to the least loaded of those who need it.

    ``processes``: the process of every data index of the group. A pure function, the same on every member.
    """
    pipe, tensor = lane
    mesh = grid.layout.mesh
    needers: defaultdict[Key, dict[int, int]] = defaultdict(dict)  # block -> process -> its first data index
    for data, process in enumerate(processes):
        rank = (pipe * mesh.data + data) * mesh.tensor + tensor
        for name in names:
            for region in grid.regions(name, rank):
                for index in needed_chunks(stored[name], region):
                    needers[name, index].setdefault(process, processes.index(process))
    streams: defaultdict[int, list[Key]] = defaultdict(list)
    load: defaultdict[int, int] = defaultdict(int)
    for key, by_process in needers.items():
        if len(by_process) > 1:
            reader = min(by_process.values(), key=lambda data: (load[data], data))
            streams[reader].append(key)
            load[reader] += stored[key[0]].chunk_bytes // _WORD
    return Deal(dict(streams), dict(load))


def read_broadcast(shards: Shards, source: BlockSource) -> None:
    """Fill the shards of every process; all call together. Raises CheckpointError where reading failed, but only after the last round."""
    plan, groups = shards.plan, shards.plan.mesh.devices
    lanes = sorted({(p, t) for (p, _, t), device in np.ndenumerate(groups) if device.process_index == jax.process_index()})
    deals = {}
    for pipe, tensor in lanes:
        processes = [device.process_index for device in groups[pipe, :, tensor]]
        deals[pipe, tensor] = deal(shards.grid, shards.stored, shards.names, (pipe, tensor), processes)
    shared = {key for one in deals.values() for stream in one.streams.values() for key in stream}
    problem: CheckpointError | None = None
    try:
        for name, index, block in in_order(source, [key for key in shards.needed if key not in shared]):
            shards.place(name, index, block)
    except CheckpointError as error:
        problem = error
    longest = max(all_gather_json(max((words for one in deals.values() for words in one.num_words.values()), default=0)))
    if longest:
        rounds = -(-longest * _WORD * plan.layout.mesh.data // ROUND_BYTES)
        problem = _exchange(shards, deals, source, width=-(-longest // rounds), rounds=rounds) or problem
    if problem is not None:
        raise problem


def _exchange(shards: Shards, deals: Mapping[Lane, Deal], source: BlockSource, width: int, rounds: int) -> CheckpointError | None:
    """Run the rounds, ``width`` words from every device in each; what went wrong while reading, if anything did."""
    plan, stored, partition = shards.plan, shards.stored, PartitionSpec(*axes.MESH_AXES)
    gathered_partition = PartitionSpec(axes.PIPE, None, axes.TENSOR)

    def every_rank(words: jax.Array) -> jax.Array:  # gathered as a vector: along an inner dim the CPU backend is eight times slower
        return jax.lax.all_gather(words.reshape(-1), axes.DATA).reshape(1, -1, 1, words.shape[-1])

    gather = jax.jit(plan.shard_map(every_rank, partition, gathered_partition))
    mine = local_ranks(plan)
    senders = {
        device: Sender(source, deals[pipe, tensor].streams.get(data, ()), stored)
        for (pipe, data, tensor), device in np.ndenumerate(plan.mesh.devices)
        if device in mine
    }
    receivers = {lane: {data: Receiver(stream, stored) for data, stream in one.streams.items()} for lane, one in deals.items()}
    sharding, shape = plan.sharding(partition), (*plan.mesh.devices.shape, width)
    for _ in range(rounds):
        pieces = [jax.device_put(sender.take(width).reshape(1, 1, 1, width), device) for device, sender in senders.items()]
        gathered = gather(jax.make_array_from_single_device_arrays(shape, sharding, pieces))
        of_lane = {(piece.index[0].start or 0, piece.index[2].start or 0): piece for piece in gathered.addressable_shards}
        for lane, piece in of_lane.items():
            words = np.asarray(piece.data)[0, :, 0]
            for data, receiver in receivers[lane].items():
                for name, index, block in receiver.take(words[data]):
                    shards.place(name, index, block)
    return next((sender.problem for sender in senders.values() if sender.problem is not None), None)


class Sender:
    """The blocks of one stream as words, however many are asked for; zeros where there is no more, or where reading failed."""

    def __init__(self, source: BlockSource, stream: Sequence[Key], stored: Mapping[str, StoredArray]):
        self.problem: CheckpointError | None = None
        self._words = self._read(source, stream, stored)
        self._ready: deque[np.ndarray] = deque()

    def take(self, width: int) -> np.ndarray:
        """The next ``width`` words, uint32."""
        taken, missing = [], width
        while missing:
            piece = self._ready.popleft() if self._ready else next(self._words, None)
            if piece is None:
                taken.append(np.zeros(missing, np.uint32))
                break
            if len(piece) > missing:
                self._ready.appendleft(piece[missing:])
            taken.append(piece[:missing])
            missing -= len(taken[-1])
        return np.concatenate(taken)

    def _read(self, source: BlockSource, stream: Sequence[Key], stored: Mapping[str, StoredArray]) -> Iterator[np.ndarray]:
        try:
            for name, _, block in in_order(source, stream):
                array = stored[name]
                whole = np.zeros(array.chunk, array.dtype)  # at the upper edge a block is read without its pads
                whole[tuple(map(slice, block.shape))] = block
                yield whole.reshape(-1).view(np.uint32)
        except CheckpointError as error:
            self.problem = error


class Receiver:
    """The inverse: blocks from the words of one stream."""

    def __init__(self, stream: Sequence[Key], stored: Mapping[str, StoredArray]):
        self._expected, self._stored = deque(stream), stored
        self._parts: list[np.ndarray] = []
        self._have = 0

    def take(self, words: np.ndarray) -> Iterator[tuple[str, tuple[int, ...], np.ndarray]]:
        """Blocks that are complete with these words."""
        while self._expected and len(words):
            name, index = self._expected[0]
            array = self._stored[name]
            used = words[: array.chunk_bytes // _WORD - self._have]
            words = words[len(used) :]
            self._parts.append(used)
            self._have += len(used)
            if self._have == array.chunk_bytes // _WORD:
                self._expected.popleft()
                yield name, index, np.concatenate(self._parts).view(array.dtype).reshape(array.chunk)
                self._parts, self._have = [], 0
