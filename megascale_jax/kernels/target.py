"""What operators are chosen for, the *target*, and the rule by which one of their implementations is.

A compile for absent GPUs runs in a CPU process, so the host's backend says nothing of a run; its `system/` file does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

import jax

from megascale_jax.config.schema import SystemConfig
from megascale_jax.errors import ConfigError
from megascale_jax.kernels.launch import INTERPRETED, Architecture, is_interpreted

Refusals = Mapping[str, str | None]
"""Implementations in the order of preference, each with the reason why it cannot run; ``None`` where it can."""


class KernelError(ConfigError):
    """An operator cannot run as asked for: sizes, types, or an implementation that the target does not have."""


@dataclass(frozen=True)
class Target:
    """Where a program will run; ``compute_capability`` times ten, of GPUs. ``max_documents``: those of a row that cuDNN has room for."""

    platform: Literal["cpu", "gpu"]
    compute_capability: int | None = None
    max_documents: int = 16

    @classmethod
    def of(cls, system: SystemConfig) -> "Target":
        """The target of a system file."""
        return cls(system.platform, system.compute_capability, system.kernels.max_documents)

    @classmethod
    def here(cls) -> "Target":
        """The devices of this process."""
        device = jax.devices()[0]
        return cls("gpu", _capability(device)) if device.platform == "gpu" else cls("cpu")

    def check(self, devices: Sequence[Any]) -> None:
        """Raise ConfigError when GPUs are not those that kernels would be compiled for: a wrong kernel fails late, or not at all.

        A kernel for compute capability 80 runs on all of 8.x; later ones use what only their own chips have.
        """
        found = {_capability(device) for device in devices if device.platform == "gpu"}
        wanted = self.compute_capability
        if wanted is not None and (strange := {is_ for is_ in found if is_ != wanted and not (wanted == 80 and 80 <= is_ < 90)}):
            raise ConfigError(
                f"system.compute_capability is {wanted}, but there are GPUs of {', '.join(map(str, sorted(strange)))} "
                f"({devices[0].device_kind}); take their system file, such as system=h100, or set system.compute_capability"
            )

    @property
    def architecture(self) -> Architecture:
        """What Triton compiles for. Raises KernelError where it cannot."""
        if refusal := self.triton_refusal:
            raise KernelError(refusal)
        return INTERPRETED if is_interpreted() else self.compute_capability or 0

    @property
    def triton_refusal(self) -> str | None:
        """Why no Triton kernel can run on this target."""
        if is_interpreted():
            return None
        if self.platform != "gpu":
            return "Triton kernels run on GPUs; on a CPU only in Triton's interpreter, for which TRITON_INTERPRET=1 must be set"
        if self.compute_capability is None:
            return "system.compute_capability is not set; give that of the GPUs times ten, 90 for H100"
        return None


def _capability(device: Any) -> int:
    return round(float(device.compute_capability) * 10)


def in_order(target: Target, on_gpus: Refusals) -> Refusals:
    """The order of preference on GPUs, or on a CPU, where the reference comes first (Triton could only be interpreted)."""
    return on_gpus if target.platform == "gpu" else dict(sorted(on_gpus.items(), key=lambda item: item[0] != "reference"))


def resolve(operator: str, implementation: str | None, refusals: Refusals) -> str:
    """The implementation to use: the one that is asked for, else the first that can run.

    Raises KernelError when one is asked for that is not there or cannot run: an explicit choice never falls back.
    """
    if implementation is None:
        found = next((name for name, refusal in refusals.items() if refusal is None), None)
        if found is None:
            raise KernelError(f"no implementation of {operator} can run: {'; '.join(f'{n}: {r}' for n, r in refusals.items())}")
        return found
    if implementation not in refusals:
        known = ", ".join(sorted(refusals))
        raise KernelError(f"{operator} has no implementation {implementation!r}; it has {known}, or None for the best")
    if refusal := refusals[implementation]:
        raise KernelError(f"{operator} by {implementation} cannot run: {refusal}. Without an explicit choice the best that can is taken")
    return implementation


@dataclass(frozen=True)
class Implementation:
    """One implementation of an operator, with what it wants to know besides the operator's arguments."""

    module: ModuleType
    options: tuple[tuple[str, Any], ...]

    def run(self, function: str, *operands: Any) -> Any:
        """A function of the module at ``operands``."""
        return getattr(self.module, function)(*operands, **dict(self.options))

    def with_options(self, **options: Any) -> "Implementation":
        """The same with more options."""
        return Implementation(self.module, (*self.options, *options.items()))


def load(package: str, name: str, target: Target) -> Implementation:
    """The implementation ``name`` in the package of an operator; Triton is imported only where it is chosen."""
    options: dict[str, Any] = {}
    if name == "triton":
        options["architecture"] = target.architecture
    if name == "cudnn":
        options["max_documents"] = target.max_documents
    return Implementation(import_module(f"megascale_jax.kernels.{package}.{name}"), tuple(options.items()))
