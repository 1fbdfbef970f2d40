"""The result of a run in one small file, `summary.json`: written once at its end, read by `compare`, plots and scripts.

The first eight keys are a promise to users; the others explain them. The file is replaced in one step, so it is the
summary of the last finished try or absent; a file that does not fit is refused with the reason.
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megascale_jax.errors import RunFolderError
from megascale_jax.observe.report import write_json

SUMMARY_FILE = "summary.json"


class RunSummary(BaseModel):
    """What a finished run reports. Losses and cross-entropies are nats per token of the same held-out text."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    validation_loss: float | None = Field(description="loss on the held-out split at the end; null: not finite, or never evaluated")
    unigram_nats: float | None = Field(description="cross-entropy of the held-out text under unigram counts")
    bigram_nats: float | None = Field(description="cross-entropy of the held-out text under bigram counts")
    tokens_per_s: float | None = Field(description="without compilation and pauses; null: too few steps to tell")
    mfu: float | None = Field(description="training FLOPs per token x tokens/s / peak FLOP/s, in [0, 1]")
    steps: int = Field(description="steps completed in all, earlier tries included")
    wall_s: float = Field(description="seconds of training, earlier tries included")
    resumed_from: int | None = Field(description="step that the last try went on from; null: it began at step 0")

    parameters: int = Field(description="logical parameters, padding not counted")
    peak_flops: float = Field(description="FLOP/s of all devices together that mfu is measured against")
    checkpoint_errors: int = Field(0, description="saves that failed while training went on")
    skipped_steps: int = Field(0, description="steps whose update was skipped because a gradient was not finite")
    data_wait_fraction: float | None = Field(
        None, description="share of the measured steps' time in which the loop waited for data; null: too few steps to tell"
    )
    data_digest: str | None = Field(None, description="identity of the prepared rows and their split; equal digests, equal data")
    commit: str | None = Field(None, description="source revision, where known")
    versions: dict[str, str] = Field({}, description="versions of the libraries that decide the numbers")


def write_summary(run_folder: Path, summary: RunSummary) -> Path:
    """Write `summary.json` in one step and return its path. Raises OSError if it cannot be written."""
    path = run_folder / SUMMARY_FILE
    write_json(path, summary)
    return path


def read_summary(run_folder: Path) -> RunSummary | None:
    """The summary of a run, or None while it has none. Raises RunFolderError for a file that is not a summary."""
    path = run_folder / SUMMARY_FILE
    if not path.is_file():
        return None
    try:
        return RunSummary.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise RunFolderError(f"{path} is no run summary: {where}: {first['msg']}; finish the run again to rewrite it") from error
