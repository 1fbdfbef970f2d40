"""What a process's events say of it every `events.PULSE_S` seconds, whatever it waits for. No JAX.

Spans are written when they end and a device's stamps come out with its step, so of a hang they know nothing. These instants do: the
thread that writes events looks at the main thread and at the devices, which have to do nothing for it.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

ALIVE = "alive"
"""Instant with `Alive` as its text; its step is that of the pass."""
PASSED = "passed"
"""Instant of lane ``compute``, one a device, with `Passed` as its text, and the step, tick and unit in which the device is."""

_Nanoseconds = Annotated[int, Field(gt=-(1 << 62), lt=1 << 62)]
_Count = Annotated[int, Field(ge=0, lt=1 << 62)]


class Alive(BaseModel):
    """The pass in which the main thread is (`marks.py`), and since when on CLOCK_MONOTONIC."""

    model_config = ConfigDict(frozen=True)

    section: str
    since_ns: _Nanoseconds


class Passed(BaseModel):
    """How many of a step's stamps a device has taken; ``name`` and ``lane`` are those of the span that it is in.

    A lane other than ``compute`` is a mesh axis over which it waits for collectives. Both are empty once all stamps are taken.
    """

    model_config = ConfigDict(frozen=True)

    stamps: _Count
    of: _Count
    name: str = ""
    lane: str = ""
