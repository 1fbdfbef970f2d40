"""A job's folder below its run folder: journal, certificates and tokens, nodes."""

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megascale_jax.cluster.journal import Journal
from megascale_jax.cluster.lifecycle import ENDS
from megascale_jax.cluster.link.certificates import make_folder
from megascale_jax.cluster.link.security import Security, make_token
from megascale_jax.cluster.link.tokens import Role, TokenRefused, verify
from megascale_jax.cluster.policy import apply, first_state
from megascale_jax.cluster.ports import free_ports
from megascale_jax.cluster.state import Shape, State
from megascale_jax.config.cluster import JOB_FOLDER, ClusterConfig
from megascale_jax.errors import RunFolderError

JOURNAL_FILE = "journal.sqlite"
SECURITY_FOLDER = "security"
SECURITY_VARIABLE = "MEGASCALE_SECURITY"
"""Environment variable with the folder of the certificates where it is not below the job's."""
TOKEN_DAYS = 365.0
_PORT = "port"
_HOST = "host"
_COMMAND = "command"
_LAUNCH = "launch"
_TERMS = "terms"


def job_folder(run: Path) -> Path:
    """Where the driver of a run keeps what it knows."""
    return run / JOB_FOLDER


def open_journal(folder: Path, shapes: tuple[Shape, ...], config: ClusterConfig) -> Journal:
    """The journal of the job that is under way, or a new one; that of a job that has ended is kept beside it.

    The events of a job mean what they did only with the sizes and settings that it began with. Raises RunFolderError for a job under way
    with others, and for a journal that cannot be read.
    """
    path = folder / JOURNAL_FILE
    journal = Journal(path)
    terms = terms_text(shapes, config)
    if (known := journal.fact(_TERMS)) is not None and known != terms:
        if _replayed(journal, *terms_of(known, config)).phase not in ENDS:
            journal.close()
            changes = ", ".join(_changes(json.loads(known), json.loads(terms)))
            raise RunFolderError(
                f"this job is under way with other sizes or settings ({changes}); stop it first "
                "(`megascale job stop RUN`, or the old command and Ctrl-C), or go on with the old ones"
            )
        journal = _kept_aside(journal, path)
    elif _replayed(journal, shapes, config).phase in ENDS:
        journal = _kept_aside(journal, path)
    journal.keep(_TERMS, terms)
    return journal


def is_under_way(folder: Path) -> bool:
    """Whether a job of this folder has begun and not ended. Raises as `open_journal` does."""
    if not (folder / JOURNAL_FILE).is_file():
        return False
    journal = Journal(folder / JOURNAL_FILE)
    try:
        if (known := journal.fact(_TERMS)) is None:
            return False
        return any(True for _ in journal.events()) and _replayed(journal, *terms_of(known, ClusterConfig())).phase not in ENDS
    finally:
        journal.close()


def _kept_aside(journal: Journal, path: Path) -> Journal:
    journal.close()
    number = 1 + len(list(path.parent.glob("journal-*.sqlite")))
    path.rename(path.parent / f"journal-{number}.sqlite")
    return Journal(path)


def _replayed(journal: Journal, shapes: tuple[Shape, ...], config: ClusterConfig) -> State:
    state = first_state(shapes)
    for event in journal.events():
        state = apply(state, event, config)
    return state


def terms_text(shapes: tuple[Shape, ...], config: ClusterConfig) -> str:
    """Sizes and settings as a journal keeps them."""
    return json.dumps(
        {"shapes": [shape.model_dump(mode="json") for shape in shapes], "cluster": config.model_dump(mode="json", exclude={"webhook"})}
    )


def terms_of(text: str, otherwise: ClusterConfig) -> tuple[tuple[Shape, ...], ClusterConfig]:
    """Sizes and settings that a journal's job began with; settings of another release are ``otherwise``.

    Raises ValueError (pydantic's too) or KeyError for what is none.
    """
    terms = json.loads(text)
    shapes = tuple(Shape.model_validate(shape) for shape in terms["shapes"])
    try:
        return shapes, ClusterConfig.model_validate_json(json.dumps(terms["cluster"]))
    except ValidationError:  # of a release with other settings
        return shapes, otherwise


def _changes(began: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    if began["shapes"] != now["shapes"]:
        yield f"{began['shapes'][0]['num_nodes']} nodes, now {now['shapes'][0]['num_nodes']}"
    for name in sorted({*began["cluster"], *now["cluster"]}):
        old, new = began["cluster"].get(name), now["cluster"].get(name)
        if old != new:
            yield f"cluster.{name} {old}, now {new}"


def ended_under(folder: Path, launch: str, shapes: tuple[Shape, ...], config: ClusterConfig) -> State | None:
    """The job if it has ended under this very launch: whatever starts its driver again must not begin it anew.

    ``launch`` empty: nothing starts it again. Raises RunFolderError for a journal that cannot be read.
    """
    if not launch or not (folder / JOURNAL_FILE).is_file():
        return None
    journal = Journal(folder / JOURNAL_FILE)
    try:
        if journal.fact(_LAUNCH) != launch:
            return None
        state = _replayed(journal, shapes, config)
        return state if state.phase in ENDS else None
    finally:
        journal.close()


def keep_launch(journal: Journal, launch: str) -> None:
    """Note under which launch the job goes on."""
    journal.keep(_LAUNCH, launch)


def check_command(journal: Journal, command: Sequence[str]) -> None:
    """Executors of a job that is under way were started with its command. Raises RunFolderError for another one."""
    said = json.dumps(command)
    if (known := journal.fact(_COMMAND)) is not None and known != said:
        raise RunFolderError(
            f"this job is under way with another command: {' '.join(json.loads(known)[3:])}; stop it first (`megascale job stop RUN`, or "
            "the old command and Ctrl-C)"
        )
    journal.keep(_COMMAND, said)


def port_of(journal: Journal, host: str, wanted: int) -> int:
    """The port of the control link, the same for every driver of the job on a host, since executors come back to it. ``wanted`` 0: any."""
    known = journal.fact(_PORT) if journal.fact(_HOST) in (None, host) else None
    port = wanted or (int(known) if known else free_ports(host, 1)[0])
    journal.keep(_HOST, host)
    journal.keep(_PORT, str(port))
    return port


def secure(folder: Path, names: Sequence[str], hosts: Sequence[str] = ()) -> Path:
    """The job's own certificates, a token for each node and one for this user, made when they are not there; their folder.

    What a start that failed has left of them is made anew, tokens that are broken or have expired too. Raises UsageError when what is
    there is not in order.
    """
    place = folder / SECURITY_FOLDER
    if not (place / "job").is_file():
        make_folder(place, hosts, job=secrets.token_hex(8), force=True)
    security = Security.load(place, role="driver")
    for name, role in (*((name, Role.NODE) for name in names), (OWNER, Role.ADMIN)):
        if not _is_good(token_file(place, name), security):
            make_token(security, name, role, days=TOKEN_DAYS, path=token_file(place, name), force=True)
    return place


def _is_good(token: Path, security: Security) -> bool:
    """Raises UsageError for a token that others can read."""
    if not token.is_file():
        return False
    try:
        verify(security.read_signing_key(), replace(security, token=token).read_token(), security.job, time.time())
    except TokenRefused:
        return False
    return True


OWNER = "owner"
"""Name under which the user who started a local job gives commands."""


def token_file(security: Path, name: str) -> Path:
    """The token of a node or a person."""
    return security / "tokens" / name
