"""The questions of a deployment, each with its answer, its formula and what went in: memory, storage, start, spares, network."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp

from megascale_jax.config.fleet import Fleet, init_s
from megascale_jax.config.layout import MeshShape
from megascale_jax.config.load import load_document
from megascale_jax.config.memory import GIB, state_bytes
from megascale_jax.config.schema import Experiment
from megascale_jax.config.software import SoftwareConfig
from megascale_jax.model.flops import count_parameters
from megascale_jax.sim.analytic import SOFTWARE
from megascale_jax.sim.costs import data_bytes, message_bytes
from megascale_jax.sim.faults.case import Case
from megascale_jax.sim.memory import activation_bytes
from megascale_jax.sim.work import Work

STATE_BYTES_PER_PARAMETER = 12
"""fp32 master and two fp32 moments: all that a checkpoint holds of a parameter (`checkpoint/grid.py`)."""
COPIES_IN_HOST_MEMORY = 4
"""Two slots of a node's own states, and the newest two of its neighbour (`checkpoint/slot.py`, `checkpoint/peers.py`)."""
AVAILABILITY = 0.99
_STATE = "12 P / (t p d) + 2 P / (t p) + 4 P / (t p)"
_PER_WEIGHT = 3
"""bf16 weights are gathered and fp32 gradients scattered: so many times the bytes of the weights."""
_GB = 1e9
_MOST_SPARES = 100_000


@dataclass(frozen=True)
class Answer:
    """One question. ``value`` in ``unit``; ``is_ok``: whether it meets a limit that is known, ``None``: there is none to meet."""

    question: str
    value: float
    unit: str
    formula: str
    inputs: Mapping[str, float | int | str | None]
    is_ok: bool | None = None


def checkpoint_bytes(experiment: Experiment) -> int:
    """Of one checkpoint on storage, uncompressed."""
    return STATE_BYTES_PER_PARAMETER * count_parameters(experiment.model)


def checklist(experiment: Experiment, fleet: Fleet, case: Case, host_memory_gib: float | None = None) -> list[Answer]:
    """Every answer. ``case``: the job that is asked about; ``host_memory_gib``: of one node, if known."""
    return [
        _device_memory(experiment),
        _checkpoint_size(experiment),
        _host_memory(experiment, case, host_memory_gib),
        _save(experiment, fleet, case),
        *_restore(experiment, fleet),
        _storage(experiment),
        _local_disk(experiment, case),
        _start(experiment, fleet),
        _spares(case),
        *_network(experiment),
    ]


def _device_memory(experiment: Experiment) -> Answer:
    state, memory = state_bytes(experiment), experiment.system.memory_gib
    activations = activation_bytes(Work.of(experiment), load_document("software", SOFTWARE, SoftwareConfig))
    used = (state.total + activations) / GIB
    inputs = {
        "masters_and_moments_gib": state.master_and_moments / GIB,
        "weights_gib": state.weights / GIB,
        "gradients_gib": state.gradients / GIB,
        "activations_gib": activations / GIB,
        "device_gib": memory,
    }
    if memory is None:
        return Answer("state and activations of one device", used, "GiB", f"{_STATE} + activations", inputs)
    formula = f"device - ({_STATE}) - activations"
    return Answer("device memory left for buffers", memory - used, "GiB", formula, inputs, memory > used)


def _checkpoint_size(experiment: Experiment) -> Answer:
    inputs = {"parameters": count_parameters(experiment.model), "bytes_per_parameter": STATE_BYTES_PER_PARAMETER}
    return Answer("size of a checkpoint", checkpoint_bytes(experiment) / _GB, "GB", "12 P", inputs)


def _host_memory(experiment: Experiment, case: Case, host_memory_gib: float | None) -> Answer:
    of_node = checkpoint_bytes(experiment) / case.nodes
    value = COPIES_IN_HOST_MEMORY * of_node / GIB
    inputs = {"bytes_of_a_node": of_node, "copies": COPIES_IN_HOST_MEMORY, "host_gib": host_memory_gib}
    is_ok = None if host_memory_gib is None else value < host_memory_gib
    return Answer("host memory of a node for two-stage checkpoints", value, "GiB", "4 x 12 P / nodes", inputs, is_ok)


def _save(experiment: Experiment, fleet: Fleet, case: Case) -> Answer:
    size, interval_s = checkpoint_bytes(experiment), case.interval_ns / 1e9
    inputs = {"bytes": size, "interval_s": interval_s, "storage_write_gbps": fleet.checkpoint.storage_write_gbps}
    value = size / interval_s / _GB
    formula = "12 P / interval: an upload is over before the next one begins"
    return Answer("write bandwidth of the storage, least", value, "GB/s", formula, inputs, value <= fleet.checkpoint.storage_write_gbps)


