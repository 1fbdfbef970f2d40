"""The processes of a run, as the launcher said. Imports no JAX.

Every launcher sets the same three variables, ``MEGASCALE_COORDINATOR`` (``host:port`` of process 0),
``MEGASCALE_NUM_PROCESSES`` and ``MEGASCALE_PROCESS_ID``; without them the run is one process.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from megascale_jax.errors import UsageError

COORDINATOR = "MEGASCALE_COORDINATOR"
NUM_PROCESSES = "MEGASCALE_NUM_PROCESSES"
PROCESS_ID = "MEGASCALE_PROCESS_ID"


@dataclass(frozen=True)
class Processes:
    """The processes of a run and which of them this is."""

    count: int = 1
    index: int = 0
    coordinator: str | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Processes":
        """What the launcher said. Raises UsageError when it said only a part of it, or something impossible."""
        values = {name: environment.get(name, "") for name in (COORDINATOR, NUM_PROCESSES, PROCESS_ID)}
        if not any(values.values()):
            return cls()
        missing = [name for name, value in values.items() if not value]
        if missing:
            raise UsageError(f"{', '.join(missing)} not set, but another of the three is; a launcher sets all of {', '.join(values)}")
        if not (values[NUM_PROCESSES].isdecimal() and values[PROCESS_ID].isdecimal()):
            raise UsageError(f"{NUM_PROCESSES}={values[NUM_PROCESSES]!r} and {PROCESS_ID}={values[PROCESS_ID]!r}; expected two numbers")
        count, index = int(values[NUM_PROCESSES]), int(values[PROCESS_ID])
        if not 0 <= index < count:
            raise UsageError(f"{PROCESS_ID} is {index}; expected a number in [0, {NUM_PROCESSES} = {count})")
        return cls(count, index, values[COORDINATOR])
