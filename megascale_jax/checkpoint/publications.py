"""Which steps wait to be published, and until when.

Hosts write the parts of their saves in order. So once a newer step is published, what an older one still misses will not come (its
host died, and nobody is left to say so): the older one is looked at once more and given up, and the newer one never
waits for it. Else the missing parts of the oldest step are waited for until the limit.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megascale_jax.checkpoint.holdings import Job
from megascale_jax.checkpoint.manifest import Manifest
from megascale_jax.checkpoint.stage_two import Publication


@dataclass
class _Waiting:
    job: Job
    publication: Publication
    limit: float | None = None
    """When it is given up; ``None`` until it is the oldest one."""
    overtaken_by: int | None = None


class Publications:
    """Steps that wait for parts, oldest first; not thread-safe."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, job: Job) -> None:
        """A step that has begun."""
        assert job.target is not None, "only what goes to storage is published"
        self._waiting.append(_Waiting(job, Publication(job.target, job.index)))

    def settle(self, launch: Callable[[], str]) -> Iterator[tuple[Job, Manifest | Exception]]:
        """Publish what is complete and give up what will not be; each of those, with its manifest or what went wrong.

        ``launch``: of the start of the run that is at work now.
        """
        for one in list(self._waiting):
            try:
                outcome = one.publication.attempt(self._why_given_up(one, launch()))
            except Exception as error:  # the rank is told; the others are not held up
                outcome = error
            if outcome is None:
                continue
            place = self._waiting.index(one)
            if isinstance(outcome, Manifest):
                for older in self._waiting[:place]:
                    older.overtaken_by = outcome.step
            del self._waiting[place]
            yield one.job, outcome

    def _why_given_up(self, one: _Waiting, launch: str) -> str | None:
        """Why the missing parts are not waited for any longer; ``None``: they are."""
        limit_s = one.publication.target.publish_limit_s
        if one.limit is None and one is self._waiting[0]:
            one.limit = time.monotonic() + limit_s
        if one.job.index.launch != launch:
            return "and the run was started again meanwhile"
        if one.overtaken_by is not None:
            return f"and step {one.overtaken_by} was published meanwhile"
        if one.limit is not None and time.monotonic() > one.limit:
            return f"within {limit_s:.0f} s"
        return None
