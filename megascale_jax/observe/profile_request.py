"""Files by which a command asks ranks of a live run for a profile, and by which they answer. No JAX.

    profiles/requests/NAME.json                                what is asked: steps, ranks, until when; NAME: steps-FIRST-END[-NUMBER]
    profiles/NAME/rank-00003.json                              what a rank says of it: waits, is at work, is done, refuses, has failed
    profiles/NAME/plugins/profile/NAME/rank-00003.xplane.pb    its profile, in the layout that XProf and TensorBoard look for

All files are replaced in one step. A request lies there until its command takes it away; one of a command that died ends by its time.

Failure case: what is no request, of another format, too large or over its time is none; nothing in it chooses where is written.
"""

import json
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megascale_jax.errors import RunFolderError
from megascale_jax.observe.report import replace_file

PROFILES_FOLDER = "profiles"
"""In a run's folder."""
REQUESTS = "requests"
MOST_STEPS = 20
"""Of one profile: XLA keeps the first 2 million kernels that a process starts, and a large model starts 100,000 a step."""
MOST_RANKS = 64
"""Of one profile: each is a file of up to hundreds of MB."""
MOST_WAIT_S = 7 * 86_400.0
MOST_REQUESTS = 64
"""That are looked at; whoever makes more has them ignored."""
MOST_BYTES = 1 << 16
"""Of a request or an answer."""
LOOK_S = 1.0
"""Between two looks of a rank for requests, at least."""
MOST_LOOKS = 1_000
"""Of all ranks together a second: a shared file system serves others too."""
NEWS_S = 5.0
"""Between two answers of a rank that waits or is at work."""
_NAME = re.compile(r"steps-[0-9]{1,10}-[0-9]{1,10}(-[0-9]{1,4})?")
_Step = Annotated[int, Field(ge=1, lt=1 << 31)]
_Rank = Annotated[int, Field(ge=0, lt=1 << 20)]

State = Literal["waiting", "running", "done", "refused", "failed"]
AT_WORK: tuple[State, ...] = ("waiting", "running")


class Request(BaseModel):
    """Steps ``first <= step < end`` of ``ranks``, until ``expires_unix_s``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    first: _Step
    end: _Step
    ranks: Annotated[tuple[_Rank, ...], Field(min_length=1, max_length=MOST_RANKS)]
    expires_unix_s: Annotated[float, Field(gt=0, lt=1e11, allow_inf_nan=False)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not 0 < self.end - self.first <= MOST_STEPS:
            raise ValueError(f"{self.end - self.first} steps; expected 1 to {MOST_STEPS}")
        return self


class Answer(BaseModel):
    """What a rank says of a request. ``step``: the one that it is in; ``text``: why it refuses or failed, or what is to be known."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    rank: _Rank
    state: State
    step: Annotated[int, Field(ge=0, lt=1 << 31)]
    at_unix_s: Annotated[float, Field(gt=0, lt=1e11, allow_inf_nan=False)]
    text: Annotated[str, Field(max_length=2000)] = ""
    num_bytes: Annotated[int, Field(ge=0, lt=1 << 62)] = 0


@dataclass(frozen=True)
class Place:
    """The files of one profile of a run, by its name."""

    run: Path
    name: str

    @property
    def request(self) -> Path:
        """What is asked."""
        return self.run / PROFILES_FOLDER / REQUESTS / f"{self.name}.json"

    @property
    def folder(self) -> Path:
        """Answers and profiles."""
        return self.run / PROFILES_FOLDER / self.name

    def profile(self, rank: int) -> Path:
        """Of one rank."""
        return self.folder / "plugins" / "profile" / self.name / f"rank-{rank:05}.xplane.pb"

    def answer(self, rank: int) -> Answer | None:
        """What a rank has said last; ``None``: nothing, or nothing that can be read."""
        with suppress(OSError, ValidationError, ValueError):
            return Answer.model_validate_json(_read(self.folder / f"rank-{rank:05}.json"))
        return None

    def say(self, answer: Answer) -> None:
        """Answer for a rank. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder / f"rank-{answer.rank:05}.json", answer.model_dump_json().encode())

    def withdraw(self) -> None:
        """Ask no more; ranks that wait give up, those at work finish. Answers are gone where there is no profile."""
        self.request.unlink(missing_ok=True)
        if not (self.folder / "plugins").exists():
            shutil.rmtree(self.folder, ignore_errors=True)


def ask(run: Path, request: Request) -> Place:
    """Put a request where the run's ranks look. Raises RunFolderError when this is no run, OSError when it cannot be written."""
    if not (run / "config.yaml").is_file():
        raise RunFolderError(f"{run} is not a run folder: it has no config.yaml; give the folder that `megascale train` printed")
    folder = run / PROFILES_FOLDER / REQUESTS
    folder.mkdir(parents=True, exist_ok=True)
    for left in set(folder.glob("steps-*.json")) - {place.request for place, _ in requests_of(run)}:
        left.unlink(missing_ok=True)  # of commands that died
    for number in count():
        place = Place(run, f"steps-{request.first}-{request.end}" + (f"-{number}" if number else ""))
        try:
            place.folder.mkdir()
        except FileExistsError:  # two commands at once, or a profile from before
            continue
        replace_file(place.request, request.model_dump_json().encode())
        return place
    raise AssertionError("numbers do not end")


def requests_of(run: Path, now: float | None = None) -> Iterator[tuple[Place, Request | str]]:
    """What is asked of a run, in the order of names: requests whose time is not over, of what is none the reason."""
    try:
        names = sorted(path.name for path in (run / PROFILES_FOLDER / REQUESTS).iterdir())
    except OSError:
        return
    for name in names[:MOST_REQUESTS]:
        stem, dot, ending = name.partition(".")
        if not (_NAME.fullmatch(stem) and dot and ending == "json"):
            continue
        place = Place(run, stem)
        try:
            request = Request.model_validate_json(_read(place.request))
        except OSError:
            continue
        except ValueError as error:
            yield place, f"{place.request.name} is no request: {_first_line(error)}"
            continue
        if request.expires_unix_s > (time.time() if now is None else now):
            yield place, request


def look_s(ranks: int) -> float:
    """Seconds between two looks of each of so many ranks."""
    return max(LOOK_S, ranks / MOST_LOOKS)


def _read(path: Path) -> bytes:
    with path.open("rb") as stream:
        content = stream.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES} bytes")
    return content


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))} {first['msg']}".strip()
    return str(error).partition("\n")[0]


def told(name: str, answer: Answer) -> str:
    """Text of the event `PROFILE` that says what became of a request."""
    return json.dumps({"name": name, "state": answer.state, "text": answer.text, "bytes": answer.num_bytes})


PROFILE = "profile"
"""Instant of a rank that ends, refuses or fails to take a profile; its step is the rank's."""
