"""Learning rates over **applied** updates: a skipped step does not advance them."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from megascale_jax.config.schema import ScheduleConfig


def learning_rate(schedule: ScheduleConfig, peak: float, steps: int) -> optax.Schedule:
    """Rate as a function of the updates already applied, fp32.

    Warm-up is linear and its first value is ``peak / warmup_steps``, not 0. ``cosine`` falls from ``peak`` to
    ``final_fraction * peak`` at ``decay_steps`` (default ``steps``) and stays there; ``constant`` stays at ``peak``.
    """
    warmup, end = schedule.warmup_steps, schedule.decay_steps or steps

    def rate(count: ArrayLike) -> jax.Array:
        count = jnp.asarray(count, jnp.float32)
        risen = jnp.minimum((count + 1) / warmup, 1.0) if warmup else jnp.float32(1)
        if schedule.name == "constant":
            return peak * risen
        progress = jnp.clip((count - warmup) / max(end - warmup, 1), 0.0, 1.0)
        low = schedule.final_fraction
        return peak * risen * (low + (1 - low) * 0.5 * (1 + jnp.cos(jnp.pi * progress)))

    return rate
