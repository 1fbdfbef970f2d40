"""What a reader is told when a value or a key does not fit the schema.

Every text is derived from the schema: the expectation from the field's type and bounds, the explanation from its
description. So a new field has good error messages without a word written here.

Failure case: pydantic reports one problem per branch of a union; they are folded into one line per field, which names
all branches.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

_PLAIN = {int: "an integer", float: "a number", bool: "true or false", str: "a string", NoneType: "null"}
_BOUNDS = {Ge: (">=", "ge"), Gt: (">", "gt"), Le: ("<=", "le"), Lt: ("<", "lt")}


def section_type(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, perhaps beside null, or None for a plain value."""
    if get_origin(annotation) in (Union, UnionType):
        kinds = [argument for argument in get_args(annotation) if argument is not NoneType]
        annotation = kinds[0] if len(kinds) == 1 else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def named_section_type(annotation: Any) -> type[BaseModel] | None:
    """The section that each value of a mapping by free names holds, or None for any other field."""
    return section_type(get_args(annotation)[1]) if get_origin(annotation) is dict else None


def dotted_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Every leaf of a section as a full dotted key."""
    keys: list[str] = []
    for name, field in section.model_fields.items():
        inner = section_type(field.annotation)
        keys += dotted_keys(inner, f"{prefix}{name}.") if inner else [f"{prefix}{name}"]
    return keys


def unknown_keys(root: type[BaseModel], data: Mapping[str, object]) -> list[str]:
    """One line for each key of ``data`` that ``root`` and its sections do not have, with the nearest key that exists."""
    return _unknown_keys(root, root, data, "")


def explain(error: ValidationError, root: type[BaseModel], data: Mapping[str, object]) -> list[str]:
    """One line per field that ``error`` is about: ``train.steps: got 'ten', expected an integer >= 1 (optimizer steps in all)``.

    ``data`` is what was validated against ``root``.
    """
    lines: dict[str, str] = {}
    for problem in error.errors():
        path, field = _field_at(root, problem["loc"])
        key = ".".join(path)
        if field is None or problem["type"] == "value_error":  # a rule of a whole section has words of its own
            lines.setdefault(key, f"{key}: {problem['msg'].removeprefix('Value error, ')}")
            continue
        found, value = _value_at(data, path)
        got = f"got {_shown(value)}" if found else "missing"
        meaning = f" ({field.description})" if field.description else ""
        lines.setdefault(key, f"{key}: {got}, expected {expectation(field.annotation, field.metadata)}{meaning}")
    return list(lines.values())


def expectation(annotation: Any, metadata: Iterable[object] = ()) -> str:
    """What a type accepts, in words: ``an integer >= 1 or null``."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return expectation(arguments[0], [*_flat(arguments[1:]), *metadata])
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(expectation(argument, metadata) for argument in arguments))
    if origin is Literal:
        return " or ".join(str(argument) for argument in arguments)
    if origin is tuple:
        return f"a list of ({expectation(arguments[0])})"
    if section_type(annotation) or origin is dict:
        return "a mapping"
    words = _PLAIN.get(annotation, str(annotation))
    if annotation not in (int, float):
        return words
    kinds = [(item, sign, name) for item in _flat(metadata) for kind, (sign, name) in _BOUNDS.items() if isinstance(item, kind)]
    return " ".join([words, " and ".join(f"{sign} {getattr(item, name):g}" for item, sign, name in kinds)]).rstrip()


def _unknown_keys(root: type[BaseModel], section: type[BaseModel], data: Mapping[str, object], prefix: str) -> list[str]:
    problems: list[str] = []
    for key, value in data.items():
        field = section.model_fields.get(key)
        if field is None:
            problems.append(f"unknown key {prefix}{key}{_nearest_key(root, section, str(key), prefix)}")
        elif (inner := section_type(field.annotation)) and isinstance(value, Mapping):
            problems += _unknown_keys(root, inner, cast("Mapping[str, object]", value), f"{prefix}{key}.")
        elif (inner := named_section_type(field.annotation)) and isinstance(value, Mapping):
            for name, one in cast("Mapping[str, object]", value).items():
                if isinstance(one, Mapping):
                    problems += _unknown_keys(root, inner, cast("Mapping[str, object]", one), f"{prefix}{key}.{name}.")
    return problems


def _nearest_key(root: type[BaseModel], section: type[BaseModel], key: str, prefix: str) -> str:
    """The nearest key of the same section, else the nearest leaf below it, else one anywhere; else what the section has."""
    leaves = sorted(dotted_keys(root), key=lambda leaf: not leaf.startswith(prefix))
    candidates = {name: f"{prefix}{name}" for name in section.model_fields}
    for leaf in leaves:
        candidates.setdefault(leaf.rpartition(".")[2], leaf)
    for known in (list(section.model_fields), list(candidates)):
        if close := get_close_matches(key, known, n=1):
            return f"; did you mean {candidates[close[0]]}?"
    return f"; known: {', '.join(f'{prefix}{name}' for name in section.model_fields)}"


def _flat(metadata: Iterable[object]) -> list[object]:
    flat: list[object] = []
    for item in metadata:
        flat += item.metadata if isinstance(item, FieldInfo) else [item]
    return flat


def _field_at(root: type[BaseModel], location: tuple[int | str, ...]) -> tuple[list[str], FieldInfo | None]:
    """The longest part of ``location`` that names fields (union branches and list indices follow it), and the last field."""
    path: list[str] = []
    section: type[BaseModel] | None = root
    named: type[BaseModel] | None = None
    field: FieldInfo | None = None
    for part in location:
        if named is not None:  # the name of one of them, whatever it is
            path, section, named = [*path, str(part)], named, None
            continue
        following = section.model_fields.get(str(part)) if section else None
        if following is None:
            break
        path, field, section = [*path, str(part)], following, section_type(following.annotation)
        named = named_section_type(following.annotation)
    return path, field


def _value_at(data: Mapping[str, object], path: Iterable[str]) -> tuple[bool, object]:
    value: object = data
    for part in path:
        section: Mapping[str, object] = cast(Any, value) if isinstance(value, Mapping) else {}
        if part not in section:
            return False, None
        value = section[part]
    return True, value


def _shown(value: object) -> str:
    """A value as it would be written in YAML, short."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
