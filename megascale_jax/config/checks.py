"""Rules that join several fields, judged before any device is touched.

`check` runs every rule and reports all problems at once, so that a plan is not repaired one error at a time. A rule is a
function from an experiment to lines of text; a line says what was got, why it cannot work, and values that would.

Failure case: a rule whose own premise is broken (heads that do not divide the width) stays silent where another rule
already says so.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from megascale_jax.config.difference import Difference
from megascale_jax.config.layout import MeshShape, round_up, virtual_stages_of
from megascale_jax.config.memory import GIB, state_bytes
from megascale_jax.config.schema import TRITON_HEAD_SIZES, DataConfig, Experiment, ModelConfig, ParallelConfig, SourceConfig
from megascale_jax.config.stages import place_layers
from megascale_jax.errors import ConfigError


def check(experiment: Experiment) -> None:
    """Raise one ConfigError with every problem of the experiment; return if there is none."""
    if problems := problems_of(experiment):
        title = f"experiment {experiment.name} cannot run"
        raise ConfigError(f"{title}: {problems[0]}" if len(problems) == 1 else "\n  - ".join([f"{title}:", *problems]))


def problems_of(experiment: Experiment, rules: Iterable[str] | None = None) -> list[str]:
    """Every problem by some of the `RULES`, by name; ``None``: by all."""
    return [line for name in (RULES if rules is None else rules) for line in RULES[name](experiment)]


RESUMABLE = (
    *("train.steps", "train.gc_every", "train.digest_every", "train.evaluation", "train.checkpoint", "train.logging", "train.events"),
    *(
        "train.sample_prompt",
        "train.data.loader",
        "train.data.weights_at",
        "train.data.skip",
        "train.rewinds",
        "parallel",
        "system",
        "cluster",
    ),
)
"""What may change between a run and its resumption; everything else decides what is learned, or the shape of the state.

