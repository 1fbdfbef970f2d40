"""Continues a text with a trained model: the newest checkpoint of a run on one device.

The whole visible text is computed again for each token, on a fixed number of positions, so one compiled program serves
all; the oldest tokens leave when the sequence length is reached. Meant for a look at a model, not for serving.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from megascale_jax import axes
from megascale_jax.checkpoint.restore import load_arrays
from megascale_jax.config.schema import Experiment, ParallelConfig
from megascale_jax.data.tokenizer import load_tokenizer
from megascale_jax.errors import RunFolderError, UsageError
from megascale_jax.model.branch import Rows
from megascale_jax.parallel.plan import Plan, make_plan
from megascale_jax.train.folder import RunFolder

_ROW = PartitionSpec(None, None)


def sample(folder: RunFolder, prompt: str, *, num_tokens: int, temperature: float = 0.8, seed: int = 0) -> str:
    """``prompt`` and what the model of a run's newest checkpoint makes of it, up to an end of document.

    Temperature 0 takes the likeliest token each time. Raises RunFolderError for a run without a checkpoint, UsageError
    for an empty prompt or a number out of range.
    """
    if num_tokens < 1 or not 0 <= temperature < math.inf:
        raise UsageError(f"tokens {num_tokens}, temperature {temperature}; expected at least 1 token and a temperature >= 0")
    experiment, latest = folder.experiment(), folder.latest()
    if latest is None:
        raise RunFolderError(f"{folder.path} has no complete checkpoint yet; train until the first one is written")
    tokenizer = load_tokenizer(folder.description(latest)["tokenizer"], folder.path)
    ids = [int(i) for i in tokenizer.encode(prompt)]
    if not ids:
        raise UsageError("the prompt is empty; give at least one character")
    plan = make_plan(_on_one_device(experiment), jax.local_devices()[:1])
    named = load_arrays(folder.storage(), latest, plan, [f"params.{name}" for name in plan.zero.specs])
    params = {name.removeprefix("params."): value for name, value in named.items()}
    next_logits = _next_logits(plan)
    key, length = jax.random.key(seed), experiment.model.sequence_length
    for step in range(num_tokens):
        visible = ids[-length:]
        tokens = np.zeros((1, length), np.int32)
        tokens[0, : len(visible)] = visible
        logits_V = next_logits(params, tokens, np.int32(len(visible) - 1))[: tokenizer.vocab_size]
        if temperature:
            chosen = int(jax.random.categorical(jax.random.fold_in(key, step), logits_V / temperature))
        else:
            chosen = int(jnp.argmax(logits_V))
        if chosen == tokenizer.end_of_document:
            break
        ids.append(chosen)
    return tokenizer.decode(ids)


def _next_logits(plan: Plan):
    length, transformer = plan.experiment.model.sequence_length, plan.executor.transformer
    assert plan.mesh.size == 1, "a sample is drawn on one device"

    def logits(params: dict[str, jax.Array], tokens_BS: jax.Array, last: jax.Array) -> jax.Array:
        positions_BS = jnp.arange(length, dtype=jnp.int32)[None]
        weights = plan.zero.gather(params)
        layers = {name: value.reshape(-1, *value.shape[2:]) for name, value in weights["layers"].items()}
        x_BSD = transformer.embed(weights["ends"], tokens_BS, positions_BS)
        x_BSD = transformer.layers(layers, x_BSD, Rows(positions_BS, jnp.ones_like(tokens_BS)), transformer.model.windows)
        return transformer.logits(weights["ends"], x_BSD)[0, last].astype(jnp.float32)

    specs = (plan.zero.partitions, _ROW, PartitionSpec())
    return jax.jit(plan.shard_map(logits, specs, PartitionSpec((axes.PIPE, axes.TENSOR))))


def _on_one_device(experiment: Experiment) -> Experiment:
    return experiment.model_copy(update={"parallel": ParallelConfig()})
