"""The prepared folders of a run: those that the configuration names, or made from their sources on first use.

A folder made here has a name that says what it is and ends in a hash of the whole request, the state of the corpus
included, so a changed corpus gets a new folder and a finished one is never changed. Of several processes that start at
once on one machine, one prepares under a file lock while the others wait for it; a lock dies with its process, and what a
killed process left behind is removed later. Waiting has a limit, after which a ``DataError`` names the lock.
"""

import hashlib
import re
import shutil
import time
from pathlib import Path

from filelock import FileLock, Timeout

from megascale_jax.comm.address import is_remote
from megascale_jax.config.schema import DataConfig, Experiment
from megascale_jax.data.files import Folder
from megascale_jax.data.manifest import MANIFEST_FILE, MANIFEST_VERSION, read_manifest
from megascale_jax.data.mixture import TrainingData, as_training_data, make_phases
from megascale_jax.data.prepare import prepare
from megascale_jax.data.prepared import Prepared, open_prepared
from megascale_jax.data.source import STDLIB, open_corpus
from megascale_jax.data.tokenizer import load_tokenizer
from megascale_jax.errors import DataError

DEFAULT_LOCK_TIMEOUT_S = 3600.0
"""Longest wait for another process that prepares the same corpus."""


def prepare_if_missing(
    data_config: DataConfig,
    sequence_length: int,
    cache_root: Path,
    progress: bool,
    lock_timeout_s: float = DEFAULT_LOCK_TIMEOUT_S,
) -> Folder:
    """The prepared folder for ``train.data``: ``prepared`` itself, or ``source`` prepared under ``cache_root``.

    Raises ``DataError`` when both are null, when the folder is no complete prepared data, when the corpus is unusable, or
    after ``lock_timeout_s`` seconds of waiting.
    """
    if data_config.prepared is not None:
        named = data_config.prepared if is_remote(data_config.prepared) else Path(data_config.prepared).expanduser()
        read_manifest(named)
        return named
    if data_config.source is None:
        raise DataError("No data: set train.data.prepared=FOLDER (see `megascale data prepare --help`), or train.data.source=CORPUS.")
    folder = cache_root.expanduser() / prepared_name(data_config.source, data_config.tokenizer, sequence_length)
    if (folder / MANIFEST_FILE).is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(f".{folder.name}.lock"), timeout=lock_timeout_s)
        with lock:
            _remove_abandoned(folder, lock_timeout_s)
            prepare(data_config.source, folder, sequence_length=sequence_length, tokenizer=data_config.tokenizer, progress=progress)
    except Timeout as error:
        raise DataError(
            f"Another process has been preparing {folder} for {lock_timeout_s:.0f} s (lock {error.lock_file}). "
            "Wait for it, or stop it and start again."
        ) from error
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error}. Prepare the data elsewhere and set train.data.prepared.") from error
    return folder


def open_training_data(
    experiment: Experiment, cache_root: Path, progress: bool, lock_timeout_s: float = DEFAULT_LOCK_TIMEOUT_S
) -> TrainingData:
    """What ``train.data`` names, ready for the experiment's model: one prepared folder, or a mixture of several.

    Raises ``DataError`` as `prepare_if_missing` and `open_prepared` do, and when the sources of a mixture do not fit together.
    """
    data, model = experiment.train.data, experiment.model

    def opened(one: DataConfig) -> Prepared:
        folder = prepare_if_missing(one, model.sequence_length, cache_root, progress, lock_timeout_s)
        return open_prepared(folder, sequence_length=model.sequence_length, vocab_size=model.vocab_size)

    if data.mixture is None:
        return as_training_data(opened(data))
    size = experiment.train.global_batch_size
    weights = {name: source.weight for name, source in data.mixture.items()}
    phases = make_phases(weights, {step * size: change for step, change in data.weights_at.items()})
    ones = {name: DataConfig(prepared=s.prepared, source=s.source, tokenizer=data.tokenizer) for name, s in data.mixture.items()}
    return TrainingData({name: opened(ones[name]) for name in sorted(ones)}, phases)


def _remove_abandoned(folder: Path, age_s: float) -> None:
    """Remove what a killed process left of ``folder``; young ones may belong to a machine that does not see our lock."""
    for partial in folder.parent.glob(f".{folder.name}.partial-*"):
        if time.time() - partial.stat().st_mtime > age_s:
            shutil.rmtree(partial, ignore_errors=True)


def prepared_name(source: str, tokenizer: str, sequence_length: int) -> str:
    """Folder name for a corpus in its present state, a tokenizer and a sequence length.

    Raises ``DataError`` when there is no such corpus or tokenizer.
    """
    where = source if source == STDLIB else str(Path(source).expanduser().resolve())
    parts = [MANIFEST_VERSION, where, open_corpus(source).fingerprint, load_tokenizer(tokenizer).digest, sequence_length]
    digest = hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "surrogateescape")).hexdigest()[:10]
    words = (re.sub(r"[^A-Za-z0-9]+", "-", Path(text).stem).strip("-")[:40] for text in (source, tokenizer))
    return f"{'-'.join(words)}-{sequence_length}-{digest}"
