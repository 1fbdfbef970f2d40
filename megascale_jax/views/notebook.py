"""What a notebook shows: pictures, tables that say where each number is from, and results that benchmarks left in the repository.

Nothing here needs a notebook's own libraries: objects say how they look by the methods that Jupyter asks for. Failure case: outside a
checkout there are no results, and the error says so.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megascale_jax.errors import UsageError

Kind = Literal["published", "simulated", "measured", "estimate", "calibrated", "assumed", "derived", ""]
"""Of a column's numbers; an estimate is of a compiled schedule; empty: names and settings."""
_ROOT = Path(__file__).resolve().parents[2]


class Picture:
    """A picture as PNG bytes."""

    def __init__(self, png: bytes):
        self.png = png

    def _repr_png_(self) -> bytes:
        return self.png


def show(draw: Callable[..., None], *values: Any) -> Picture:
    """The picture that ``draw(*values, path)`` writes, as all pictures of this package are written. Raises what it raises."""
    with tempfile.TemporaryDirectory(prefix="picture-") as folder:
        path = Path(folder) / "picture.png"
        draw(*values, path)
        return Picture(path.read_bytes())


@dataclass(frozen=True)
class Table:
    """Rows of texts under columns of a name and a kind. Raises ValueError for a row of another length."""

    columns: Sequence[tuple[str, Kind]]
    rows: Sequence[Sequence[str]]

    def __post_init__(self) -> None:
        """Check the rows."""
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row has {len(row)} cells, expected {len(self.columns)}: {list(row)}")

    def _repr_markdown_(self) -> str:
        head = [f"{name} *{kind}*" if kind else name for name, kind in self.columns]
        lines = [head, ["---", *["--:"] * (len(head) - 1)], *self.rows]
        return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)

    def __repr__(self) -> str:
        return self._repr_markdown_()


def checkout(root: Path = _ROOT) -> Path:
    """The folder of the checkout that this package runs from. Raises UsageError where it runs from a wheel."""
    if not (root / "benchmarks").is_dir():
        raise UsageError(f"{root} has no benchmarks: this needs a checkout of the repository, and the package installed from it")
    return root


def result(name: str, root: Path = _ROOT) -> dict[str, Any]:
    """``benchmarks/results/NAME.json`` of the checkout. Raises UsageError where there is none, or where it does not say its kind."""
    path = checkout(root) / "benchmarks" / "results" / f"{name}.json"
    if not path.is_file():
        raise UsageError(f"{path} is not there; benchmarks/bench_{name}.py makes it: its first lines say how")
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or "kind" not in found:
        raise UsageError(f"{path} does not say whether it was measured or simulated; expected a benchmark's result with `kind`")
    return found
