"""`megascale config`: what an experiment is, before anything runs.

`show` prints the resolved experiment as YAML that is an experiment file itself, under a header of what follows from it.
Failure case: an experiment that cannot run is not shown, its problems are.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from megascale_jax.config.layout import Layout
from megascale_jax.config.load import dump_yaml, list_experiments, load_experiment
from megascale_jax.config.memory import GIB, state_bytes
from megascale_jax.config.schema import Experiment
from megascale_jax.model.flops import count_parameters, flops_per_token, parameter_breakdown
from megascale_jax.observe.report import check_json_path, write_json

app = typer.Typer(no_args_is_help=True, help="Show and list experiments.")


@dataclass(frozen=True)
class Facts:
    """What follows from an experiment without running it. FLOPs are training FLOPs per token, forward and backward."""

    parameters: int
    parameter_breakdown: dict[str, int]
    devices: int
    micro_batches: int
    tokens_per_step: int
    tokens: int
    flops_per_token_full: float
    flops_per_token_causal: float
    state_gib_per_device: float


def facts_of(experiment: Experiment) -> Facts:
    """The facts of a checked experiment."""
    model = experiment.model
    return Facts(
        parameters=count_parameters(model),
        parameter_breakdown=parameter_breakdown(model),
        devices=Layout.of(model, experiment.parallel).mesh.size,
        micro_batches=experiment.num_micro_batches,
        tokens_per_step=experiment.tokens_per_step,
        tokens=experiment.tokens_per_step * experiment.train.steps,
        flops_per_token_full=flops_per_token(model, "full"),
        flops_per_token_causal=flops_per_token(model, "causal"),
        state_gib_per_device=state_bytes(experiment).total / GIB,
    )


@app.command()
def show(
    experiment: Annotated[str, typer.Argument(help="name of an experiment, or a YAML file", show_default=False)],
    overrides: Annotated[list[str] | None, typer.Argument(help="changes: train.steps=600, system=h200", show_default=False)] = None,
    json: Annotated[Path | None, typer.Option("--json", help="also write all of it to this file", show_default=False)] = None,
) -> None:
    """Print the resolved experiment as YAML, with its size, mesh and batch."""
    check_json_path(json)
    loaded = load_experiment(experiment, overrides or ())
    facts = facts_of(loaded)
    if json is not None:
        write_json(json, {"experiment": loaded, "facts": facts})
    typer.echo(f"{header(loaded, facts)}\n{dump_yaml(loaded)}", nl=False)


@app.command(name="list")
def list_names(
    json: Annotated[Path | None, typer.Option("--json", help="also write names and files to this file", show_default=False)] = None,
) -> None:
    """List the experiments of ./configs and of the package."""
    check_json_path(json)
    experiments = list_experiments()
    if json is not None:
        write_json(json, experiments)
    width = max(map(len, experiments), default=0)
    for name, file in experiments.items():
        typer.echo(f"{name:<{width}}  {summary_of(file)}".rstrip())


def header(experiment: Experiment, facts: Facts) -> str:
    """The facts as YAML comment lines."""
    parallel, rows = experiment.parallel, experiment.train.global_batch_size
    mesh = f"pipe {parallel.pipe} x data {parallel.data} x tensor {parallel.tensor}"
    full, causal = facts.flops_per_token_full, facts.flops_per_token_causal
    lines = {
        "parameters": f"{facts.parameters:,}",
        "mesh": f"{mesh} = {facts.devices:,} devices",
        "micro-batches": f"{facts.micro_batches:,} of {parallel.micro_batch_size} rows on each data-parallel rank",
        "tokens per step": f"{facts.tokens_per_step:,} ({rows:,} rows of {experiment.model.sequence_length:,}); {facts.tokens:,} in all",
        "FLOPs per token": f"{full:.4g} (attention counted in full), {causal:.4g} (causal keys only)",
        "state per device": f"{facts.state_gib_per_device:.3g} GiB (weights, gradients, masters, moments)",
    }
    return "\n".join([f"# {experiment.name}", *(f"# {name + ':':<18}{text}" for name, text in lines.items())])


def summary_of(file: Path) -> str:
    """The first sentence of the comment that opens a YAML file, or nothing."""
    comment: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# "))
    return " ".join(comment).partition(". ")[0].rstrip(".")
