"""One question to the driver of a run folder, for command lines and drills."""

import os
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megascale_jax.cluster.driver_process import address_of
from megascale_jax.cluster.job import OWNER, SECURITY_FOLDER, SECURITY_VARIABLE, job_folder, token_file
from megascale_jax.cluster.link.client import ask
from megascale_jax.cluster.link.security import Security
from megascale_jax.cluster.messages import Answer, Command, ToNode
from megascale_jax.cluster.ports import parse_address
from megascale_jax.errors import MegascaleError, UsageError

_LIMIT_S = 10.0


def ask_driver(
    run: Path, token: Path | None, action: str, *, driver: str | None = None, security: Path | None = None, shown: str = "", **values: Any
) -> Answer:
    """One command to the driver of a run folder, and its answer. Raises UsageError, RunFolderError, LinkError.

    ``driver`` (``HOST:PORT``) and ``security`` (ca.pem, client.pem, client.key and job of `megascale certs init`) are for whoever may
    not read the run folder, which is not looked at then. ``token`` default: the one of the user who started the job, else as
    `Security.load` finds it. ``shown``: a token itself, of somebody on whose behalf this process asks.
    """
    folder = job_folder(run)
    address = address_of(folder) if driver is None else parse_address(driver, "--driver")
    named = security or os.environ.get(SECURITY_VARIABLE)
    if driver is not None and not named:
        raise UsageError("--driver without --security: name the folder with ca.pem, client.pem, client.key and job")
    place = Path(named or folder / SECURITY_FOLDER)
    owner = token_file(place, OWNER)
    token = token or (owner if security is None or owner.is_file() else None)
    own = Security.load(place, role="client", token=token, shown=shown)
    answer = ask(own, address, _command(action, values), TypeAdapter(ToNode), _LIMIT_S)
    if not isinstance(answer, Answer):
        raise MegascaleError(f"the driver answered with {type(answer).__name__}, expected an answer to a command")
    return answer


def _command(action: str, values: dict[str, Any]) -> Command:
    """Raises UsageError for what is no command: names and numbers come from people."""
    try:
        return Command.model_validate({"action": action, **values})
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the command"
        raise UsageError(f"this is no command to a driver: {where}: {first['msg']}") from error
