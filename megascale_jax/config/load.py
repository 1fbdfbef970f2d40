"""From YAML files and command-line overrides to one frozen, checked `Experiment`, and back.

    experiment/NAME.yaml   names one file of each group (``model: gpt-1b``), plus ``override:`` merged on top
    GROUP/NAME.yaml        one section; ``base: OTHER`` inherits from another file of the group

An experiment may also hold a section itself, so what `megascale config show` prints is an experiment, too.

Order, later wins: group files (base first), the experiment's ``override:``, then the command line. There, ``system=h200``
takes another file of a group, ``train.steps=300`` sets one field. OmegaConf reads and merges, pydantic types, `checks.py`
judges combinations. Nothing is written and no device is touched.

Failure case: all problems of one kind are collected into one ConfigError; unknown keys are found before types, types
before combinations.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from yaml import YAMLError

from megascale_jax.config import search
from megascale_jax.config.checks import check
from megascale_jax.config.cluster import ClusterConfig
from megascale_jax.config.difference import Difference, differences
from megascale_jax.config.explain import explain, unknown_keys
from megascale_jax.config.schema import Experiment, ModelConfig, ParallelConfig, SystemConfig, TrainConfig
from megascale_jax.errors import ConfigError

SECTIONS: Mapping[str, type[BaseModel]] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "system": SystemConfig,
    "train": TrainConfig,
    "cluster": ClusterConfig,
}
_OPTIONAL = frozenset({"cluster"})
"""Sections that an experiment need not name: all their fields have defaults."""
_OVERRIDE = "override"
_DOTTED_KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)

type Tree = dict[str, Any]


__all__ = [
    "Difference",
    "differences",
    "dump_yaml",
    "is_experiment",
    "list_experiments",
    "load_document",
    "load_experiment",
    "load_system",
    "read_resolved",
    "with_overrides",
]


def load_experiment(name_or_path: str, overrides: Sequence[str] = (), *, checked: bool = True) -> Experiment:
    """Compose, type and check one experiment, given by name (``quickstart``) or as the path of a YAML file.

    ``checked`` false leaves out the rules that join several fields, for a plan that is not complete yet. Raises ConfigError,
    with every problem of the first stage that finds any.
    """
    is_path = name_or_path.endswith((".yaml", ".yml")) or "/" in name_or_path
    given = Path(name_or_path) if is_path else None
    trees = search.config_trees(search.tree_of(given) if given else None)
    file = given or search.find(search.EXPERIMENT, name_or_path, trees, "command line")
    groups, assignments = _split_overrides(overrides)
    data = _compose(file, trees, groups)
    for key, text in assignments:
        data = _merge(data, _assignment(key, text))
    experiment = _typed(data, f"experiment {file.stem}", _sources(file, trees, groups))
    if checked:
        check(experiment)
    return experiment


def is_experiment(name_or_path: str) -> bool:
    """Whether `load_experiment` would look for it: the path of a YAML file, or a known name, or one that is no system's either."""
    trees = search.config_trees()
    is_path = name_or_path.endswith((".yaml", ".yml")) or "/" in name_or_path
    return is_path or name_or_path in search.names(search.EXPERIMENT, trees) or name_or_path not in search.names("system", trees)


def load_system(name: str, overrides: Sequence[str] = ()) -> SystemConfig:
    """A system by name, without an experiment around it; ``overrides`` as an experiment's, ``system.memory_gib=79``. Raises ConfigError."""
    if others := [one for one in overrides if not one.startswith("system.")]:
        raise ConfigError(f"command line: got {others[0]}, but {name} is a system; expected keys such as system.memory_gib")
    return load_document("system", name, SystemConfig, [one.removeprefix("system.") for one in overrides])


