"""`megascale compare`: two runs' losses over each other, and a verdict that a script can act on.

Exit code 0: B is equivalent or better; 1: worse; 2: incomparable, or a request that cannot be carried out. Failure case: a report
or a picture that could not be written is found before the runs are read.
"""

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from megascale_jax.errors import UsageError
from megascale_jax.observe.report import check_json_path, check_output_path, write_json
from megascale_jax.views.compare import Against, Comparison, Measure, Verdict, compare_runs
from megascale_jax.views.curve import read_run
from megascale_jax.views.overlay import plot_comparison

EXIT_CODES: dict[Verdict, int] = {"equivalent": 0, "better": 0, "worse": 1, "incomparable": 2}
_STYLES: dict[Verdict, str] = {"equivalent": "green", "better": "green", "worse": "red", "incomparable": "yellow"}
_PICTURE_ENDINGS = (".png", ".svg", ".pdf")


def compare(
    run_a: Annotated[Path, typer.Argument(help="folder of the control run (A)", show_default=False)],
    run_b: Annotated[Path, typer.Argument(help="folder of the candidate run (B)", show_default=False)],
    tolerance: Annotated[float, typer.Option(help="largest relative difference that still counts as equal")] = 0.01,
    against: Annotated[Against, typer.Option(help="x axis: consumed tokens (fair for different batch sizes) or steps")] = "tokens",
    output: Annotated[Path, typer.Option(help="picture of both losses (.png, .svg or .pdf)")] = Path("compare.png"),
    json: Annotated[Path | None, typer.Option("--json", help="also write every number to this file", show_default=False)] = None,
) -> None:
    """Overlay the losses of two runs and judge B against A.

    Exit code 0: equivalent or better; 1: worse; 2: incomparable.
    """
    if not (math.isfinite(tolerance) and 0 <= tolerance < 1):
        raise UsageError(f"--tolerance {tolerance:g}: expected a fraction in [0, 1), such as 0.01 for one per cent")
    if output.suffix.lower() not in _PICTURE_ENDINGS:
        raise UsageError(f"--output {output}: expected a name that ends in one of {', '.join(_PICTURE_ENDINGS)}")
    check_output_path(output, "--output")
    check_json_path(json)
    a, b = read_run(run_a), read_run(run_b)
    comparison = compare_runs(a, b, tolerance=tolerance, against=against)
    plot_comparison(comparison, a, b, output)
    if json is not None:
        write_json(json, comparison)
    print_comparison(comparison, Console())
    typer.echo(f"Picture: {output}")
    raise typer.Exit(EXIT_CODES[comparison.verdict])


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print config differences, measures, the rule and the verdict."""
    console.print(f"A (control)    {escape(comparison.run_a)}\nB (candidate)  {escape(comparison.run_b)}\n", highlight=False)
    console.print(_config_table(comparison))
    console.print(_measure_table(comparison))
    console.print(f"\nRule: {comparison.rule}", highlight=False)
    for note in comparison.notes:
        console.print(f"Note: {escape(note)}", highlight=False)
    style = _STYLES[comparison.verdict]
    console.print(f"\nVerdict: [bold {style}]{comparison.verdict}[/]", highlight=False)
    for reason in comparison.reasons:
        console.print(Padding(escape(reason), (0, 0, 0, 2), expand=False), highlight=False)


def _config_table(comparison: Comparison) -> Table | str:
    if not comparison.config_differences:
        return "The configs are the same.\n"
    table = Table("config field", "A", "B", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for difference in comparison.config_differences:
        table.add_row(escape(difference.field), _value(difference.a), _value(difference.b))
    table.add_row()
    return table


def _measure_table(comparison: Comparison) -> Table:
    table = Table("measure", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("A", "B", "(B - A) / A"):
        table.add_column(name, justify="right")
    rates = [None if s is None else s.tokens_per_s for s in (comparison.summary_a, comparison.summary_b)]
    change = None if rates[0] is None or rates[1] is None else rates[1] / rates[0] - 1
    for label, measure in (
        ("held-out loss, final", comparison.validation),
        ("training loss, last quarter", comparison.train),
        ("tokens/s (not judged)", Measure("tokens/s", rates[0], rates[1], change)),
    ):
        digits = 0 if measure.name == "tokens/s" else 4
        numbers = ["-" if x is None else f"{x:,.{digits}f}" for x in (measure.a, measure.b)]
        table.add_row(label, *numbers, "-" if measure.difference is None else f"{measure.difference:+.2%}")
    return table


def _value(value: Any) -> str:
    return "-" if value is None else escape(str(value))
