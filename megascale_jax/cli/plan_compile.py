"""The compiler's word on layouts that were found by formulas: peak memory, estimated step."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from megascale_jax.aot.compile import compile_experiment
from megascale_jax.cli.compile import target_of
from megascale_jax.config.schema import Experiment
from megascale_jax.errors import CompileError, ConfigError
from megascale_jax.sim.search import Candidate, described


def compile_candidates(console: Console, base: Experiment, candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """One answer for each, in their order; a compiler that gives up on one leaves its ``error``, and the next is tried."""
    answers: list[dict[str, Any]] = []
    for rank, candidate in enumerate(candidates, 1):
        plan = candidate.experiment(base)
        answer: dict[str, Any] = {"rank": rank, **candidate.layout}
        with (
            tempfile.TemporaryDirectory() as place,
            console.status(f"compiling {rank} of {len(candidates)}: {described(candidate.parallel)}"),
        ):
            try:
                report = compile_experiment(plan, target_of(plan), Path(place))
            except (CompileError, ConfigError) as error:
                answers.append(answer | {"fits": False, "error": str(error)})
                continue
        found = {name: getattr(report, name) for name in ("fits", "peak_bytes", "device_bytes", "modelled_step_s", "compile_s")}
        answers.append(answer | found)
    return answers