def with_overrides(experiment: Experiment, overrides: Sequence[str]) -> Experiment:
    """A resolved experiment with some fields changed (``a.b=c``), typed and checked again. Raises ConfigError."""
    data: Tree = experiment.model_dump(mode="json")
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not _DOTTED_KEY.fullmatch(key) or key in SECTIONS:
            raise ConfigError(f"command line: got {override!r}, expected key=value such as parallel.data=4")
        data = _merge(data, _assignment(key, text))
    changed = _typed(data, f"experiment {experiment.name}")
    check(changed)
    return changed


def load_document[Document: BaseModel](group: str, name_or_path: str, kind: type[Document], overrides: Sequence[str] = ()) -> Document:
    """One file of a group that is no part of an experiment, given by name or as the path of a YAML file; ``base:`` works as elsewhere.

    ``overrides``: ``field=value`` or ``field.inner=value``, without the group's name. Raises ConfigError that names the file and the field.
    """
    is_path = name_or_path.endswith((".yaml", ".yml")) or "/" in name_or_path
    given = Path(name_or_path) if is_path else None
    trees = search.config_trees(given.resolve().parent.parent if given else None)
    file = given or search.find(group, name_or_path, trees, "command line")
    data, chain = _read(file), [file]
    while (base := data.pop("base", None)) is not None:
        below = search.find(group, str(base), trees, str(chain[-1]))
        if below in chain:
            raise ConfigError(f"{chain[-1]}: base goes in a circle by {below}; let one of them stand alone")
        chain.append(below)
        data = _merge(_read(below), data)
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or key.partition(".")[0] not in kind.model_fields:
            nearest = search.nearest(key, kind.model_fields)
            raise ConfigError(f"command line: got {group}.{override!r}, expected {group}.FIELD=VALUE{nearest}")
        data = _merge(data, cast(Tree, OmegaConf.to_container(OmegaConf.from_dotlist([override]))))
    _refuse(unknown_keys(kind, data), str(file))
    try:
        return kind.model_validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        _refuse(explain(error, kind, data), str(file))
        raise


def list_experiments() -> dict[str, Path]:
    """Name and file of every experiment in ``./configs`` and in the shipped tree, sorted by name."""
    return search.names(search.EXPERIMENT, search.config_trees())


def dump_yaml(experiment: Experiment) -> str:
    """The resolved experiment as YAML, every field written out; `read_resolved` reads it back unchanged."""
    return OmegaConf.to_yaml(OmegaConf.create(experiment.model_dump(mode="json")))


def read_resolved(path: Path) -> Experiment:
    """Read what `dump_yaml` wrote. Raises ConfigError if the file is missing, damaged or of another version.

    Combinations are not judged again: the experiment was checked when it was first loaded.
    """
    data = _read(path, resolve=False)
    _refuse(unknown_keys(Experiment, data), str(path))
    return _typed(data, str(path))


def _compose(file: Path, trees: Sequence[Path], groups: Mapping[str, str]) -> Tree:
    content = _read(file)
    known = ("name", *SECTIONS, _OVERRIDE)
    _refuse([f"unknown key {key}{search.nearest(key, known)}" for key in content if key not in known], str(file))
    data: Tree = {"name": content.get("name", file.stem)}
    for section in SECTIONS:
        if section in groups:
            data[section] = _named(section, groups[section], trees, "command line", ())
        else:
            default: Tree | None = {} if section in _OPTIONAL else None
            data[section] = _section(section, content.get(section, default), trees, str(file))
    override: object = content.get(_OVERRIDE) or {}
    if not isinstance(override, dict):
        raise ConfigError(f"{file}: {_OVERRIDE}: got {override!r}, expected a mapping of {', '.join(SECTIONS)}")
    override = cast(Tree, override)
    _refuse(_unknown(override), str(file))
    return _merge(data, override)


def _sources(file: Path, trees: Sequence[Path], groups: Mapping[str, str]) -> dict[str, Path]:
    """The file that each section was read from, where it has one of its own; ``base`` files are those that it names."""
    chosen = {**_read(file), **groups}
    named = [section for section in SECTIONS if isinstance(chosen.get(section), str)]
    return {section: search.find(section, chosen[section], trees, str(file)) for section in named}


