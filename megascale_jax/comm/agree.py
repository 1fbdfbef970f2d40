"""What every process of a run has to know of every other one: a small value from each, the same list on all.

All processes call in the same order. The values travel as bytes in one collective, so they work wherever a step does.
"""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from megascale_jax import errors
from megascale_jax.errors import MegascaleError


def all_gather_json(value: Any) -> list[Any]:
    """The JSON values of all processes, in their order; with one process, ``[value]``."""
    if jax.process_count() == 1:
        return [json.loads(json.dumps(value))]
    from jax.experimental import multihost_utils

    content = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(content.size))).reshape(-1)
    width = 1 << int(sizes.max() - 1).bit_length()  # few sizes, so few programs
    gathered = np.asarray(multihost_utils.process_allgather(np.pad(content, (0, width - content.size))))
    rows = gathered.reshape(jax.process_count(), width)
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def all_outcomes(action: Callable[[], Any], otherwise: type[MegascaleError]) -> list[Any]:
    """An action on every process: for each, in their order, its JSON result, or the MegascaleError that it raised.

    Whatever an action raises, its process comes to the gather to say so, since the others wait there. What is none of our errors
    becomes one of the type ``otherwise``.
    """
    value, problem, cause = None, None, None
    try:
        value = action()
    except MegascaleError as error:
        problem, cause = (type(error).__name__, str(error)), error
    except Exception as error:
        problem, cause = ("", f"{type(error).__name__}: {error}"), error
    outcomes = []
    for rank, (result, failure) in enumerate(all_gather_json([value, problem])):
        if failure is not None:
            result = getattr(errors, failure[0], otherwise)(failure[1])
            result.__cause__ = cause if rank == jax.process_index() else None
        outcomes.append(result)
    return outcomes


def all_results(action: Callable[[], Any], otherwise: type[MegascaleError]) -> list[Any]:
    """`all_outcomes` where all succeed; else the first process's error is raised on all, with the same text."""
    outcomes = all_outcomes(action, otherwise)
    for outcome in outcomes:
        if isinstance(outcome, MegascaleError):
            raise outcome
    return outcomes
