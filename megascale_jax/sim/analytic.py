"""The closed form of one iteration: where its seconds go, its memory, MFU. No JAX. `replay.py` is the same step, event by event.

    t = (m (F + B + X) + m H + (p - 1)/v (F + B + X)) s + latency + data + embedding + optimizer + input + host

``F``, ``B``: one micro-batch in one stage; ``X``: its blocking messages, ``2 v x``; ``s = 1 + g (1 - (1 - q)^nodes)``: the chance that at
least one of all nodes is slow, times how slow. Asynchronous messages cost ``2 (v p - 1) x`` instead, once: in warm-up and cool-down a
chunk waits for every message, in between they hide. ``H``: what the last stage has more than the fullest one by its head.
"""

from dataclasses import dataclass, fields

from megascale_jax.config.load import load_document
from megascale_jax.config.memory import state_bytes
from megascale_jax.config.schema import Experiment
from megascale_jax.config.software import SoftwareConfig
from megascale_jax.model.flops import Convention
from megascale_jax.sim.costs import Costs, Parts, costs_of
from megascale_jax.sim.device import Device
from megascale_jax.sim.memory import activation_bytes
from megascale_jax.sim.work import Work

DAY_S = 86400.0
SOFTWARE = "megascale"
"""Techniques that are assumed when nobody names any: those of the paper, which this trainer has."""