def _section(section: str, value: object, trees: Sequence[Path], wanted_by: str, chain: tuple[str, ...] = ()) -> Tree:
    """One section from the name of its file or from the mapping itself, merged onto its ``base``.

    ``chain`` holds the names that led here.
    """
    if isinstance(value, str):
        return _named(section, value, trees, wanted_by, chain)
    if not isinstance(value, dict):
        got = "missing" if value is None else f"got {value!r}"
        known = ", ".join(search.names(section, trees))
        raise ConfigError(f"{wanted_by}: {section}: {got}, expected the name of a {section} file ({known}) or a mapping")
    content = cast(Tree, value).copy()
    base = content.pop("base", None)
    _refuse(_unknown({section: content}), wanted_by)
    return content if base is None else _merge(_section(section, base, trees, f"{wanted_by}: base", chain), content)


def _named(section: str, name: str, trees: Sequence[Path], wanted_by: str, chain: tuple[str, ...]) -> Tree:
    if name in chain:
        raise ConfigError(f"{wanted_by}: base goes in a circle: {' -> '.join((*chain, name))}; let one of them stand alone")
    file = search.find(section, name, trees, wanted_by)
    return _section(section, _read(file), trees, str(file), (*chain, name))


def _split_overrides(overrides: Sequence[str]) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Group switches by section, and ``(dotted key, text)`` of every other override, in order."""
    groups: dict[str, str] = {}
    assignments: list[tuple[str, str]] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not _DOTTED_KEY.fullmatch(key):
            raise ConfigError(f"command line: got {override!r}, expected key=value such as train.steps=300 or system=h200")
        if key in SECTIONS:
            groups[key] = text
        else:
            assignments.append((key, text))
    return groups, assignments


def _assignment(key: str, text: str) -> Tree:
    """One override as nested mappings, its value read as YAML."""
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"{key}={text}"]), resolve=True)
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"command line: {key}={text} is no YAML value ({_first_line(error)}); quote it if it is text") from error
    nested = cast(Tree, value)
    _refuse(_unknown(nested), "command line")
    return nested


def _unknown(data: Tree) -> list[str]:
    problems = unknown_keys(Experiment, {key: value for key, value in data.items() if key != "name"})
    return [*problems, "name cannot be set here; it is the file's own name, or its `name:`"] if "name" in data else problems


def _read(file: Path, resolve: bool = True) -> Tree:
    try:
        content: object = OmegaConf.to_container(OmegaConf.load(file), resolve=resolve)
    except FileNotFoundError as error:
        raise ConfigError(f"{file} does not exist; give an existing YAML file, or a name that `megascale config list` shows") from error
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{file} cannot be read as YAML: {_first_line(error)}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in cast("dict[object, object]", content)):
        raise ConfigError(f"{file} holds no mapping with text keys; expected lines such as `num_layers: 24`")
    return cast(Tree, content)


def _merge(below: Tree, above: Tree) -> Tree:
    merged = OmegaConf.merge(OmegaConf.create(below), OmegaConf.create(above))
    return cast(Tree, OmegaConf.to_container(merged))


def _typed(data: Tree, origin: str, sources: Mapping[str, Path] | None = None) -> Experiment:
    # JSON is pydantic's strict mode in which lists become tuples; YAML has no tuples
    try:
        return Experiment.model_validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        lines = explain(error, Experiment, data)
        files = sources or {}
        _refuse([f"{line}; file {files[section]}" if (section := line.partition(".")[0]) in files else line for line in lines], origin)
        raise


def _refuse(problems: Sequence[str], origin: str) -> None:
    if problems:
        raise ConfigError(f"{origin}: {problems[0]}" if len(problems) == 1 else "\n  - ".join([f"{origin}:", *problems]))


def _first_line(error: Exception) -> str:
    """The part of an error that names its cause and its place."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines else type(error).__name__
