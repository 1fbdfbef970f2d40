"""How scores of the simulator look in a terminal."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megascale_jax.sim.validation.ladder import Rung
from megascale_jax.sim.validation.score import Row, Score


def show_score(console: Console, score: Score) -> None:
    """The table, its means, its target and its notes."""
    table = Table(title=score.title, title_justify="left", caption_justify="left")
    table.add_column("")
    others = list(score.rows[0].beside)
    for column in ("unit", "published", "simulated", "error", *others):
        table.add_column(column, justify="right")
    for row in score.rows:
        name = row.name if row.role == "held-out" else f"{row.name} (calibrated on)"
        values = [_error(row, row.error), *(_error(row, row.error_of(row.beside[other])) for other in others)]
        table.add_row(name, row.unit, f"{row.published:,.4g}", f"{row.predicted:,.4g}", *values)
    table.add_section()
    for label, index in (("mean error, held out", 0), ("largest", 1)):
        table.add_row(label, "", "", "", *(_size(score.rows[0], found[index]) for found in score.means.values()))
    console.print(table)
    verdict = "met" if score.is_met else f"missed: {'; '.join(score.misses)}"
    console.print(Text(f"target: {score.target}: {verdict}", style="green" if score.is_met else "red"), soft_wrap=True)
    for note in score.notes:
        console.print(Text(f"note: {note}"), soft_wrap=True)


def show_ladder(console: Console, rungs: Mapping[int, Sequence[Rung]]) -> None:
    """Held-out errors of Table 2, mean and largest, for each layer of detail."""
    table = Table(title="Table 2, held-out rows: what each layer of detail buys, mean / largest error in %", title_justify="left")
    table.add_column("model")
    table.add_column("fitted")
    for size in rungs:
        table.add_column(f"micro-batch {size}", justify="right")
    for same in zip(*rungs.values(), strict=True):
        table.add_row(same[0].name, same[0].fitted, *(f"{100 * rung.mean:.1f} / {100 * rung.worst:.1f}" for rung in same))
    console.print(table)


def _error(row: Row, error: float) -> str:
    return f"{error:+.1f}" if row.unit in ("MFU %", "points") else f"{100 * error:+.1f} %"


def _size(row: Row, error: float) -> str:
    return f"{error:.2f}" if row.unit in ("MFU %", "points") else f"{100 * error:.2f} %"