def _restore(experiment: Experiment, fleet: Fleet) -> list[Answer]:
    size, data = checkpoint_bytes(experiment), experiment.parallel.data
    inputs = {"bytes": size, "storage_read_gbps": fleet.checkpoint.storage_read_gbps, "data": data}
    once = size / fleet.checkpoint.storage_read_gbps / _GB
    return [
        Answer("restore from storage, one reader of each data group", once, "s", "12 P / read bandwidth; the others receive it", inputs),
        Answer(
            "the same if every rank reads what its group shares",
            data * once,
            "s",
            "at most data x 12 P / read bandwidth (paper, 4.4)",
            inputs,
        ),
    ]


def _storage(experiment: Experiment) -> Answer:
    settings, size = experiment.train.checkpoint, checkpoint_bytes(experiment)
    forever = 0 if settings.keep_every is None else experiment.train.steps // settings.keep_every
    inputs = {"bytes": size, "keep": settings.keep, "kept_for_ever": forever}
    formula = "12 P x (keep + 1 under way + those kept for ever)"
    return Answer("room for checkpoints on storage", size * (settings.keep + 1 + forever) / 1e12, "TB", formula, inputs)


def _local_disk(experiment: Experiment, case: Case) -> Answer:
    events, place = experiment.train.events, experiment.train.checkpoint.place
    of_events = 0.0 if not events.enabled or events.keep_mb is None else events.keep_mb * 1e6
    saves = checkpoint_bytes(experiment) * (experiment.train.checkpoint.keep + 1) if place is None else 0
    inputs = {"events_bytes": of_events, "checkpoint_bytes": saves, "checkpoint_place": place}
    formula = "events of the whole run (keep_mb) + checkpoints where train.checkpoint.place is null: both on what holds the run folder"
    return Answer("disk below the run folder", (of_events + saves) / 1e12, "TB", formula, inputs)


def _start(experiment: Experiment, fleet: Fleet) -> Answer:
    gpus = MeshShape.of(experiment.parallel).size
    sizes = ", ".join(f"{size:,}: {seconds:g} s" for size, seconds in sorted(fleet.recovery.init_s.items()))
    inputs = {"gpus": gpus, "fleet": sizes}
    formula = "the fleet's times by size, linear between: barriers of ordered groups are O(n) (paper, 3.5)"
    return Answer("start of processes and communicators", init_s(fleet.recovery, gpus), "s", formula, inputs)


def _spares(case: Case) -> Answer:
    """Nodes away at a moment are Poisson: their rate times how long each is away."""
    replaced = sum(event.per_second * (1 - event.heals) * event.away_ns / 1e9 for event in case.events if event.takes == 1)
    rebooting = sum(event.per_second * event.heals * event.back_ns / 1e9 for event in case.events if event.shows == "silent")
    away = replaced + rebooting
    value = spares_for(away, AVAILABILITY)
    inputs = {"mean_nodes_away": away, "availability": AVAILABILITY, "spares": case.spares}
    formula = "least k with P(Poisson(nodes replaced a second x supply time, and rebooting x reboot) <= k) >= 99 %"
    return Answer("spares so that one is there 99 % of the time", value, "nodes", formula, inputs, case.spares >= value)


def spares_for(mean_away: float, availability: float) -> int:
    """Least number of spares that is not exceeded with this probability by a Poisson number of nodes that are away."""
    if mean_away <= 0:
        return 0
    if mean_away > 500:  # e^-mean would be 0; the normal tail with a margin of one sixth of a node is as good here
        return round(mean_away + 2.3263 * mean_away**0.5 + 1)
    chance = term = exp(-mean_away)
    for spares in range(1, _MOST_SPARES):
        if chance >= availability:
            return spares - 1
        term *= mean_away / spares
        chance += term
    return _MOST_SPARES


def _network(experiment: Experiment) -> list[Answer]:
    """What one device sends in a step."""
    model, parallel, work = experiment.model, experiment.parallel, Work.of(experiment)
    data = _PER_WEIGHT * data_bytes(work) * (parallel.data - 1) / parallel.data
    messages = 0 if parallel.pipe == 1 else 2 * work.micro_batches * work.virtual_stages
    pipe = messages * message_bytes(work)
    layers = model.num_layers / parallel.pipe
    gathered = work.micro_batches * message_bytes(work) * (parallel.tensor - 1)
    tensor = 4 * model.branches_per_layer * layers * gathered
    shared = {"tensor": parallel.tensor, "pipe": parallel.pipe, "data": parallel.data, "micro_batches": work.micro_batches}
    return [
        Answer(
            "data-parallel volume of a device and step",
            data / _GB,
            "GB",
            "P / (t p) x (weights gathered, 2 B each, + gradients scattered, 4 B each) x (d - 1) / d",
            shared,
        ),
        Answer("pipeline volume of a device and step", pipe / _GB, "GB", "2 passes x m v messages x b s h x 2 B / t", shared),
        Answer(
            "tensor-parallel volume of a device and step",
            tensor / _GB,
            "GB",
            "gather and scatter of each branch, both passes: 4 x branches x layers / p x m b s h x 2 B x (t - 1) / t",
            shared,
        ),
    ]
