"""The folder of a run: what is in it, and whether a configuration may go on in it.

    config.yaml  metrics.jsonl  tensorboard/  events/  profiles/  checkpoints/STEP/  summary.json  loss.png  cluster/

A folder belongs to one configuration. The same one resumes from the newest complete checkpoint; fields that decide no
number (`config.checks.RESUMABLE`) may change; anything else is refused with the difference, before any device work.
"""

import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from megascale_jax.checkpoint.manifest import CHECKPOINTS, newest_good, read_manifest
from megascale_jax.checkpoint.owner import OWNER, Owner, claim, read_owner
from megascale_jax.comm.storage import Storage
from megascale_jax.config.checks import difference_blocks_resume
from megascale_jax.config.cluster import DRIVER_LOCK, JOB_FOLDER
from megascale_jax.config.load import differences, dump_yaml, read_resolved
from megascale_jax.config.schema import Experiment
from megascale_jax.data.tokenizer import TOKENIZER_FILE
from megascale_jax.errors import ConfigError, RunFolderError
from megascale_jax.observe.events import EVENTS_FOLDER
from megascale_jax.observe.metrics import METRICS_FILE, TENSORBOARD_FOLDER
from megascale_jax.observe.profile_request import PROFILES_FOLDER
from megascale_jax.observe.report import replace_file
from megascale_jax.observe.summary import SUMMARY_FILE, RunSummary, read_summary

CONFIG_FILE = "config.yaml"
LOCK_FILE = ".lock"
IDENTITY_FILE = ".identity"
_OWN_NAMES = {
    *(CONFIG_FILE, CHECKPOINTS, LOCK_FILE, IDENTITY_FILE, SUMMARY_FILE),
    *(METRICS_FILE, TENSORBOARD_FOLDER, EVENTS_FOLDER, TOKENIZER_FILE, JOB_FOLDER, DRIVER_LOCK, PROFILES_FOLDER, "loss.png"),
}


_NOT_YET_A_RUN = {LOCK_FILE, IDENTITY_FILE, EVENTS_FOLDER, JOB_FOLDER, DRIVER_LOCK}
"""What may be there before the first start of a training."""