Any checkpoint loads on any mesh; on another one, sums are rounded in another order. Weights of a mixture may change from now on;
that the past ones are as they were is checked against the checkpoint's data state.
"""


def difference_blocks_resume(differences: Iterable[Difference]) -> list[Difference]:
    """Those of the ``differences`` between a run and its resumption that may not be, in order.

    A schedule without ``decay_steps`` follows ``train.steps``, so extending a run stretches it.
    """
    return [item for item in differences if not any(item.key == free or item.key.startswith(f"{free}.") for free in RESUMABLE)]


def nearest_multiples(size: int, factor: int) -> str:
    """``6048, 6216``: the multiples of ``factor`` on both sides of ``size``; only the upper one below ``factor``."""
    upper = round_up(size, factor)
    return ", ".join(str(value) for value in (upper - factor, upper) if value > 0)


def _divides(key: str, size: int, formula: str, factors: Sequence[int]) -> Iterator[str]:
    """A line if the product of ``factors`` does not divide ``size``; ``formula`` names them."""
    product = 1
    for factor in factors:
        product *= factor
    if size % product:
        numbers = f"{' * '.join(map(str, factors))} = {product}" if len(factors) > 1 else str(product)
        yield f"{key} {size} is not divisible by {formula} = {numbers}; nearest: {nearest_multiples(size, product)}"


def _heads(experiment: Experiment) -> Iterator[str]:
    model, tensor = experiment.model, experiment.parallel.tensor
    yield from _divides("model.num_heads", model.num_heads, "parallel.tensor", [tensor])
    if model.num_kv_heads is not None:
        yield from _divides("model.num_kv_heads", model.num_kv_heads, "parallel.tensor", [tensor])
        yield from _divides("model.num_heads", model.num_heads, "model.num_kv_heads", [model.num_kv_heads])
    if model.head_size is None and model.hidden_size % model.num_heads:
        yield from _divides("model.hidden_size", model.hidden_size, "model.num_heads", [model.num_heads])
    elif model.position == "rotary" and model.head_dim % 2:
        source = "model.head_size" if model.head_size else "the head width model.hidden_size / model.num_heads"
        yield f"{source} = {model.head_dim} is odd, but rotary positions turn pairs; make it even or set model.position=learned"
    if model.position == "rotary" and model.rotary_size is not None and (model.rotary_size % 2 or model.rotary_size > model.head_dim):
        yield f"model.rotary_size {model.rotary_size} is no even number up to the head width {model.head_dim}; null turns all"


def _block(experiment: Experiment) -> Iterator[str]:
    model, tensor = experiment.model, experiment.parallel.tensor
    yield from _divides("model.mlp_size", model.mlp_size, "parallel.tensor", [tensor])
    if tensor > 1:
        yield from _divides("model.sequence_length", model.sequence_length, "2 * parallel.tensor", [2, tensor])
    if model.window == ():
        yield "model.window is an empty list, expected at least one window; write full for attention without a window"
    if model.position == "rotary" and model.rotary_layers == "windowed" and model.window != () and not any(model.windows):
        yield "model.rotary_layers is windowed, but no layer has a window, so no layer would know positions; set model.rotary_layers=all"
    if model.norm == "rmsnorm" and model.norm_bias:
        yield "model.norm_bias is true, but rmsnorm has no shift; set model.norm_bias=false or model.norm=layernorm"


def _batch(experiment: Experiment) -> Iterator[str]:
    parallel, batch = experiment.parallel, experiment.train.global_batch_size
    key, rows = "train.global_batch_size", [parallel.data, parallel.micro_batch_size]
    problems = list(_divides(key, batch, "parallel.data * parallel.micro_batch_size", rows))
    if parallel.pipe > 1:
        formula = "parallel.data * parallel.micro_batch_size * parallel.pipe"
        problems = list(_divides(key, batch, formula, [*rows, parallel.pipe]))
    yield from problems


def _pipeline(experiment: Experiment) -> Iterator[str]:
    model, parallel = experiment.model, experiment.parallel
    if model.window == ():
        return
    if parallel.pipe > model.num_layers:
        good = _good_pipes(model, parallel)
        yield f"parallel.pipe {parallel.pipe} exceeds model.num_layers {model.num_layers}: a stage would hold no layer; {good}"
        return
    virtual_stages, most = virtual_stages_of(model, parallel), model.num_layers // parallel.pipe
    if virtual_stages > most and (good := _placeable(model, parallel, "virtual_stages", most)):
        yield (
            f"parallel.virtual_stages {virtual_stages} exceeds the {most} layers of a stage "
            f"(model.num_layers {model.num_layers} over parallel.pipe {parallel.pipe}); good values: {', '.join(map(str, good))}"
        )
    elif problem := _misplaced(model, parallel):
        yield problem


def _good_pipes(model: ModelConfig, parallel: ParallelConfig) -> str:
    if good := _placeable(model, parallel, "pipe", model.num_layers):
        return f"good values: {', '.join(map(str, good))}"
    even = parallel.model_copy(update={"virtual_stages": None, "layers": None})
    good = _placeable(model, even, "pipe", model.num_layers)
    return f"good values, with parallel.virtual_stages=null and parallel.layers=null: {', '.join(map(str, good))}"


def _placeable(model: ModelConfig, parallel: ParallelConfig, field: str, most: int) -> list[int]:
    """Values of a field, from 1 on, with which all layers find a place."""
    return [value for value in range(1, most + 1) if not _misplaced(model, parallel.model_copy(update={field: value}))]


def _misplaced(model: ModelConfig, parallel: ParallelConfig) -> str | None:
    """Why the layers cannot be placed, if they cannot."""
    try:
        place_layers(model.num_layers, parallel.pipe, virtual_stages_of(model, parallel), parallel.layers).windows(model.windows)
    except ConfigError as error:
        return str(error)
    return None


def _limits(experiment: Experiment) -> Iterator[str]:
    limits = experiment.system.limits
    if limits.execution_s <= limits.first_collective_s:
        yield (
            f"system.limits.execution_s {limits.execution_s} would end a first step before system.limits.first_collective_s "
            f"{limits.first_collective_s} tells which collective waits; set execution_s above {limits.first_collective_s}"
        )


def _node(experiment: Experiment) -> Iterator[str]:
    parallel, per_node = experiment.parallel, experiment.system.devices_per_node
    if per_node is None:
        return
    mesh = MeshShape.of(parallel)
    good = [size for size in range(1, per_node + 1) if per_node % size == 0]
    if parallel.tensor > per_node or (mesh.size > per_node and per_node % parallel.tensor):
        yield (
            f"parallel.tensor {parallel.tensor} leaves the node: system.devices_per_node is {per_node} and tensor ranks share one; "
            f"good values: {', '.join(map(str, good))}"
        )


def _training(experiment: Experiment) -> Iterator[str]:
    train = experiment.train
    for step, first, end in train.rewinds:
        if first >= end:
            yield f"train.rewinds has [{step}, {first}, {end}], which skips no range; give [STEP, FIRST, END] with END above FIRST"
    warmup, decay = train.schedule.warmup_steps, train.schedule.decay_steps
    source = f"train.steps {train.steps}" if decay is None else f"train.schedule.decay_steps {decay}"
    if warmup >= (decay or train.steps):
        yield f"train.schedule.warmup_steps {warmup} is not below {source}; shorten the warm-up or train longer"


def _rewinds(experiment: Experiment) -> Iterator[str]:
    if experiment.cluster.rules.loss_spike == "act" and experiment.train.checkpoint.every is None:
        yield (
            "cluster.rules.loss_spike is act, but train.checkpoint.every is null, so there is no checkpoint to go back to; set it, or "
            "cluster.rules.loss_spike=observe"
        )


def _data(experiment: Experiment) -> Iterator[str]:
    data = experiment.train.data
    for first, end in data.skip:
        if first >= end:
            yield f"train.data.skip has [{first}, {end}], which is no range; give [FIRST, END] with END above FIRST"
    if data.mixture is not None:
        yield from _mixture(data, data.mixture)
        return
    if data.weights_at:
        yield "train.data.weights_at changes the weights of a mixture, but train.data.mixture is null; name the sources there"
    if data.source is None and data.prepared is None:
        yield "train.data has neither source nor prepared; set train.data.source=FILE_OR_FOLDER, or train.data.source=stdlib to try"
    if data.source is not None and data.prepared is not None:
        yield "train.data has both source and prepared; set train.data.prepared=null to prepare the source, else train.data.source=null"


def _mixture(data: DataConfig, mixture: dict[str, SourceConfig]) -> Iterator[str]:
    if data.source is not None or data.prepared is not None:
        yield "train.data has a mixture and also source or prepared; set train.data.source=null and train.data.prepared=null"
    if not any(source.weight for source in mixture.values()):
        yield "train.data.mixture has no source with a weight above 0; give one"
    for name, source in mixture.items():
        if (source.source is None) == (source.prepared is None):
            has = "neither source nor prepared" if source.source is None else "both source and prepared"
            yield f"train.data.mixture.{name} has {has}; give one of them"
    for step, weights in data.weights_at.items():
        if unknown := sorted(set(weights) - set(mixture)):
            yield f"train.data.weights_at.{step} names {', '.join(unknown)}; the sources are {', '.join(sorted(mixture))}"


def _kernels(experiment: Experiment) -> Iterator[str]:
    system = experiment.system
    for operator in ("attention", "norm", "activation", "loss"):
        chosen = getattr(system.kernels, operator)
        if system.platform == "cpu" and (chosen == "cudnn" or (chosen == "triton" and os.environ.get("TRITON_INTERPRET") != "1")):
            yield f"system.kernels.{operator} is {chosen}, which needs system.platform gpu, got cpu; set system.kernels.{operator}=auto"
        if system.platform == "gpu" and chosen == "triton" and system.compute_capability is None:
            yield f"system.kernels.{operator} is triton, compiled for a compute capability: set system.compute_capability to 80, 90 or 100"
    if system.platform == "gpu" and system.kernels.attention != "reference":
        yield from _gpu_attention(experiment)


def _gpu_attention(experiment: Experiment) -> Iterator[str]:
    head, kernels, capability = experiment.model.head_dim, experiment.system.kernels, experiment.system.compute_capability
    if experiment.train.compute_dtype != "bfloat16":
        dtype = experiment.train.compute_dtype
        yield f"train.compute_dtype is {dtype}, but attention on GPUs takes bfloat16; set train.compute_dtype=bfloat16"
    largest = 128 if kernels.attention == "cudnn" and capability is not None and capability < 90 else 256
    if head % 8 or head > largest:
        yield f"the head width {head} is none that attention on such GPUs takes: a multiple of 8, at most {largest}"
    elif kernels.attention == "triton" and head not in TRITON_HEAD_SIZES:
        sizes = ", ".join(map(str, TRITON_HEAD_SIZES))
        yield f"the head width {head} is none of those of the Triton kernels: {sizes}; set system.kernels.attention=auto"
    if kernels.attention == "cudnn" and kernels.max_documents > 1 and capability is not None and capability < 90:
        yield (
            f"system.kernels.max_documents is {kernels.max_documents}, but cuDNN keeps the documents of a row apart on compute capability "
            f"90 and later, got {capability}; set system.kernels.attention=auto, or max_documents=1 for rows of one document"
        )


def _memory(experiment: Experiment) -> Iterator[str]:
    limit_gib = experiment.system.memory_gib
    if limit_gib is None:
        return
    state = state_bytes(experiment)
    if state.total > limit_gib * GIB:
        yield (
            f"one device would hold {state.total / GIB:.1f} GiB of state (masters and moments {state.master_and_moments / GIB:.1f}, "
            f"weights {state.weights / GIB:.1f}, gradients {state.gradients / GIB:.1f}), but system.memory_gib is {limit_gib:g}; "
            "raise parallel.tensor, parallel.pipe or (masters and moments only) parallel.data"
        )


def _checkpoint(experiment: Experiment) -> Iterator[str]:
    settings = experiment.train.checkpoint
    if settings.key_file is not None and settings.compression != "none":
        yield "train.checkpoint.compression does not go with key_file: sealed blocks are not compressed; set it to none"
    if settings.upload is not None and "://" in (settings.place or ""):
        yield f"train.checkpoint.upload copies from a folder, but train.checkpoint.place is {settings.place}; leave one of them out"
    if settings.place is not None and settings.place.startswith(("http://", "https://")):
        yield f"train.checkpoint.place {settings.place} can only be read; expected a folder, gs://bucket/path or s3://bucket/path"


RULES: Mapping[str, Callable[[Experiment], Iterator[str]]] = {
    "heads": _heads,
    "widths": _block,
    "batch": _batch,
    "layers": _pipeline,
    "limits": _limits,
    "node": _node,
    "training": _training,
    "rewinds": _rewinds,
    "data": _data,
    "checkpoint": _checkpoint,
    "kernels": _kernels,
    "memory": _memory,
}
LAYOUT_RULES = ("heads", "widths", "batch", "layers", "node", "memory")
"""Those that judge how a model is spread over devices; the others are the same for every layout."""
