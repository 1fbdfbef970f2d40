"""A job's folder below its run folder: journal, certificates and tokens, nodes."""

import json
import secrets
from collections.abc import Sequence
from pathlib import Path

from megascale_jax.cluster.journal import Journal
from megascale_jax.cluster.lifecycle import ENDS
from megascale_jax.cluster.link.certificates import make_folder
from megascale_jax.cluster.link.security import Security, make_token
from megascale_jax.cluster.link.tokens import Role
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


def job_folder(run: Path) -> Path:
    """Where the driver of a run keeps what it knows."""
    return run / JOB_FOLDER


def open_journal(folder: Path, shapes: tuple[Shape, ...], config: ClusterConfig) -> Journal:
    """The journal of the job that is under way, or a new one; that of a job that has ended is kept beside it.

    Raises RunFolderError for a journal that cannot be read.
    """
    path = folder / JOURNAL_FILE
    journal = Journal(path)
    state = first_state(shapes)
    for event in journal.events():
        state = apply(state, event, config)
    if state.phase in ENDS:
        journal.close()
        number = 1 + len(list(folder.glob("journal-*.sqlite")))
        path.rename(folder / f"journal-{number}.sqlite")
        journal = Journal(path)
    return journal


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
        state = first_state(shapes)
        for event in journal.events():
            state = apply(state, event, config)
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

    Raises UsageError when what is there is not in order.
    """
    place = folder / SECURITY_FOLDER
    if not (place / "job").is_file():
        make_folder(place, hosts, job=secrets.token_hex(8))
    security = Security.load(place, role="driver")
    for name in names:
        if not token_file(place, name).is_file():
            make_token(security, name, Role.NODE, days=TOKEN_DAYS, path=token_file(place, name))
    if not token_file(place, OWNER).is_file():
        make_token(security, OWNER, Role.ADMIN, days=TOKEN_DAYS, path=token_file(place, OWNER))
    return place


OWNER = "owner"
"""Name under which the user who started a local job gives commands."""


def token_file(security: Path, name: str) -> Path:
    """The token of a node or a person."""
    return security / "tokens" / name
