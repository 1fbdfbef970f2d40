"""``config.json`` of an architecture from our `ModelConfig`, and back. What cannot be carried over exactly is refused, all at once.

Dropout is not carried over: it decides how a model is trained, not which function it is.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from megascale_jax.checkpoint.huggingface.architectures import ARCHITECTURES, Architecture
from megascale_jax.config.schema import ModelConfig
from megascale_jax.errors import CheckpointError, UsageError

_WINDOWED, _FULL = "sliding_attention", "full_attention"
_DEFAULT_BASE = 10000.0


@dataclass(frozen=True)
class ForeignModel:
    """A model read from ``config.json``. ``logit_scale``: what its logits are multiplied by, which joins the final norm's scale."""

    architecture: Architecture
    model: ModelConfig
    logit_scale: float = 1.0
    end_token: int | None = None


def choose(model: ModelConfig, name: str | None) -> Architecture:
    """The architecture of that name, or the first one that fits. Raises UsageError with all that does not fit."""
    if name is not None and name not in ARCHITECTURES:
        raise UsageError(f"--architecture {name!r}; expected one of {', '.join(ARCHITECTURES)}")
    candidates = [ARCHITECTURES[name]] if name else list(ARCHITECTURES.values())
    problems = {one.name: list(_conflicts(one, model)) for one in candidates}
    if fitting := [one for one in candidates if not problems[one.name]]:
        return fitting[0]
    lines = [f"{one}: {'; '.join(found)}" for one, found in problems.items()]
    what = f"the model cannot be exported as {name}" if name else "the model is none of the architectures that it could be exported as"
    raise UsageError("\n  - ".join([f"{what}; train one with the expected values, or take another architecture:", *lines]))


def to_settings(architecture: Architecture, model: ModelConfig, dtype: str, end_token: int | None) -> dict[str, Any]:
    """``config.json`` of a model that fits the architecture. ``end_token``: the id that ends a text, if there is one."""
    full = {"num_kv_heads": model.kv_heads}
    settings: dict[str, Any] = {"architectures": [architecture.class_name], "model_type": architecture.name, "dtype": dtype}
    settings |= {theirs: full.get(ours, getattr(model, ours)) for ours, theirs in architecture.names.items()}
    settings |= {key: values[0] for key, values in architecture.expected.items()} | dict(architecture.written)
    settings |= {"bos_token_id": None, "eos_token_id": end_token, "pad_token_id": None}
    if architecture.has_head_size:
        settings["head_dim"] = model.head_dim
    if architecture.has_windows:
        sizes = [window for window in model.windows if window is not None]
        settings["sliding_window"] = sizes[0] if sizes else None
        settings["layer_types"] = [_FULL if window is None else _WINDOWED for window in model.windows]
    if architecture.name == "gptj":
        settings["rotary_dim"] = model.rotary_dim
    elif model.position == "rotary":
        rope = {"rope_type": "default", "rope_theta": model.rotary_base}
        if architecture.rotary == "part":
            rope["partial_rotary_factor"] = settings["partial_rotary_factor"] = _share(model.rotary_dim, model.head_dim)
        # releases before 5 read the base here, later ones there
        settings |= {"rope_theta": model.rotary_base, "rope_parameters": rope}
    return settings


def from_settings(settings: Mapping[str, Any]) -> ForeignModel:
    """The model that a ``config.json`` describes. Raises CheckpointError with all that our model cannot express."""
    name = settings.get("model_type")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(f"config.json: model_type is {name!r}; expected one of {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[name]
    given = dict(architecture.defaults) | dict(settings)
    missing = [theirs for theirs in architecture.names.values() if theirs not in given]
    if missing:
        raise CheckpointError(f"config.json of {name} lacks {', '.join(missing)}; save the model with transformers once more")
    problems = [
        f"{key} is {given[key]!r}, expected {' or '.join(map(repr, values))}"
        for key, values in architecture.expected.items()
        if given[key] not in values
    ]
    try:
        fields = _fields(architecture, given, problems)
        scale = float(given.get("logit_scale", 1.0))
        if not math.isfinite(scale):
            problems.append(f"logit_scale is {scale}, expected a number")
        _refuse(name, problems)
        model = ModelConfig.model_validate(fields)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}, got {item['input']!r}" for item in error.errors()]
        raise CheckpointError(f"config.json of {name} is no model: {'; '.join(wrong)}") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"config.json of {name} is no model: {error}; expected what transformers saves") from error
    end = settings.get("eos_token_id")
    return ForeignModel(architecture, model, scale, end if isinstance(end, int) else None)


