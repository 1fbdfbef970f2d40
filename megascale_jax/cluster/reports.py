"""What an executor says of a training process of its node, in each beat anew, so that a lost one changes nothing."""

import math
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat

from megascale_jax.observe.spike import Spike

LOG_LINES, LOG_LINE_CHARACTERS = 20, 300

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Word = Annotated[str, Field(max_length=64)]

State = Literal["running", "stopped", "zombie", "exited"]
"""``stopped``: by SIGSTOP or a debugger. ``zombie``: its main thread has ended and others have not, as when one hangs in a driver."""


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class ProcessReport(BaseModel):
    """One rank of one attempt, now.

    ``step``: completed steps, ``None`` before the process has said anything; ``section`` is ``start`` until then. Both, and ``passes``,
    ``longest_s``, ``saved_step``, ``durable_step`` and ``step_s``, are those of `observe/marks.py`. ``in_section_s`` is measured by this
    host's monotonic clock and stands still once the process has ended. ``loss``: ``None`` also when it is not finite.
    ``exit_code``: of a process that ended by itself; ``signal``: number of the one that ended it.
    ``log``: the newest lines since the report before. ``keywords``: names of `cluster/keywords.py` that its log had in this
    attempt, in order of appearance; ``is_secondary``: all of them are consequences of another process's end (``None``: there are none).
    ``silent_s``: since its pulse was last felt, ``None`` before there was one.
    ``odd_ranks``, ``is_odd_certain``: of `observe/marks.py`, when copies of the state differed; ``spike``: the newest loss spike.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    rank: Count
    pid: Count
    state: State
    exit_code: Annotated[int, Field(ge=-(1 << 31), lt=1 << 32)] | None
    signal: Annotated[int, Field(ge=0, lt=256)] | None
    step: Count | None
    section: Word
    in_section_s: FiniteFloat
    longest_s: Annotated[dict[Word, FiniteFloat], Field(max_length=64)]
    passes: Annotated[dict[Word, Count], Field(max_length=64)]
    loss: Annotated[FiniteFloat | None, BeforeValidator(_finite)]
    non_finite_in_a_row: Count
    saved_step: Count | None
    durable_step: Count | None
    step_s: FiniteFloat | None
    cpu_s: FiniteFloat
    rss_bytes: Count
    log: Annotated[tuple[Annotated[str, Field(max_length=LOG_LINE_CHARACTERS)], ...], Field(max_length=LOG_LINES)]
    keywords: Annotated[tuple[Word, ...], Field(max_length=256)]
    is_secondary: bool | None
    odd_ranks: Annotated[tuple[Count, ...], Field(max_length=64)] | None = None
    is_odd_certain: bool = False
    spike: Spike | None = None
    silent_s: FiniteFloat | None = None