@dataclass(frozen=True)
class RunFolder:
    """One run on disk. ``wait_s``: longest wait for another process that trains there to be gone, seconds."""

    path: Path
    wait_s: float = 0.0

    def storage(self, experiment: Experiment | None = None) -> Storage:
        """Where the checkpoints lie, by this configuration or the one that the run was started with."""
        experiment = experiment or self.experiment()
        return Storage(self.place(experiment), experiment.train.checkpoint.key_file)

    def place(self, experiment: Experiment) -> str | Path:
        """The same without looking there."""
        return experiment.train.checkpoint.place or self.path / CHECKPOINTS

    def experiment(self) -> Experiment:
        """The configuration that the run was started with. Raises RunFolderError when this is no run."""
        file = self.path / CONFIG_FILE
        if not file.is_file():
            raise RunFolderError(
                f"{self.path} is not a run folder: it has no {CONFIG_FILE}; give the folder that `megascale train` printed"
            )
        return read_resolved(file)

    def latest(self, experiment: Experiment | None = None) -> int | None:
        """Step of the newest complete checkpoint."""
        newest = newest_good(self.storage(experiment), self._known_identity())
        return newest.step if newest is not None else None

    def description(self, step: int) -> Mapping[str, Any]:
        """What a checkpoint says of its run. Raises CheckpointError."""
        return read_manifest(self.storage(), step).description

    def _known_identity(self) -> str:
        file = self.path / IDENTITY_FILE
        return file.read_text().strip() if file.is_file() else ""

    def identity(self) -> str:
        """A name of this run that no other one has, also none that was here before; made when it is first asked for."""
        file = self.path / IDENTITY_FILE
        if not file.is_file():
            replace_file(file, uuid.uuid4().hex.encode())
        return self._known_identity()

    def check(self, experiment: Experiment) -> None:
        """Refuse a configuration that may not go on here. Raises RunFolderError or CheckpointError; writes nothing."""
        existing = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise RunFolderError(f"{self.path} cannot be made: {existing} is no writable folder; choose another with --run-folder")
        if existing != self.path or {entry.name for entry in self.path.iterdir()} <= _NOT_YET_A_RUN:
            return self._check_newest(experiment)
        if not (self.path / CONFIG_FILE).is_file():
            raise RunFolderError(f"{self.path} exists and is not a run folder (no {CONFIG_FILE}); choose another with --run-folder")
        try:
            started = self.experiment()
        except ConfigError as error:
            raise RunFolderError(f"{error}\nthe folder's own configuration is damaged: start anew with --fresh") from error
        self._refuse(started, experiment, f"{self.path} belongs to a run with another configuration")
        return self._check_newest(experiment)

    def _check_newest(self, experiment: Experiment) -> None:
        """The same for the newest checkpoint; on remote storage there may be one although the folder is new."""
        storage = self.storage(experiment)
        step = self.latest(experiment)
        if step is None:
            self._refuse_foreign(storage, self._known_identity())
        else:
            stored = read_manifest(storage, step).description.get("experiment")
            if not isinstance(stored, str):
                raise RunFolderError(f"checkpoint {storage.url}/{step} was not written by `megascale train`; remove it")
            saved = Experiment.model_validate_json(stored)
            self._refuse(saved, experiment, f"checkpoint {storage.url}/{step} is of another model or run")

    def check_place(self, experiment: Experiment) -> None:
        """Refuse a place for checkpoints that is another run's. Raises RunFolderError, CheckpointError or OSError; writes nothing.

        For the rank that owns the folder: only where that lies it is known which run this is.
        """
        storage = self.storage(experiment)
        self._refuse_owner(experiment, storage, read_owner(storage))
        self._refuse_foreign(storage, self._known_identity() or "none yet")

    @staticmethod
    def _refuse_foreign(storage: Storage, run: str) -> None:
        if newest_good(storage, run) is None and (foreign := newest_good(storage)) is not None:
            raise RunFolderError(
                f"{storage.url} holds step {foreign.step} of another run and nothing of this one; move it away, choose another "
                "--run-folder or train.checkpoint.place, or start anew with --fresh"
            )

    def _refuse_owner(self, experiment: Experiment, storage: Storage, owner: Owner | None) -> None:
        identity = self._known_identity()
        if owner is None:
            return
        if owner.run != identity:
            raise RunFolderError(
                f"{storage.url} belongs to the run {owner.run} in {owner.run_folder}; choose another train.checkpoint.place, or go on with "
                f"that run by its --run-folder (should that be lost, write {owner.run} into {IDENTITY_FILE} of an empty folder)"
            )
        if experiment.train.checkpoint.place is not None and self._is_copy_of(Path(owner.run_folder)):
            raise RunFolderError(
                f"{storage.url} belongs to the run in {owner.run_folder}, of which {self.path} is a copy; choose another "
                "train.checkpoint.place for the copy, or remove the original"
            )

    def _is_copy_of(self, folder: Path) -> bool:
        """Whether the same run's folder still is there, and is another one than this."""
        with suppress(OSError):  # of another machine, or not for us to see
            return not folder.samefile(self.path) and RunFolder(folder)._known_identity() == self._known_identity()
        return False

    def finished(self, experiment: Experiment) -> RunSummary | None:
        """The summary when the run already has all its steps and is not to be rewound, else ``None``."""
        try:
            summary, step = read_summary(self.path), self.latest(experiment)
        except RunFolderError:  # damaged: finishing the run again writes it anew
            return None
        if summary is None or step is None or set(experiment.train.rewinds) - set(self.experiment().train.rewinds):
            return None
        return summary if min(step, summary.steps) >= experiment.train.steps else None

    def create(self, experiment: Experiment) -> None:
        """Make the folder of a new run; what an earlier run left there stays as it is."""
        self.path.mkdir(parents=True, exist_ok=True)
        if not (self.path / CONFIG_FILE).is_file():
            self.begin(experiment)

    def begin(self, experiment: Experiment) -> None:
        """Write the configuration, now that nothing can be refused any more; an unfinished run loses its old summary."""
        replace_file(self.path / CONFIG_FILE, dump_yaml(experiment).encode())
        (self.path / SUMMARY_FILE).unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from training here. Raises RunFolderError when one does; a lock dies with its process."""
        with _locked(
            self.path, f"another process trains in {self.path}; wait for it, stop it, or choose another --run-folder", self.wait_s
        ):
            yield

    @contextmanager
    def taken(self, experiment: Experiment, *, fresh: bool = False) -> Iterator[None]:
        """This process alone trains in the folder, which is there then, and owns the place of the checkpoints.

        ``fresh`` removes an earlier run first. Raises RunFolderError when another process or run has one of them; nothing is removed then.
        """
        if fresh:
            self.check_clear()
        storage = self.storage(experiment)
        refusal = f"another process trains on {storage.url}; wait for it, stop it, or choose another train.checkpoint.place"
        if storage.folder is not None:  # whatever is written there is for its owner only
            storage.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self.locked(), nullcontext() if storage.folder is None else _locked(storage.folder, refusal, self.wait_s):
            if not fresh or experiment.train.checkpoint.place is not None:  # else all that is there goes
                self.check_place(experiment)
            if fresh:
                self.clear(experiment)
            self.create(experiment)
            owner = Owner(self.identity(), str(self.path.absolute()), time.time())
            claim(storage, owner, lambda found: self._refuse_owner(experiment, storage, found))
            yield

    def check_clear(self) -> None:
        """Raise RunFolderError unless the folder holds nothing but what a run writes, whole or in part; removes nothing."""
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise RunFolderError(f"{self.path} is a file; choose another with --run-folder")
        foreign = sorted(entry.name for entry in self.path.iterdir() if entry.name not in _OWN_NAMES)
        if foreign:
            raise RunFolderError(
                f"{self.path} holds {foreign[0]!r}, which is not a run's, so it is not a run folder; choose another with --run-folder"
            )

    def clear(self, experiment: Experiment) -> None:
        """Remove a run and its checkpoints in it. Raises RunFolderError for a folder that holds anything else. The caller holds the lock.

        Checkpoints elsewhere are never removed, so the same is raised when there are some; without any the place is free again.
        """
        self.check_clear()
        if experiment.train.checkpoint.place is not None:
            storage = self.storage(experiment)
            if self.latest(experiment) is not None:
                raise RunFolderError(f"{storage.url} holds checkpoints of an earlier run; a new one needs another train.checkpoint.place")
            storage.delete(OWNER)
        for entry in self.path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name not in (LOCK_FILE, DRIVER_LOCK):
                entry.unlink()

    @staticmethod
    def _refuse(old: Experiment, new: Experiment, what: str) -> None:
        blocking = difference_blocks_resume(differences(old, new))
        if blocking:
            shown = "\n  - ".join(["", *(str(difference) for difference in blocking)])
            raise RunFolderError(
                f"{what}:{shown}\ngive the old values to resume, choose another folder with --run-folder, or start anew with --fresh"
            )


@contextmanager
def _locked(folder: Path, refusal: str, wait_s: float) -> Iterator[None]:
    """A lock on a folder, which is made if it is not there. Raises RunFolderError when another process has it, and keeps it for so long."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK_FILE, timeout=wait_s)
    try:
        lock.acquire()
    except Timeout as error:
        raise RunFolderError(refusal) from error
    try:
        yield
    finally:
        lock.release()
