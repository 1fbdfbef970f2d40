"""`megascale events`: what a run's processes did when; queries over it, and its compaction."""

from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from megascale_jax.cli.job import wide_console
from megascale_jax.errors import UsageError
from megascale_jax.observe.output import printable
from megascale_jax.observe.report import check_json_path, check_output_path, write_json

if TYPE_CHECKING:
    import pyarrow as pa

    from megascale_jax.observe.event_store import EventStore, FileReport


class _ShowsByDefault(TyperGroup):
    """`megascale events RUN` is `megascale events show RUN`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = ["show", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_ShowsByDefault,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="See what a run's processes did when: `megascale events RUN`, and with SQL `megascale events RUN --sql QUERY`.",
)

Run = Annotated[Path, typer.Argument(metavar="RUN", help="folder of the run", show_default=False)]


@app.command()
def show(
    run: Run,
    sql: Annotated[
        str | None,
        typer.Option(
            "--sql", metavar="QUERY", help="query over the view `events`, such as `select name, count(*) from events group by name`"
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="rows of a query's result that are printed")] = 100,
    json: Annotated[Path | None, typer.Option("--json", help="also write everything to this file", show_default=False)] = None,
) -> None:
    """List the processes of a run, their events, cut files and losses; or the result of a query, which can read nothing else."""
    check_json_path(json)
    from megascale_jax.observe.event_store import read_events

    console = wide_console()
    with read_events(run) as store:
        if sql is None:
            rows = _processes(store)
            _print(console, rows, len(rows))
        else:
            table = store.sql(sql)
            rows = _rows(table.slice(0, None if json is not None else limit))
            _print(console, rows[:limit], table.num_rows)
        for note in store.notes:
            console.print(Text(f"note: {_shown(note)}", style="yellow"))
    if json is not None:
        write_json(json, {"rows": _plain(rows), "notes": store.notes})


@app.command()
def compact(
    run: Run,
    keep_mb: Annotated[float | None, typer.Option("--keep-mb", min=0, help="limit, as train.events.keep_mb; default: the run's")] = None,
    keep_days: Annotated[
        float | None, typer.Option("--keep-days", min=0, help="limit, as train.events.keep_days; default: the run's")
    ] = None,
) -> None:
    """Turn what nobody writes any more into Parquet, and remove what is over the limits. A run does so by itself from time to time."""
    from megascale_jax.config.load import read_resolved
    from megascale_jax.observe.event_compaction import compact as compact_run
    from megascale_jax.observe.events import EVENTS_FOLDER

    if not (run / EVENTS_FOLDER).is_dir():
        raise UsageError(f"{run} has no folder {EVENTS_FOLDER}; expected the folder of a run, such as runs/quickstart")
    if (config := run / "config.yaml").is_file():
        limits = read_resolved(config).train.events
        keep_mb = limits.keep_mb if keep_mb is None else keep_mb
        keep_days = limits.keep_days if keep_days is None else keep_days
    done = compact_run(run, keep_mb=keep_mb, keep_days=keep_days)
    if done.is_busy:
        raise UsageError(f"another process compacts the events of {run}; try again once it has ended")
    console = Console(soft_wrap=True)
    console.print(
        Text(f"{done.segments} segments with {done.rows:,} events are Parquet now; {len(done.deleted)} files are over the limits, and gone")
    )
    for note in done.notes:
        console.print(Text(f"note: {_shown(note)}", style="yellow"))


@app.command()
def export(
    run: Run,
    otlp: Annotated[
        str, typer.Option("--otlp", metavar="FILE|URL", help="file, or a collector such as http://127.0.0.1:4318", show_default=False)
    ],
    steps: Annotated[str | None, typer.Option(help="steps a <= step < b, as a:b; either may be left out", show_default="all")] = None,
    ranks: Annotated[str | None, typer.Option(help="only these ranks, such as 0,8-15", show_default=False)] = None,
) -> None:
    """Give a run's events to OpenTelemetry: OTLP spans in JSON, to a file (a request a line) or to a collector over HTTP.

    A trace is one attempt of the run. Exporting again gives the same spans: identities are hashes of what they name. Headers for a
    collector, such as a token, come from OTEL_EXPORTER_OTLP_HEADERS. Exit code 2: the collector does not take them.
    """
    from megascale_jax.cli.analyze import parse_steps
    from megascale_jax.observe.event_store import read_events
    from megascale_jax.observe.otlp import endpoint_of, headers_from, send, write_file
    from megascale_jax.views.ranks import parse_numbers

    first, end = parse_steps(steps)
    window = None if first is None and end is None else range(first or 0, (1 << 31) - 1 if end is None else end)
    is_remote = "://" in otlp
    headers = headers_from() if is_remote else {}
    if is_remote:
        endpoint_of(otlp)
    else:
        check_output_path(Path(otlp), "--otlp")
    with read_events(run, ranks=parse_numbers(ranks, "--ranks"), steps=window) as store:
        done = send(store, otlp, headers) if is_remote else write_file(store, Path(otlp))
        notes = store.notes
    console = Console(soft_wrap=True)
    console.print(Text(_shown(f"{done.spans:,} spans in {done.requests:,} requests: {otlp.rpartition('@')[2]}")))
    if done.rejected:
        console.print(Text(_shown(f"{done.rejected:,} spans were not taken: {done.note or 'without a reason'}"), style="yellow"))
    for note in notes:
        console.print(Text(f"note: {_shown(note)}", style="yellow"))


def _processes(store: "EventStore") -> list[dict[str, Any]]:
    """One row a process, in order of role and rank."""
    grouped: dict[str, list[FileReport]] = {}
    for file in store.files:
        grouped.setdefault(file.process, []).append(file)
    rows: list[dict[str, Any]] = []
    for process, files in sorted(grouped.items()):
        facts = next((file.facts for file in files if file.facts is not None), None)
        summaries = [file.summary for file in files if file.summary.rows]
        rows.append(
            {
                "process": process,
                "host": facts.host if facts is not None else "-",
                "attempt": facts.attempt if facts is not None else "-",
                "from": _time(min((one.first_unix_ns for one in summaries), default=0)),
                "to": _time(max((one.last_unix_ns for one in summaries), default=0)),
                "events": sum(one.rows for one in summaries),
                "lost": sum(one.dropped for one in summaries),
                "files": len(files),
                "MB": round(sum(file.num_bytes for file in files) / 1e6, 2),
                "state": _state(files),
            }
        )
    return rows


def _state(files: "list[FileReport]") -> str:
    """Of a process: it writes, that cannot be told from here, or its files have all that it wrote, or not."""
    writers = {file.writer for file in files}
    if "alive" in writers:
        return "writes"
    if "unknown" in writers:
        return "unknown"
    return "cut" if any(file.summary.note for file in files) else "whole"


def _rows(table: "pa.Table") -> list[dict[str, Any]]:
    """The rows of a query's result. Raises UsageError when two columns have one name."""
    import pyarrow as pa
    import pyarrow.compute as pc

    twice = sorted({name for name in table.column_names if table.column_names.count(name) > 1})
    if twice:
        raise UsageError(f"columns of one name in the query's result: {', '.join(twice)}; give each its own with `as`")
    for number, field in enumerate(table.schema):
        if pa.types.is_timestamp(field.type) and field.type.unit == "ns":  # of which Python's own times are not capable
            column = pc.cast(table.column(number), pa.timestamp("us", field.type.tz), safe=False)
            table = table.set_column(number, field.name, column)
    return table.to_pylist()


