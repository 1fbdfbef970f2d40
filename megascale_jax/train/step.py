"""The step: micro-batches run through gathered weights, their scattered gradients clipped and applied, all in one program.

The loss is the mean over the valid tokens of the **global** batch, known before the first forward. A step whose loss
or gradient norm is not finite on any rank is skipped on all: parameters, moments, every counter and the rng stay as
they were, only ``step`` moves on, since its batch is spent. A batch without a valid token has loss 0.

Ranks also agree to stop inside the step: each puts a vote in, the sum comes out with the metrics, so all leave the loop
after the same step and no extra message is sent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from megascale_jax import axes
from megascale_jax.comm.flags import known_step_options
from megascale_jax.config.schema import Experiment
from megascale_jax.errors import DataError
from megascale_jax.kernels.clock.api import Stamps
from megascale_jax.optim.lamb import make_optimizer
from megascale_jax.optim.schedule import learning_rate
from megascale_jax.parallel.pipeline.tick_state import Batch
from megascale_jax.parallel.plan import BATCH_PARTITION, DEVICE_PARTITION, Plan
from megascale_jax.train.saved import applied_updates
from megascale_jax.train.state import TrainState, state_partitions

BATCH_KEYS = ("tokens", "targets", "segment_ids", "positions")
METRICS = ("loss", "grad_norm", "learning_rate", "tokens", "skipped", "stop_votes")
_BATCH_SPECS = dict.fromkeys(BATCH_KEYS, BATCH_PARTITION)


@dataclass(frozen=True)
class Steps:
    """The compiled functions of a run.

    ``train(state, batch, votes) -> (state, metrics)`` donates its state; metrics are replicated scalars: ``loss`` (nats
    per valid token), ``grad_norm``, ``learning_rate``, ``tokens`` (valid, global), ``skipped``, ``stop_votes``; with a clock also
    ``stamps``, int32 ``[devices, n, 2]``, each device's own, which ``plan.executor.stamps`` explains.
    ``evaluate(params, batch) -> (nats, tokens)`` sums over the global batch. Batches are ``[m, B, S]``.
    ``gradients(params, batch) -> (loss, gradients)`` are the logical gradients before clipping.
    """

    optimizer: optax.GradientTransformation
    train: jax.stages.Wrapped
    evaluate: jax.stages.Wrapped
    gradients: jax.stages.Wrapped


def make_steps(experiment: Experiment, plan: Plan) -> Steps:
    """Build the functions of a run; nothing is compiled until called."""
    config = experiment.train
    rate = learning_rate(config.schedule, config.optimizer.learning_rate, config.steps)
    decays = {name: spec.decays for name, spec in plan.zero.specs.items()}
    optimizer = make_optimizer(config.optimizer, rate, decays, plan.zero.norms)

    def gradients(
        params: dict[str, jax.Array], batch: Batch, key: jax.Array | None = None, stamps: Stamps | None = None
    ) -> tuple[jax.Array, Any, jax.Array]:
        tokens = jax.lax.psum((batch["targets"] >= 0).sum(), axes.DATA)
        scale = 1.0 / jnp.maximum(tokens, 1).astype(jnp.float32)
        loss, grads = plan.executor.loss_and_gradients(params, batch, scale, key, stamps or Stamps(None))
        return jax.lax.psum(loss, axes.DATA), grads, tokens

    def train(state: TrainState, batch: Batch, votes: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        stamps = Stamps(plan.executor.clock)
        stamps.take(state.step)
        next_rng, dropout_key = jax.random.split(jax.random.wrap_key_data(state.rng))
        loss, grads, tokens = gradients(state.params, batch, dropout_key if experiment.model.dropout else None, stamps)
        norm = stamps.mark(plan.zero.global_norm(grads))
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        if config.optimizer.clip_norm is not None:
            factor = jnp.minimum(1.0, config.optimizer.clip_norm / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
            grads = jax.tree.map(lambda g: g * factor, grads)
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        applied = TrainState(state.step, params, optimizer_state, jax.random.key_data(next_rng))
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), applied, state)
        stamps.take(kept.params)
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": rate(applied_updates(state.optimizer)),
            "tokens": tokens,
            "skipped": (~finite).astype(jnp.int32),
            "stop_votes": jax.lax.psum(votes.sum(), axes.MESH_AXES),
        }
        if (taken := stamps.all()) is not None:
            metrics["stamps"] = taken[None]
        return TrainState(state.step + 1, kept.params, kept.optimizer, kept.rng), metrics

    def evaluate(params: dict[str, jax.Array], batch: Batch) -> tuple[jax.Array, jax.Array]:
        nats = plan.executor.loss(params, batch)
        return jax.lax.psum((nats, (batch["targets"] >= 0).sum()), axes.DATA)

    partitions, replicated = state_partitions(plan, optimizer), PartitionSpec()
    metrics = dict.fromkeys(METRICS, replicated) | ({} if plan.executor.clock is None else {"stamps": DEVICE_PARTITION})
    compiled = partial(jax.jit, compiler_options=known_step_options(experiment.system, _compiles) or None)
    return Steps(
        optimizer,
        compiled(plan.shard_map(train, (partitions, _BATCH_SPECS, DEVICE_PARTITION), (partitions, metrics)), donate_argnums=0),
        compiled(plan.shard_map(evaluate, (partitions.params, _BATCH_SPECS), (replicated, replicated))),
        compiled(plan.shard_map(lambda p, b: gradients(p, b)[:2], (partitions.params, _BATCH_SPECS), (replicated, partitions.params))),
    )


def _compiles(options: Mapping[str, str | int | bool]) -> bool:
    """Whether the installed jaxlib knows compiler options."""
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return False
    return True


def place_batch(plan: Plan, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Global arrays from this process's rows (``[m, rows of this process, S]``, in order of its data indices).

    Raises DataError when a row holds more documents than the attention of the target has room for.
    """
    if (room := plan.most_documents) is not None:
        most = int(np.max(batch["segment_ids"], initial=0))
        if most > room:
            raise DataError(
                f"a row holds {most} documents, cuDNN attention has room for {room}; raise system.kernels.max_documents "
                "(H100 or newer), or prepare longer documents"
            )
    sharding = plan.sharding(BATCH_PARTITION)
    return {key: jax.make_array_from_process_local_data(sharding, batch[key]) for key in BATCH_KEYS}


def place_vote(plan: Plan, asks_to_stop: bool) -> jax.Array:
    """This process's vote for the step, of each of its devices: int32, 1 to stop."""
    local = np.full(len([d for d in plan.mesh.devices.flat if d.process_index == jax.process_index()]), int(asks_to_stop), np.int32)
    return jax.make_array_from_process_local_data(plan.sharding(DEVICE_PARTITION), local)
