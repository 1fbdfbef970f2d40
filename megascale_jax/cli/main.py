"""The `megascale` command: parses, delegates, and turns our errors into one clear message and exit code 2."""

import faulthandler
import logging
import os
import sys
import warnings
from contextlib import suppress

import typer
from rich.console import Console
from rich.text import Text

from megascale_jax.cli import (
    analyze,
    audit,
    certs,
    checkpoint,
    compare,
    compile,
    config,
    data,
    diagnose,
    drill,
    drive,
    events,
    forecast,
    goodput,
    huggingface,
    job,
    keep,
    launch,
    network,
    place,
    plan,
    profile,
    report,
    sample,
    schedule,
    serve,
    simulate,
    trace,
    train,
    why,
)
from megascale_jax.errors import (
    BackendError,
    CheckpointError,
    CompileError,
    CorruptStateError,
    JournalError,
    LinkError,
    StorageError,
    UsageError,
)

app = typer.Typer(
    name="megascale",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="""Pre-train large language models with JAX on many GPUs, or try everything on a laptop.

    A first run, on two CPU cores and with no download: `megascale train quickstart`.

    An experiment names a model, a parallel layout, a system and a training recipe, each a small YAML file. Any field can
    be changed on the command line: `megascale train quickstart train.steps=600 model.num_layers=6`.
    """,
)
app.command("train")(train.train)
app.command("drive")(drive.drive)
app.command("execute")(drive.execute)
app.add_typer(job.app, name="job")
app.add_typer(launch.app, name="launch")
app.command("place")(place.place)
app.command("network")(network.network)
app.command("drill")(drill.drill)
app.command("sample")(sample.sample)
app.command("compare")(compare.compare)
app.command("trace")(trace.trace)
app.command("why")(why.why)
app.command("goodput")(goodput.goodput)
app.command("forecast")(forecast.forecast)
app.command("profile")(profile.profile)
app.command("serve")(serve.serve)
app.command("report")(report.report)
app.command("keep")(keep.keep)
app.command("schedule")(schedule.schedule)
app.command("analyze")(analyze.analyze)
app.command("simulate")(simulate.simulate)
app.command("plan")(plan.plan)
app.command("compile")(compile.compile_step)
app.command("diagnose")(diagnose.diagnose)
app.add_typer(data.app, name="data")
checkpoint.app.command("export")(huggingface.export_model)
checkpoint.app.command("import")(huggingface.import_model)
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(config.app, name="config")
app.add_typer(certs.app, name="certs")
app.add_typer(audit.app, name="audit")
app.add_typer(events.app, name="events")


def main() -> None:
    """Entry point. Exit code 2 for anything the user can mend, with what was got, expected, and what to do."""
    with suppress(AttributeError, ValueError, OSError):  # without a standard error there is nobody to tell
        faulthandler.enable()  # a library that aborts says where, of every thread
    for noisy in ("absl", "asyncio"):
        # Their tracebacks of a failed save would bury our own line about it.
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", module="orbax")
    try:
        app()
    except (UsageError, CheckpointError, StorageError, LinkError, BackendError) as error:
        Console(stderr=True, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), str(error)))
        sys.exit(2)
    except JournalError as error:
        Console(stderr=True, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), str(error)))
        sys.exit(os.EX_TEMPFAIL)
    except CompileError as error:
        Console(stderr=True, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), str(error)))
        sys.exit(1)
    except CorruptStateError as error:
        Console(stderr=True, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), str(error)))
        sys.exit(3)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        sys.exit(130)


if __name__ == "__main__":
    main()
