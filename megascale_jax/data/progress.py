"""A terminal progress bar over bytes, or nothing: the only place of this package that draws."""

from types import TracebackType
from typing import Self

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


class ByteProgress:
    """Progress of one stage; a context manager. With ``shown`` false every call does nothing."""

    def __init__(self, stage: str, total_bytes: int, shown: bool):
        columns = (TextColumn(f"{stage:>13}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, disable=not shown)
        self._total_bytes = total_bytes
        self._task = self._progress.add_task(stage, total=total_bytes)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.set(self._total_bytes)
        self._progress.stop()

    def set(self, done_bytes: int) -> None:
        """So many bytes are done in all."""
        self._progress.update(self._task, completed=done_bytes)

    def advance(self, more_bytes: int) -> None:
        """So many bytes more are done."""
        self._progress.advance(self._task, more_bytes)
