"""How logical parameters lie in the tensors of a Hugging Face architecture, and back, bit for bit. NumPy only.

Ours: projections are ``[D, H, K]`` or ``[D, F]``, their ``embed`` dim first, and rotary positions turn interleaved pairs
``(x0, x1), (x2, x3), ...`` of a head. Theirs: a linear layer is ``[outputs, inputs]`` (GPT-2's ``Conv1D`` the other way round), may
hold several projections side by side, and some architectures turn element ``i`` with element ``i + size / 2`` instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from megascale_jax.config.schema import ModelConfig
from megascale_jax.model.parameters import ParameterSpec, parameter_specs

_INTO = ("q", "k", "v", "gate", "up")
_OUT_OF = ("o", "down")
_TURNED = ("q", "k", "q_bias", "k_bias")


@dataclass(frozen=True)
class Tensor:
    """One tensor: its name, with ``{layer}`` when every layer has one, and the logical ``members`` along its outputs.

    ``is_filled``: the architecture always has it; where our model lacks the members, it holds zeros. ``is_conv``: ``[inputs, outputs]``.
    """

    name: str
    members: tuple[str, ...]
    is_filled: bool = False
    is_conv: bool = False

    @property
    def per_layer(self) -> bool:
        """Whether every layer has one."""
        return "{layer}" in self.name


@dataclass(frozen=True)
class TensorFormat:
    """The tensors of one model. ``turns_halves``: rotary positions turn element ``i`` with ``i + size / 2``."""

    model: ModelConfig
    turns_halves: bool

    @property
    def specs(self) -> dict[str, ParameterSpec]:
        """Logical parameters that our model has, or would have with all biases."""
        every = {"attention_bias": True, "mlp_bias": True, "head_bias": True, "norm_bias": self.model.norm == "layernorm"}
        return parameter_specs(self.model.model_copy(update=every))

    def is_present(self, tensor: Tensor) -> bool:
        """Whether the model's files hold the tensor."""
        own = parameter_specs(self.model)
        return tensor.is_filled or all(member in own for member in tensor.members)

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Shape of the tensor."""
        shapes = [self._rows_shape(member) for member in tensor.members]
        whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        return whole[::-1] if tensor.is_conv else whole

    def encode(self, tensor: Tensor, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        """The tensor from one layer's logical parameters; zeros for those that ``parts`` lacks."""
        rows = [
            self._to_rows(member, parts[member]) if member in parts else np.zeros(self._rows_shape(member), np.float32)
            for member in tensor.members
        ]
        whole = np.concatenate(rows)
        return np.ascontiguousarray(whole.T if tensor.is_conv else whole)

    def decode(self, tensor: Tensor, value: np.ndarray, member: str) -> np.ndarray:
        """The logical parameter ``member`` of one layer from the tensor."""
        whole = value.T if tensor.is_conv else value
        before = sum(self._rows_shape(name)[0] for name in tensor.members[: tensor.members.index(member)])
        rows = whole[before : before + self._rows_shape(member)[0]]
        shape = self.specs[member].shape
        if member in _INTO:
            rows = rows.T
        return np.ascontiguousarray(self._to_pairs(member, rows.reshape(shape)))

    def _rows_shape(self, member: str) -> tuple[int, ...]:
        shape = self.specs[member].shape
        if member in _INTO:
            return prod(shape[1:]), shape[0]
        return (shape[0], prod(shape[1:])) if member in _OUT_OF else self._flat_vector(member, shape)

    @staticmethod
    def _flat_vector(member: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (prod(shape),) if member.endswith("_bias") else shape

    def _to_rows(self, member: str, value: np.ndarray) -> np.ndarray:
        """``[outputs, inputs]`` of a projection, a vector flat, a table as it is."""
        value = self._to_halves(member, value)
        if member in _INTO:
            return value.reshape(value.shape[0], -1).T
        return value.reshape(self._rows_shape(member))

    def _halves(self) -> np.ndarray:
        """Where the elements of a head lie with us, in the order in which they lie in halves."""
        size, width = self.model.rotary_dim, self.model.head_dim
        return np.concatenate([np.arange(0, size, 2), np.arange(1, size, 2), np.arange(size, width)])

    def _to_halves(self, member: str, value: np.ndarray) -> np.ndarray:
        return value[..., self._halves()] if self.turns_halves and member in _TURNED else value

    def _to_pairs(self, member: str, value: np.ndarray) -> np.ndarray:
        return value[..., np.argsort(self._halves())] if self.turns_halves and member in _TURNED else value
