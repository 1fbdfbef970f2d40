"""Published rows beside simulated ones, and whether a target was met. No JAX."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import Any, Literal

Role = Literal["calibration", "held-out"]
Unit = Literal["s", "MFU %", "points", "TFLOP/s"]


@dataclass(frozen=True)
class Row:
    """One published number and what was simulated for it. ``beside``: the same row simulated under other assumptions, by their name."""

    name: str
    unit: Unit
    published: float
    predicted: float
    role: Role = "held-out"
    beside: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def error(self) -> float:
        """A fraction for times and rates, a difference in points for MFU."""
        return self.error_of(self.predicted)

    def error_of(self, predicted: float) -> float:
        """The same of another prediction."""
        return predicted - self.published if self.unit in ("MFU %", "points") else predicted / self.published - 1


@dataclass(frozen=True)
class Score:
    """A published table or figure. ``misses``: what of the target was not met, in words; ``notes``: what a reader has to know."""

    name: str
    title: str
    rows: tuple[Row, ...]
    target: str
    misses: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def is_met(self) -> bool:
        """Whether the whole target was."""
        return not self.misses

    @property
    def means(self) -> dict[str, tuple[float, float]]:
        """Mean and largest absolute error of the held-out rows, by assumptions; the reference is ``simulated``."""
        held = [row for row in self.rows if row.role == "held-out"]
        found = {"simulated": mean_and_worst([row.error for row in held])}
        for name in self.rows[0].beside:
            found[name] = mean_and_worst([row.error_of(row.beside[name]) for row in held])
        return found

    def as_data(self) -> dict[str, Any]:
        """For ``--json``."""
        rows = [asdict(row) | {"error": row.error} for row in self.rows]
        means = {name: {"mean": values[0], "max": values[1]} for name, values in self.means.items()}
        return {
            "name": self.name,
            "title": self.title,
            "rows": rows,
            "means": means,
            "target": self.target,
            "met": self.is_met,
            "misses": list(self.misses),
            "notes": list(self.notes),
        }


def mean_and_worst(errors: Sequence[float]) -> tuple[float, float]:
    """Mean and largest absolute error."""
    sizes = [abs(error) for error in errors]
    return mean(sizes), max(sizes)


def misses_of(errors: Sequence[float], most_mean: float, most: float, unit: str, scale: float = 1.0) -> list[str]:
    """Lines for a mean and a largest error above their limits."""
    found_mean, found_most = (scale * value for value in mean_and_worst(errors))
    lines: list[str] = []
    if found_mean > most_mean:
        lines.append(f"mean error {found_mean:.2f} {unit}, target {most_mean:g}")
    if found_most > most:
        lines.append(f"largest error {found_most:.2f} {unit}, target {most:g}")
    return lines
