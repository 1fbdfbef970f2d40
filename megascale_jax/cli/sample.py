"""`megascale sample`: a look at what a run has learned."""

from pathlib import Path
from typing import Annotated

import typer

from megascale_jax.observe.report import check_json_path, write_json


def sample(
    run: Annotated[Path, typer.Argument(help="folder of a run, such as runs/quickstart", show_default=False)],
    prompt: Annotated[str, typer.Option(help="text to continue", show_default=False)],
    tokens: Annotated[int, typer.Option(help="tokens to add at most")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time")] = 0.8,
    seed: Annotated[int, typer.Option(help="another seed, another continuation")] = 0,
    json: Annotated[Path | None, typer.Option("--json", help="also write prompt and text to this file", show_default=False)] = None,
) -> None:
    """Continue a text with the newest checkpoint of a run, on one device."""
    check_json_path(json)
    from megascale_jax.train.folder import RunFolder

    folder = RunFolder(run)
    system = folder.experiment().system
    from megascale_jax.comm.init import Processes, start
    from megascale_jax.train.sample import sample as continue_text

    start(system, 1, Processes())
    text = continue_text(folder, prompt, num_tokens=tokens, temperature=temperature, seed=seed)
    typer.echo(text)
    if json is not None:
        write_json(json, {"run": str(run), "prompt": prompt, "text": text})
