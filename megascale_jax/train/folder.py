"""The folder of a run: what is in it, and whether a configuration may go on in it.

    config.yaml  metrics.jsonl  tensorboard/  checkpoints/STEP/  summary.json  loss.png

A folder belongs to one configuration. The same one resumes from the newest complete checkpoint; fields that decide no
number (`config.checks.RESUMABLE`) may change; anything else is refused with the difference, before any device work.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from megascale_jax.checkpoint.store import published_steps, read_description
from megascale_jax.config.checks import difference_blocks_resume
from megascale_jax.config.load import differences, dump_yaml, read_resolved
from megascale_jax.config.schema import Experiment
from megascale_jax.errors import RunFolderError
from megascale_jax.observe.report import replace_file
from megascale_jax.observe.summary import SUMMARY_FILE, RunSummary, read_summary

CONFIG_FILE = "config.yaml"
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class RunFolder:
    """One run on disk."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / CHECKPOINTS

    def experiment(self) -> Experiment:
        """The configuration that the run was started with. Raises RunFolderError when this is no run."""
        file = self.path / CONFIG_FILE
        if not file.is_file():
            raise RunFolderError(
                f"{self.path} is not a run folder: it has no {CONFIG_FILE}; give the folder that `megascale train` printed"
            )
        return read_resolved(file)

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        steps = published_steps(self.checkpoints)
        return steps[-1] if steps else None

    def check(self, experiment: Experiment) -> None:
        """Refuse a configuration that may not go on here. Raises RunFolderError or CheckpointError; writes nothing."""
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return
        if not (self.path / CONFIG_FILE).is_file():
            raise RunFolderError(f"{self.path} exists and is not a run folder (no {CONFIG_FILE}); choose another with --run-folder")
        self._refuse(self.experiment(), experiment, f"{self.path} belongs to a run with another configuration")
        if (step := self.latest()) is not None:
            stored = read_description(self.checkpoints, step).get("experiment")
            saved = Experiment.model_validate_json(stored) if isinstance(stored, str) else None
            if saved is None:
                raise RunFolderError(f"checkpoint {self.checkpoints / str(step)} was not written by `megascale train`; remove it")
            self._refuse(saved, experiment, f"checkpoint {self.checkpoints / str(step)} is of another model or run")

    def finished(self, experiment: Experiment) -> RunSummary | None:
        """The summary when the run already has all its steps, else ``None``."""
        summary, step = read_summary(self.path), self.latest()
        return summary if summary is not None and step is not None and min(step, summary.steps) >= experiment.train.steps else None

    def create(self, experiment: Experiment) -> None:
        """Make the folder and write the configuration; an unfinished run loses its old summary."""
        self.path.mkdir(parents=True, exist_ok=True)
        replace_file(self.path / CONFIG_FILE, dump_yaml(experiment).encode())
        (self.path / SUMMARY_FILE).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove a run and all its checkpoints. Raises RunFolderError for a folder that is not a run."""
        if self.path.exists() and any(self.path.iterdir()):
            self.experiment()
            shutil.rmtree(self.path)

    @staticmethod
    def _refuse(old: Experiment, new: Experiment, what: str) -> None:
        blocking = difference_blocks_resume(differences(old, new))
        if blocking:
            shown = "\n  - ".join(["", *(str(difference) for difference in blocking)])
            raise RunFolderError(
                f"{what}:{shown}\ngive the old values to resume, choose another folder with --run-folder, or start anew with --fresh"
            )
