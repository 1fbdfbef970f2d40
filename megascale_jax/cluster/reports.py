"""What an executor says about one training process."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class ProcessReport(BaseModel):
    """One training process as its node sees it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    rank: int
    pid: int
    state: Literal["running", "stopped", "zombie", "exited"]
    exit_code: int | None = None
    signal: int | None = None
    step: int = 0
    section: str = "start"
    in_section_s: float = 0.0
    longest_s: dict[str, float] = {}
    passes: dict[str, int] = {}
    loss: float | None = None
    non_finite_in_a_row: int = 0
    saved_step: int | None = None
    durable_step: int | None = None
    step_s: float | None = None
    cpu_s: float = 0.0
    rss_bytes: int = 0
    log: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    is_secondary: bool | None = None
