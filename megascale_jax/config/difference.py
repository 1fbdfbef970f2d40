"""How two experiments differ, leaf by leaf: what a resumed run and a comparison of runs show."""

from dataclasses import dataclass
from typing import cast

from pydantic import BaseModel

from megascale_jax.config.schema import Experiment


@dataclass(frozen=True)
class Difference:
    """One leaf in which two experiments differ; prints as ``train.steps: 300 -> 600``."""

    key: str
    old: object
    new: object

    def __str__(self) -> str:
        return f"{self.key}: {_yaml_value(self.old)} -> {_yaml_value(self.new)}"


def differences(old: Experiment, new: Experiment) -> list[Difference]:
    """Every leaf whose value differs, in schema order; the experiment's name is a leaf too."""
    before, after = _leaves(old), _leaves(new)
    return [Difference(key, value, after[key]) for key, value in before.items() if value != after[key]]


def _leaves(section: BaseModel, prefix: str = "") -> dict[str, object]:
    leaves: dict[str, object] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        leaves.update(_leaves(value, f"{prefix}{name}.") if isinstance(value, BaseModel) else {f"{prefix}{name}": value})
    return leaves


def _yaml_value(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml_value, cast('tuple[object, ...]', value)))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
