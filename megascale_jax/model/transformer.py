"""The decoder: embedding, layers, head. No mesh, no ``jax.distributed``.

The pieces are separate functions of a weight tree, because a pipeline runs them in different places:

    {"ends": {"embedding": [V, D], "position": [S, D], "final_vectors": [D, n], "head": [V, D], "head_bias": [V]},
     "layers": {group: [l, D, F] or [l, F]}}

with the groups of ``parameters.fused_groups`` and the shapes of one tensor-parallel rank.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from megascale_jax.config.schema import ModelConfig
from megascale_jax.kernels.dispatch import Operators
from megascale_jax.model.block import BLOCKS
from megascale_jax.model.branch import Rows, dropout
from megascale_jax.model.communication import Communication, OneDevice
from megascale_jax.model.parameters import end_groups, parameter_specs

UNROLLED_LAYERS = 8
"""More layers than this are a scan over repetitions of the window pattern, where those divide the layers."""

Weights = Mapping[str, Any]


class Transformer:
    """The model's pieces, bound to operators and to the group of ranks that shares a layer.

    ``columns``: this rank's width of every layer parameter, default the whole.
    """

    def __init__(
        self,
        model: ModelConfig,
        operators: Operators,
        communication: Communication | None = None,
        columns: Mapping[str, int] | None = None,
    ):
        self.model, self.operators = model, operators
        self.communication = communication or OneDevice()
        self.columns = columns or {spec.name: spec.columns() for spec in parameter_specs(model).values() if spec.per_layer}
        self.final_names = next(group.members for group in end_groups(model) if group.name == "final_vectors")

    def embed(self, ends: Weights, tokens_BS: jax.Array, positions_BS: jax.Array) -> jax.Array:
        """Token (and learned position) embeddings of this rank's part of the sequence, ``[B, s, D]``."""
        return self.embed_finish(ends, self.communication.reduce_scatter(self.embed_local(ends, tokens_BS)), positions_BS, None)

    def embed_local(self, ends: Weights, tokens_BS: jax.Array) -> jax.Array:
        """Rows of this rank's part of the vocabulary, ``[B, S, D]``; zero for tokens of other ranks."""
        table_VD = ends["embedding"]
        local_BS = tokens_BS - self.communication.vocab_offset(table_VD.shape[0])
        here_BS = (local_BS >= 0) & (local_BS < table_VD.shape[0])
        return jnp.where(here_BS[..., None], table_VD[jnp.where(here_BS, local_BS, 0)], 0)

    def embed_finish(self, ends: Weights, x_BsD: jax.Array, positions_BS: jax.Array, key: jax.Array | None) -> jax.Array:
        """Learned positions and dropout on the embedded tokens."""
        if self.model.position == "learned":
            x_BsD = x_BsD + ends["position"][self.communication.local_sequence(positions_BS)]
        return dropout(x_BsD, self.model.dropout, key)

    def layers(self, layers: Weights, x_BsD: jax.Array, rows: Rows, windows: tuple[int | None, ...]) -> jax.Array:
        """Run consecutive layers, without dropout; ``layers`` holds stacked weights, ``windows`` one entry a layer."""
        period = len(windows) if len(windows) <= UNROLLED_LAYERS else _period(windows)
        blocks = [self._block(window) for window in windows[:period]]

        def repetition(x_BsD: jax.Array, weights: Weights) -> tuple[jax.Array, None]:
            for index, block in enumerate(blocks):
                x_BsD = block(_layer(weights, index), x_BsD, rows)
            return x_BsD, None

        if period == len(windows):
            return repetition(x_BsD, layers)[0]
        grouped = jax.tree.map(lambda a: a.reshape(-1, period, *a.shape[1:]), layers)
        return jax.lax.scan(repetition, x_BsD, grouped)[0]

    def logits(self, ends: Weights, x_BsD: jax.Array) -> jax.Array:
        """Final norm and head: logits of this rank's vocabulary columns for the whole sequence, ``[B, S, V]``."""
        head_VD = ends["embedding" if self.model.tied_head else "head"]
        n_BSD = self.communication.gather(self.final_norm(ends, x_BsD))
        return self.add_bias_head(ends, jnp.einsum("bsd,vd->bsv", n_BSD, head_VD))

    def add_bias_head(self, ends: Weights, logits_BSV: jax.Array) -> jax.Array:
        """Logits with the head's bias, if it has one."""
        return logits_BSV + ends["head_bias"].astype(logits_BSV.dtype) if self.model.head_bias else logits_BSV

    def final_norm(self, ends: Weights, x_BsD: jax.Array) -> jax.Array:
        """The norm before the head."""
        vectors = ends["final_vectors"]
        scale, *bias = (vectors[:, index] for index in range(len(self.final_names)))
        return self.operators.add_norm(x_BsD, None, scale, bias[0] if bias else None)[1]

    def _block(self, window: int | None) -> Callable[..., jax.Array]:
        kind = BLOCKS[self.model.block]
        module = nnx.eval_shape(lambda: kind(self.model, self.columns, window, self.operators, self.communication))
        graph, state = nnx.split(module)

        def apply(weights: Weights, x_BsD: jax.Array, rows: Rows) -> jax.Array:
            bound = jax.tree.map(lambda leaf: leaf, state)
            nnx.replace_by_pure_dict(bound, dict(weights))
            return nnx.merge(graph, bound)(x_BsD, rows)

        return apply


def _layer(weights: Weights, index: int) -> Weights:
    return {name: value[index] for name, value in weights.items()}


def _period(windows: tuple[int | None, ...]) -> int:
    """Shortest repeating pattern that divides the layers."""
    return next(p for p in range(1, len(windows) + 1) if len(windows) % p == 0 and windows == windows[:p] * (len(windows) // p))
