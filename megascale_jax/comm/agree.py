"""What every process of a run has to know of every other one: a small value from each, the same list on all.

All processes call in the same order. The values travel as bytes in one collective, so they work wherever a step does.
"""

import json
from typing import Any

import jax
import numpy as np


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


def all_agree(is_fine: bool) -> bool:
    """Whether it is fine on every process."""
    return all(all_gather_json(bool(is_fine)))
