"""Operations of the embedding and the head in a tick: slots E, D and H. The vocabulary is split over ``tensor`` and ``pipe``."""

from collections.abc import Mapping
from functools import cached_property

import jax
import jax.numpy as jnp

from megascale_jax.kernels.loss.api import IGNORE
from megascale_jax.parallel.pipeline.tick_state import TickState, take

_EMBED_KEY = 2**20
"""Folded into a micro-batch's key for the embedding's dropout; branches fold their own, smaller, number."""


class VocabularyOperations(TickState):
    """All stages take part; what only one of them has is zero on the others, and summed over ``pipe``."""

    def embed_rows(self) -> jax.Array:
        """This rank's vocabulary's share of the entering micro-batch's embeddings."""
        return self.chunks.transformer.embed_local(self.weights["ends"], take(self.batch["tokens"], self.column("entering")))

    def embed_finish(self, x_BsD: jax.Array) -> jax.Array:
        """Learned positions and dropout."""
        return self._positioned(self.weights["ends"], x_BsD, self.column("entering"))

    def _positioned(self, ends: Mapping[str, jax.Array], x_BsD: jax.Array, micro_batch: jax.Array) -> jax.Array:
        key = self._micro_batch_key(micro_batch)
        key = None if key is None else jax.random.fold_in(key, _EMBED_KEY)
        return self.chunks.transformer.embed_finish(ends, x_BsD, take(self.batch["positions"], micro_batch), key)

    def embed_split(self, g_BsD: jax.Array) -> jax.Array:
        """Gradient of the embedded rows where this rank finished one, zero elsewhere; learned positions take theirs."""
        own_BsD = jnp.where(self.column("late_first") == 1, g_BsD, 0)
        zero = jnp.zeros_like(own_BsD)
        ends = {name: value for name, value in self.weights["ends"].items() if name == "position"}
        _, pull = jax.vjp(lambda e, x: self._positioned(e, x, self.column("leaving")), ends, zero)
        d_ends, d_x_BsD = pull(own_BsD)
        for name, gradient in d_ends.items():
            self._add_end(name, gradient)
        return d_x_BsD

    def embed_add(self, g_BSD: jax.Array) -> None:
        """Add up the gradient of this rank's rows of the table."""
        tokens_BS = take(self.batch["tokens"], self.column("leaving"))
        table = self.weights["ends"]["embedding"]
        _, pull = jax.vjp(lambda t: self.chunks.transformer.embed_local({"embedding": t}, tokens_BS), jnp.zeros(table.shape, jnp.float32))
        self._add_end("embedding", pull(g_BSD.astype(jnp.float32))[0])

    def _add_end(self, name: str, gradient: jax.Array) -> None:
        ends = self.gradients["ends"]
        self.gradients = self.gradients | {"ends": ends | {name: ends[name] + gradient.astype(jnp.float32)}}

    @cached_property
    def _targets(self) -> jax.Array:
        """Targets of the micro-batch at the head; ignored ones when there is none."""
        return jnp.where(self.column("head_busy") == 1, take(self.batch["targets"], self.column("head")), IGNORE)

    def head_split(self, y_BsD: jax.Array) -> jax.Array:
        """The last stage's output; zero elsewhere."""
        return jnp.where(self.stage == self.chunks.stages - 1, y_BsD, 0)

    def head_norm(self, x_BsD: jax.Array) -> jax.Array:
        """The final norm."""
        return self.chunks.transformer.final_norm(self.weights["ends"], x_BsD)

    def head_project(self, n_BSD: jax.Array) -> jax.Array:
        """Logits of this rank's vocabulary."""
        return self.chunks.transformer.add_bias_head(self.weights["ends"], jnp.einsum("bsd,vd->bsv", n_BSD, self._table))

    def head_measure(self, logits_BSV: jax.Array) -> jax.Array:
        """This rank's part of the softmax."""
        return self.chunks.transformer.operators.loss_statistics(logits_BSV, self._targets, self._offset, self.model.vocab_size)

    def head_loss(self, statistics_n3BS: jax.Array) -> None:
        """Add up the loss."""
        loss_BS, _ = self.chunks.transformer.operators.loss_join(statistics_n3BS, self._targets)
        self.loss = self.loss + loss_BS.sum() * self.scale

    def head_differentiate(self, logits_BSV: jax.Array, statistics_n3BS: jax.Array) -> jax.Array:
        """Gradient of this rank's logits; the head's bias takes its own."""
        operators = self.chunks.transformer.operators
        loss_BS, log_total_BS = operators.loss_join(statistics_n3BS, self._targets)
        weight_BS = jnp.broadcast_to(self.scale, loss_BS.shape)
        d_logits_BSV = operators.loss_gradient(logits_BSV, log_total_BS, self._targets, self._offset, self.model.vocab_size, weight_BS)
        if self.model.head_bias:
            self._add_end("head_bias", d_logits_BSV.astype(jnp.float32).sum((0, 1)))
        return d_logits_BSV

    def head_input_gradient(self, d_logits_BSV: jax.Array) -> jax.Array:
        """Data gradient of the head."""
        return jnp.einsum("bsv,vd->bsd", d_logits_BSV, self._table)

    def head_weight_gradient(self, d_logits_BSV: jax.Array, n_BSD: jax.Array) -> jax.Array:
        """Gradient of this rank's rows of the head."""
        return jnp.einsum("bsv,bsd->vd", d_logits_BSV, n_BSD, preferred_element_type=jnp.float32)

    def head_add(self, gradient: jax.Array) -> None:
        """Accumulate it."""
        self._add_end(self._table_name, gradient)

    def head_finish(self, x_BsD: jax.Array, dn_BsD: jax.Array) -> jax.Array:
        """Back through the final norm, whose gradient the last stage counts."""
        vectors = {"final_vectors": self.weights["ends"]["final_vectors"]}
        _, pull = jax.vjp(self.chunks.transformer.final_norm, vectors, x_BsD)
        d_vectors, d_x_BsD = pull(dn_BsD)
        counts = self.stage == self.chunks.stages - 1
        self._add_end("final_vectors", jnp.where(counts, d_vectors["final_vectors"], 0))
        return d_x_BsD

    @property
    def _table_name(self) -> str:
        return "embedding" if self.model.tied_head else "head"

    @property
    def _table(self) -> jax.Array:
        return self.weights["ends"][self._table_name]

    @property
    def _offset(self) -> jax.Array:
        return self.communication.vocab_offset(self._table.shape[0])
