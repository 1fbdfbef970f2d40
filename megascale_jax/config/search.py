"""Where configuration files are looked for: one resolver for a clone, an editable install and a wheel.

A *tree* is a folder that holds ``experiment/ model/ parallel/ system/ train/``. Trees are searched in order: the tree of
the given YAML file, ``./configs`` of the working directory, the tree that ships with the package. A wheel carries the
latter inside the package; a clone (and an editable install, which points at one) beside it. The first file found wins,
so a user's ``./configs/system/h100.yaml`` replaces ours.

Failure case: a name that no tree has raises ConfigError with the nearest known name and the folders that were searched.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

from megascale_jax.errors import ConfigError

EXPERIMENT = "experiment"
_PACKAGE = Path(__file__).resolve().parents[1]


def shipped_tree() -> Path:
    """The tree that came with the package. Raises ConfigError if the installation has none."""
    for candidate in (_PACKAGE / "configs", _PACKAGE.parent / "configs"):
        if (candidate / EXPERIMENT).is_dir():
            return candidate
    raise ConfigError(f"no configs folder beside or inside {_PACKAGE}; expected one with the package; install megascale_jax again")


def config_trees(own: Path | None = None) -> tuple[Path, ...]:
    """Existing trees in search order; ``own`` is the tree of a YAML file given by path."""
    candidates = [Path("configs").resolve(), shipped_tree()]
    if own is not None:
        candidates.insert(0, own.resolve())
    return tuple(tree for tree in dict.fromkeys(candidates) if tree.is_dir())


def tree_of(file: Path) -> Path:
    """The tree that a YAML file belongs to: the parent of its ``experiment`` folder, else its own folder."""
    folder = file.resolve().parent
    return folder.parent if folder.name == EXPERIMENT else folder


def find(group: str, name: str, trees: Sequence[Path], wanted_by: str) -> Path:
    """The file of ``name`` in ``group`` (``experiment``, ``model``, ...). Raises ConfigError naming the nearest known one."""
    known = names(group, trees)
    if name in known:
        return known[name]
    searched = ", ".join(str(tree / group) for tree in trees)
    raise ConfigError(f"{wanted_by}: no {group} named {name!r}{nearest(name, known)}; searched {searched}")


def names(group: str, trees: Sequence[Path]) -> dict[str, Path]:
    """Every name of a group with its file, sorted by name; the first tree wins."""
    found: dict[str, Path] = {}
    for tree in trees:
        for file in (tree / group).glob("*.yaml"):
            found.setdefault(file.stem, file)
    return dict(sorted(found.items()))


def nearest(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the nearest known word, or the list of all of them if none is near."""
    choices = list(known)
    close = get_close_matches(word, choices, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(choices)}" if choices else ""
