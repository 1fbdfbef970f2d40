"""`megascale profile`: a profile of some steps of a run that is at work, on some of its ranks."""

import shutil
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from megascale_jax.cli.analyze import parse_steps
from megascale_jax.errors import UsageError
from megascale_jax.observe.output import printable
from megascale_jax.observe.profile_request import (
    AT_WORK,
    MOST_RANKS,
    MOST_STEPS,
    MOST_WAIT_S,
    NEWS_S,
    Answer,
    Place,
    Request,
    ask,
    look_s,
)

SILENT_S = 30.0
"""For so long a rank may say nothing, looks for requests not counted, before it is taken to be gone."""
_LOOK_S, _MARGIN_S, _WORDS_S = 0.2, 30.0, 30.0


def profile(
    run: Annotated[Path, typer.Argument(help="folder of a run that is at work", show_default=False)],
    steps: Annotated[str, typer.Option(help=f"steps a <= step < b, as a:b, at most {MOST_STEPS}, all ahead", show_default=False)],
    ranks: Annotated[str, typer.Option(help=f"these ranks, such as 0,8-15, at most {MOST_RANKS}")] = "0",
    output: Annotated[
        Path | None, typer.Option(help="also copy the profile into this new folder; default: only in the run's", show_default=False)
    ] = None,
    limit: Annotated[float, typer.Option(help="seconds to wait for the steps and the profile", min=1.0, max=MOST_WAIT_S)] = 3600.0,
) -> None:
    """Take a profile of a run without stopping it: kernels, transfers and host threads between two steps, by jax.profiler.

    The request is a file in the run's folder. Ranks look for one each second, and begin and end by their own count of steps; the training
    is not changed. A step is slower while it is profiled. Ctrl-C takes the request back.

    Then: `megascale analyze PROFILE` says what is computing, what is communication and how much of it is hidden; XProf and TensorBoard show
    it all. Exit code 1: some ranks gave no profile; 2: none did, with the reason, such as steps that are past.
    """
    from megascale_jax.views.ranks import parse_numbers

    first, end = parse_steps(steps)
    wanted = sorted(parse_numbers(ranks, "--ranks") or {0})
    if first is None or end is None or first < 1 or end - first < 1:
        raise UsageError(f"--steps {steps}: expected a:b with a from 1 on and b above it, such as 1000:1003 for the steps 1000 to 1002")
    if end - first > MOST_STEPS:
        raise UsageError(
            f"--steps {steps}: {end - first} steps, at most {MOST_STEPS}: XLA's profiler keeps no more kernels; two are enough"
        )
    if len(wanted) > MOST_RANKS:
        raise UsageError(f"--ranks {ranks}: {len(wanted)} ranks, at most {MOST_RANKS}: each profile is large; choose some")
    if output is not None and (output.exists() or not output.resolve().parent.is_dir()):
        raise UsageError(f"--output {output}: expected the name of a new folder in one that is there")
    console = Console(soft_wrap=True)
    request = Request(first=first, end=end, ranks=tuple(wanted), expires_unix_s=time.time() + limit + _MARGIN_S)
    place = ask(run, request)
    try:
        answers = _wait(place, request, console, limit)
    finally:
        place.withdraw()
    _report(place, answers, output, console)


def _wait(place: Place, request: Request, console: Console, limit: float) -> dict[int, Answer]:
    """Until every rank has said its last word. Raises UsageError when the time is over, or a rank says nothing."""
    began, said = time.monotonic(), dict[int, tuple[Answer, float]]()
    shown, shown_at = ("",), 0.0
    while True:
        for rank in request.ranks:
            found = place.answer(rank)
            if found is not None and (rank not in said or found != said[rank][0]):
                said[rank] = (found, time.monotonic())
        open_ranks = [rank for rank in request.ranks if rank not in said or said[rank][0].state in AT_WORK]
        if not open_ranks:
            return {rank: answer for rank, (answer, _) in said.items()}
        states, words = tuple(answer.state for answer, _ in said.values()), _progress(request, said)
        if states != shown or time.monotonic() - shown_at > _WORDS_S:
            shown, shown_at = states, time.monotonic()
            console.print(Text(words))
        patience_s = SILENT_S + NEWS_S + look_s(max(request.ranks))
        silent = [rank for rank in open_ranks if time.monotonic() - (said[rank][1] if rank in said else began) > patience_s]
        if silent:
            raise UsageError(_silence(place, silent, said, patience_s))
        if time.monotonic() - began > limit:
            raise UsageError(f"after {limit:.0f} s the profile is not there: {words}; wait longer with --limit, or ask for nearer steps")
        time.sleep(_LOOK_S)


def _progress(request: Request, said: dict[int, tuple[Answer, float]]) -> str:
    """One line for all ranks."""
    if not said:
        return f"asked: steps {request.first} to {request.end - 1} of {len(request.ranks)} ranks; waiting for them to answer"
    states = {state: sum(answer.state == state for answer, _ in said.values()) for state in AT_WORK}
    step = max(answer.step for answer, _ in said.values())
    count = len(request.ranks)
    ended = sum(answer.state not in AT_WORK for answer, _ in said.values())
    return (
        f"step {step}: {states['waiting']} of {count} ranks wait for step {request.first}, {states['running']} profile, {ended} are through"
    )


def _silence(place: Place, silent: list[int], said: dict[int, tuple[Answer, float]], patience_s: float) -> str:
    listed = ", ".join(map(str, silent[:8])) + (f" and {len(silent) - 8} more" if len(silent) > 8 else "")
    if not said:
        return (
            f"rank {listed} of {place.run} does not answer for {patience_s:.0f} s; is the run at work, with that many ranks? "
            "A run that still prepares its data does not answer yet"
        )
    return (
        f"no word from rank {listed} for {patience_s:.0f} s: the run ended, or its disk is full; the others' profiles are in {place.folder}"
    )


def _report(place: Place, answers: dict[int, Answer], output: Path | None, console: Console) -> None:
    """Say where the profiles are. Raises UsageError when there is none, Exit with 1 when some are missing."""
    done = [rank for rank, answer in answers.items() if answer.state == "done"]
    lines = [f"rank {rank}: {answer.state}: {answer.text}" for rank, answer in answers.items() if answer.text]
    if not done:
        raise UsageError(printable("; ".join(lines)) or "no rank took a profile")
    for line in lines:
        console.print(Text(printable(line), style="yellow"))
    folder = place.folder
    if output is not None:
        shutil.copytree(folder, output)
        folder = output
    size = sum(answers[rank].num_bytes for rank in done)
    console.print(
        Text(
            f"profiles of {len(done)} of {len(answers)} ranks, {size / 1e6:.1f} MB: {folder}\n"
            f"what takes time:  megascale analyze {folder}\n"
            f"all of it:        pip install xprof; xprof --logdir {folder}     (or TensorBoard with its profile plugin)"
        )
    )
    if len(done) < len(answers):
        raise typer.Exit(1)