def _plain(value: Any) -> Any:
    """A value of a query's result in JSON's types: times as ISO 8601, durations as seconds, bytes as hexadecimal digits."""
    match value:
        case Decimal():
            return int(value) if value == value.to_integral_value() else float(value)
        case datetime() if value.tzinfo is not None:
            return value.astimezone(UTC).isoformat()
        case datetime() | date() | time():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case bytes():
            return value.hex()
        case dict():
            return {str(name): _plain(item) for name, item in value.items()}
        case tuple() if hasattr(value, "nanoseconds"):  # an interval, whose months and days are no fixed number of seconds
            return {name: getattr(value, name) for name in ("months", "days", "nanoseconds")}
        case list() | tuple():
            return [_plain(item) for item in value]
    return value


def _time(unix_ns: int) -> str:
    try:
        return datetime.fromtimestamp(unix_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S") if unix_ns else "-"
    except (OverflowError, ValueError, OSError):
        return "-"


def _print(console: Console, rows: list[dict[str, Any]], number: int) -> None:
    if rows:
        table = Table()
        for name in rows[0]:
            table.add_column(Text(_shown(name)))
        for row in rows:
            table.add_row(*(Text(_shown(value)) for value in row.values()))
        console.print(table)
    if number > len(rows):
        console.print(Text(f"{len(rows):,} of {number:,} rows; --limit shows more, --json writes all"))
    elif not number:
        console.print("no rows")


def _shown(value: object) -> str:
    """A value as text: names and texts come from logs too, so what a terminal would obey is written out."""
    text = "-" if value is None else f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return printable(text)