@dataclass(frozen=True)
class Times:
    """Seconds of one iteration; they add up to it."""

    gemm_s: float
    attention_s: float
    memory_s: float
    tensor_s: float
    pipe_s: float
    bubble_s: float
    head_s: float
    data_s: float
    embedding_s: float
    optimizer_s: float
    contention_s: float
    stragglers_s: float
    input_s: float
    host_s: float

    @property
    def iteration_s(self) -> float:
        """All of them."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Prediction:
    """A step of an experiment; bytes are those of one device, ``device_bytes`` what it has (``None``: not known)."""

    times: Times
    devices: int
    nodes: int
    tokens: int
    model_flops: float
    causal_flops: float
    peak: float
    state_bytes: float
    activation_bytes: float
    device_bytes: float | None

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration."""
        return self.times.iteration_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all devices in a second."""
        return self.tokens / self.iteration_s

    def mfu(self, convention: Convention = "full") -> float:
        """Model FLOPs utilization, a fraction, by a convention of `model/flops.py`."""
        flops = self.model_flops if convention == "full" else self.causal_flops
        return flops / (self.iteration_s * self.devices * self.peak)

    def days(self, tokens: float) -> float:
        """Days of training on so many tokens, without any interruption."""
        return tokens / self.tokens_per_s / DAY_S

    @property
    def memory_bytes(self) -> float:
        """States and activations; libraries and workspaces are not counted."""
        return self.state_bytes + self.activation_bytes

    @property
    def fits(self) -> bool:
        """Whether that is not more than the device has."""
        return self.device_bytes is None or self.memory_bytes <= self.device_bytes


def predict(experiment: Experiment, software: SoftwareConfig | None = None) -> Prediction:
    """A step of a checked experiment under a program's techniques; ``None``: those of ``configs/software/megascale.yaml``, read anew.

    Raises ConfigError where the system file lacks what a simulation needs. A caller with many plans loads the techniques once.
    """
    software = software or load_document("software", SOFTWARE, SoftwareConfig)
    work, device = Work.of(experiment), Device.of(experiment.system)
    state = state_bytes(experiment)
    held = state.weights + state.gradients
    return Prediction(
        times=iteration_times(work, device, software),
        devices=work.devices,
        nodes=work.nodes(device.per_node),
        tokens=work.tokens,
        model_flops=work.model_flops("full"),
        causal_flops=work.model_flops("causal"),
        peak=device.peak,
        state_bytes=state.master_and_moments + (held / work.data if software.weights_sharded else held),
        activation_bytes=activation_bytes(work, software),
        device_bytes=device.memory_bytes,
    )


def iteration_times(work: Work, device: Device, software: SoftwareConfig) -> Times:
    """The closed form."""
    costs = costs_of(work, device, software)
    m, layers = work.micro_batches, max(work.stage_layers)
    both = costs.layer_forward + costs.layer_backward
    stage_s = layers * both.total
    stalls_s = 2 * work.virtual_stages * costs.message_s if software.pipe_sends == "blocking" else 0.0
    head = costs.head_forward + costs.head_backward
    head_s = max(0.0, head.total - (layers - work.stage_layers[-1]) * both.total)
    bubble_s = _bubble_layers(work, head.total / both.total) * both.total + (work.pipe - 1) / work.virtual_stages * stalls_s
    stragglers = device.slow_node_slowdown * (1 - (1 - device.slow_node_share) ** work.nodes(device.per_node))
    data_s, hidden_s = _data(work, software, costs)
    steady = _times(both, m * layers)
    return Times(
        gemm_s=steady.gemm,
        attention_s=steady.attention,
        memory_s=steady.memory,
        tensor_s=steady.tensor,
        pipe_s=m * stalls_s if stalls_s else _latency(work, costs, both),
        bubble_s=bubble_s,
        head_s=m * head_s,
        data_s=data_s,
        embedding_s=costs.embedding_s,
        optimizer_s=costs.optimizer_s,
        contention_s=steady.contention + (software.compute_slowdown - 1) * hidden_s,
        stragglers_s=stragglers * (m * (stage_s + stalls_s + head_s) + bubble_s),
        input_s=software.data_wait_s,
        host_s=software.host_s,
    )


def _bubble_layers(work: Work, head: float) -> float:
    """Layers that the busiest stage waits for: ``(p - 1) / v`` of a stage's where all have as many.

    First chunks of the stages before it come before its first unit, last chunks of those after it before its first backward pass.
    ``head``: as many layers of work.
    """
    totals = list(map(float, work.stage_layers))
    totals[-1] += head
    busiest = max(range(work.pipe), key=lambda stage: (totals[stage], stage))
    before, after = work.layers[:busiest], work.layers[busiest + 1 :]
    return sum(chunks[0] for chunks in before) + sum(chunks[-1] for chunks in after)


def _times(parts: Parts, factor: float) -> Parts:
    return Parts(*(factor * getattr(parts, field.name) for field in fields(Parts)))


def _latency(work: Work, costs: Costs, both: Parts) -> float:
    """Asynchronous messages: each tick of warm-up and cool-down waits for one, a steady tick for what its other slot does not hide."""
    if work.pipe == 1:
        return 0.0
    p, v, m = work.pipe, work.virtual_stages, work.micro_batches
    chunk = max(work.stage_layers) / v
    shorter_s = chunk * min(costs.layer_forward.total, costs.layer_backward.total)
    ticks = max(0, m * v + p - v * p)
    return 2 * (v * p - 1) * costs.message_s + ticks * max(0.0, costs.message_s - shorter_s)


def _data(work: Work, software: SoftwareConfig, costs: Costs) -> tuple[float, float]:
    """Exposed and hidden seconds of communication over the data axis.

    Sharded weights: a layer's gathers and its scatter run beside the layer, the first gather and the last scatter beside nothing.
    Else with overlap, by model chunk (a layer where the pipeline has one stage): the first gather and the last scatter stay exposed; the
    others have the passes of the ``p`` first, and last, micro-batches to hide under.
    """
    if work.data == 1:
        return 0.0, 0.0
    gather_s, scatter_s, slower = costs.gather_s, costs.scatter_s, software.collective_slowdown
    layers, forward_s, backward_s = max(work.stage_layers), costs.layer_forward.total, costs.layer_backward.total
    if software.weights_sharded:
        exposed_s = max(0.0, slower * gather_s - forward_s) + max(0.0, slower * (gather_s + scatter_s) - backward_s)
        whole_s = work.micro_batches * layers * (2 * gather_s + scatter_s)
        all_exposed_s = work.micro_batches * layers * exposed_s + gather_s + scatter_s
        return all_exposed_s, max(0.0, whole_s - all_exposed_s)
    if not software.data_overlap:
        return gather_s + scatter_s, 0.0
    pieces = work.virtual_stages if work.pipe > 1 else layers
    rest, turns = 1 - 1 / pieces, min(work.pipe, work.micro_batches) * layers
    over_s = max(0.0, rest * (slower * gather_s - turns * forward_s)) + max(0.0, rest * (slower * scatter_s - turns * backward_s))
    return (gather_s + scatter_s) / pieces + over_s, rest * (gather_s + scatter_s)
