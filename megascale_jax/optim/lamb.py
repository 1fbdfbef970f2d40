"""LAMB (You et al. 2020; paper section 3.1) and AdamW as chains of optax transforms.

The trust ratio ``|w| / |u|`` is one number per layer and logical parameter. Leaves here may be stacked over layers,
padded, or shards of a larger array, so a leaf is not a parameter: the caller hands in ``norms``, which knows what is
(``parallel/zero.py``). A zero norm on either side gives ratio 1, so a zero-initialised bias still moves.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax

from megascale_jax.config.schema import OptimizerConfig
from megascale_jax.errors import ConfigError

Tree = dict[str, jax.Array]
Norms = Callable[[Tree], Tree]


def whole_leaf_norms(tree: Tree) -> Tree:
    """Norm of each leaf as one parameter: right for unstacked, unsharded trees."""
    return jax.tree.map(jnp.linalg.norm, tree)


def scale_by_trust_ratio(norms: Norms) -> optax.GradientTransformation:
    """Scale each update by the norm of its parameter over its own norm; ratio 1 where either is zero."""

    def update(updates, state, params=None):
        assert params is not None, "the trust ratio needs the parameters"
        weight_norms, update_norms = norms(params), norms(updates)

        def scaled(update, weight_norm, update_norm):
            usable = (weight_norm > 0) & (update_norm > 0)
            return update * jnp.where(usable, weight_norm / jnp.where(usable, update_norm, 1.0), 1.0)

        return jax.tree.map(scaled, updates, weight_norms, update_norms), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def make_optimizer(
    config: OptimizerConfig,
    learning_rate: optax.Schedule,
    decays: Mapping[str, bool],
    norms: Norms = whole_leaf_norms,
) -> optax.GradientTransformation:
    """The update rule: Adam's direction, decay on the leaves that ``decays`` names, (LAMB) trust ratio, learning rate.

    Raises ConfigError for a beta outside [0, 1).
    """
    for name, beta in (("beta1", config.beta1), ("beta2", config.beta2)):
        if not 0 <= beta < 1:
            raise ConfigError(f"train.optimizer.{name} is {beta}; expected a number in [0, 1)")
    stages = [
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon),
        optax.add_decayed_weights(config.weight_decay, mask=dict(decays)),
        *([scale_by_trust_ratio(norms)] if config.name == "lamb" else []),
        optax.scale_by_learning_rate(learning_rate),
    ]
    return optax.chain(*stages)