def _fields(architecture: Architecture, given: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Our fields from their settings; what has no counterpart is added to ``problems``."""
    fields = {ours: given[theirs] for ours, theirs in architecture.names.items()} | dict(architecture.fixed)
    fields |= _always_biased(architecture)
    if fields["mlp_size"] is None:
        fields["mlp_size"] = 4 * fields["hidden_size"]
    head = given.get("head_dim") or fields["hidden_size"] // fields["num_heads"]
    if head * fields["num_heads"] != fields["hidden_size"]:
        fields["head_size"] = head
        if not architecture.has_head_size:
            problems.append(f"head_dim is {head}, expected hidden_size / num_attention_heads")
    if fields.get("num_kv_heads") == fields["num_heads"]:
        fields["num_kv_heads"] = None
    if architecture.rotary != "none":
        fields |= _rotary_fields(architecture, given, head, problems)
    if architecture.has_windows:
        fields |= _window_fields(given, fields["num_layers"], problems)
    return fields


def _refuse(name: str, problems: list[str]) -> None:
    if problems:
        lines = "\n  - ".join(["", *problems])
        raise CheckpointError(f"this {name} model has what ours cannot express, so it would be another function:{lines}")


def _conflicts(architecture: Architecture, model: ModelConfig) -> Iterator[str]:
    """What of a model the architecture cannot express."""
    for key, value in architecture.fixed.items():
        if getattr(model, key) != value:
            yield f"model.{key} is {_shown(getattr(model, key))}, expected {_shown(value)}"
    if "num_kv_heads" not in architecture.names and model.kv_heads != model.num_heads:
        yield f"model.num_kv_heads is {model.kv_heads}, expected as many as model.num_heads {model.num_heads}"
    if model.hidden_size % model.num_heads or not (architecture.has_head_size or model.head_dim * model.num_heads == model.hidden_size):
        yield f"the head width is {model.head_dim}, expected model.hidden_size / model.num_heads = {model.hidden_size} / {model.num_heads}"
    windows = model.windows
    if architecture.has_windows:
        sizes = sorted({window for window in windows if window is not None})
        if len(sizes) > 1:
            yield f"model.window has the sizes {', '.join(map(str, sizes))}, expected one"
        if None in windows and model.position == "rotary" and model.rotary_layers == "all":
            yield "model.rotary_layers is all, expected windowed: full layers know no positions"
    else:
        if cut := sorted({window for window in windows if window is not None and window < model.sequence_length}):
            yield f"model.window is {', '.join(map(str, cut))}, expected full"
        if None in windows and model.position == "rotary" and model.rotary_layers == "windowed":
            yield "model.rotary_layers is windowed, expected all"
    if architecture.rotary == "whole" and model.position == "rotary" and model.rotary_dim != model.head_dim:
        yield f"model.rotary_size is {model.rotary_size}, expected null"


def _always_biased(architecture: Architecture) -> dict[str, bool]:
    filled = {member for tensor in architecture.tensors if tensor.is_filled for member in tensor.members}
    flags = {"attention_bias": "q_bias", "mlp_bias": "up_bias", "norm_bias": "norm_bias", "head_bias": "head_bias"}
    return {flag: True for flag, member in flags.items() if member in filled}


def _rotary_fields(architecture: Architecture, given: Mapping[str, Any], head: int, problems: list[str]) -> dict[str, Any]:
    if architecture.name == "gptj":
        size = given["rotary_dim"]
        if not isinstance(size, int):
            problems.append(f"rotary_dim is {size!r}, expected a number")
            return {}
        return {"rotary_size": None if size == head else size}
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or any(isinstance(value, Mapping) for value in rope.values()):
        problems.append(f"its rotary positions are {rope!r}, expected those of rope_type 'default', the same for all layers")
        return {}
    share = rope.get("partial_rotary_factor", given.get("partial_rotary_factor") or 1.0)
    size = int(head * share)
    if architecture.rotary == "whole" and size != head:
        problems.append(f"partial_rotary_factor is {share}, expected 1")
    base = rope.get("rope_theta", given.get("rope_theta") or _DEFAULT_BASE)
    return {"rotary_base": base, "rotary_size": None if size == head else size}


def _window_fields(given: Mapping[str, Any], num_layers: int, problems: list[str]) -> dict[str, Any]:
    kinds, size = given.get("layer_types"), given["sliding_window"]
    if kinds is None:
        every = given["sliding_window_pattern"]
        kinds = [_FULL if (layer + 1) % every == 0 else _WINDOWED for layer in range(num_layers)]
    if len(kinds) != num_layers or not set(kinds) <= {_WINDOWED, _FULL}:
        problems.append(f"layer_types is {kinds!r}, expected {_WINDOWED} or {_FULL} for each of {num_layers} layers")
        return {}
    if size is None and _WINDOWED in kinds:
        problems.append(f"sliding_window is null, but layer_types has {_WINDOWED}; expected a number of keys")
        return {}
    if _WINDOWED not in kinds:
        problems.append(f"layer_types has no {_WINDOWED}, so that no layer knows positions")
        return {}
    windows = tuple("full" if kind == _FULL else size for kind in kinds)
    pattern = next(windows[:p] for p in range(1, num_layers + 1) if windows == _repeated(windows[:p], num_layers))
    layers = "windowed" if "full" in pattern else "all"
    return {"window": pattern[0] if len(pattern) == 1 else pattern, "rotary_layers": layers}


def _repeated(pattern: tuple[Any, ...], length: int) -> tuple[Any, ...]:
    return tuple(pattern[index % len(pattern)] for index in range(length))


def _share(size: int, width: int) -> float:
    """The share of a head that turns, such that ``int(width * share)`` is ``size``, as transformers counts."""
    share = size / width
    return share if int(width * share) == size else math.nextafter(share, 1.0)


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
