"""Checkpoints of one run by Orbax: written in the background, published by a rename, the newest found by scanning.

A checkpoint is a folder named by its step with two items: ``state``, a tree of arrays in logical form, and ``run``, a
JSON document that says what they belong to and can be read without JAX. Saving never ends a training: an error of the
disk, at once or in the background, is counted and reported, what was half written is not published, and the
checkpoints before it stay. Reading is strict: whatever is missing, damaged or of another shape raises CheckpointError.
"""

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from megascale_jax.errors import CheckpointError

_STATE, _RUN = "state", "run"
_PUBLISHED = "commit_success.txt"
_logger = logging.getLogger(__name__)


def published_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints below ``folder``, ascending; no JAX, no pointer file is trusted."""
    if not folder.is_dir():
        return []
    return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdecimal() and (entry / _PUBLISHED).is_file())


def read_description(folder: Path, step: int) -> dict[str, Any]:
    """The JSON document of one checkpoint. Raises CheckpointError when it cannot be read."""
    path = folder / str(step) / _RUN / "metadata"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {folder / str(step)} has no readable description ({error}); remove it to use an older one"
        ) from error


class CheckpointStore:
    """The checkpoints of one run. All processes of a run call every method, in the same order.

    ``keep`` newest ones stay; ``None`` opens the folder for reading only and touches nothing in it. ``on_error`` is told
    each failed save once, ``errors`` counts them.
    """

    def __init__(self, folder: Path, *, keep: int | None, on_error: Callable[[str], None] = _logger.warning):
        self.errors = 0
        self._folder, self._keep, self._on_error = folder.resolve(), keep, on_error
        self._pending: int | None = None
        self._manager = self._open()

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint, ``None`` when there is none."""
        steps = published_steps(self._folder)
        return steps[-1] if steps else None

    def save(self, step: int, state: Any, description: Mapping[str, Any]) -> None:
        """Copy ``state`` and begin to write it; waits for an earlier save first. Never raises for the disk."""
        self.wait()
        try:
            self._pending = step
            items = ocp.args.Composite(**{_STATE: ocp.args.PyTreeSave(state), _RUN: ocp.args.JsonSave(dict(description))})
            self._manager.save(step, args=items, force=True)
        except Exception as error:
            self._failed(error)

    def wait(self) -> None:
        """Until the save in flight is published or has failed. Never raises for the disk."""
        try:
            self._manager.wait_until_finished()
            if self._pending is not None and self._pending not in published_steps(self._folder):
                raise OSError("not published")
            self._pending = None
        except Exception as error:
            self._failed(error)

    def restore(self, step: int, abstract: Any) -> Any:
        """The arrays of one checkpoint with the shapes, types and shardings of ``abstract``.

        Raises CheckpointError, naming the parameters that differ, when the checkpoint is of another model, and when a
        file is missing or damaged.
        """
        try:
            stored = self._manager.item_metadata(step)[_STATE].tree
            _refuse_other_shapes(stored, abstract, self._folder / str(step))
            arguments = ocp.args.PyTreeRestore(
                abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract), partial_restore=True
            )
            return self._manager.restore(step, args=ocp.args.Composite(**{_STATE: arguments}))[_STATE]
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"checkpoint {self._folder / str(step)} cannot be read: {_first_line(error)}; remove that folder to use an older one"
            ) from error

    def close(self) -> None:
        """Wait for the save in flight and release the background threads."""
        self.wait()
        self._manager.close()

    def _open(self) -> ocp.CheckpointManager:
        if self._keep is None:
            options = ocp.CheckpointManagerOptions(read_only=True)
        else:
            options = ocp.CheckpointManagerOptions(max_to_keep=self._keep, enable_async_checkpointing=True)
        handlers = {_STATE: ocp.PyTreeCheckpointHandler(), _RUN: ocp.JsonCheckpointHandler()}
        return ocp.CheckpointManager(self._folder, item_handlers=handlers, options=options)

    def _failed(self, error: Exception) -> None:
        """Count and report; a fresh manager forgets the broken save, and its half-written folder is removed."""
        self.errors += 1
        step, self._pending = self._pending, None
        self._on_error(f"checkpoint of step {step} was not saved: {_first_line(error)}; training goes on, older checkpoints stay")
        try:
            self._manager.close()
        except Exception as secondary:
            _logger.debug("closing the broken checkpoint manager: %s", secondary)
        if jax.process_index() == 0 and step is not None:
            for leftover in self._folder.glob(f"{step}*"):
                if leftover.name == str(step) and (leftover / _PUBLISHED).is_file():
                    continue
                if leftover.name == str(step) or leftover.name.startswith(f"{step}.orbax-checkpoint-tmp"):
                    shutil.rmtree(leftover, ignore_errors=True)
        self._manager = self._open()


def _refuse_other_shapes(stored: Any, abstract: Any, where: Path) -> None:
    have, want = _shapes(stored), _shapes(abstract)
    problems = [f"{key}: checkpoint {have.get(key, 'lacks it')}, expected {shape}" for key, shape in want.items() if have.get(key) != shape]
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise CheckpointError(f"checkpoint {where} is of another model: {shown}")


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _first_line(error: Exception) -> str:
    """What went wrong, without the library's dump of its own settings."""
    text = next(iter(str(error).strip().splitlines()), "").partition(" [tensorstore_spec")[0]
    return text or type(error).__name__
