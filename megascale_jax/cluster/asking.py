"""One question to the driver of a run folder, for command lines and drills."""

import os
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from megascale_jax.cluster.driver_process import address_of
from megascale_jax.cluster.job import OWNER, SECURITY_FOLDER, SECURITY_VARIABLE, job_folder, token_file
from megascale_jax.cluster.link.client import ask
from megascale_jax.cluster.link.security import Security
from megascale_jax.cluster.messages import Answer, Command, ToNode
from megascale_jax.errors import MegascaleError

_LIMIT_S = 10.0


def ask_driver(run: Path, token: Path | None, action: str, **values: Any) -> Answer:
    """One command to the driver of a run folder, and its answer. Raises UsageError, RunFolderError, LinkError."""
    folder = job_folder(run)
    address = address_of(folder)
    place = Path(os.environ.get(SECURITY_VARIABLE) or folder / SECURITY_FOLDER)
    security = Security.load(place, role="client", token=token or token_file(place, OWNER))
    answer = ask(security, address, Command.model_validate({"action": action, **values}), TypeAdapter(ToNode), _LIMIT_S)
    if not isinstance(answer, Answer):
        raise MegascaleError(f"the driver answered with {type(answer).__name__}, expected an answer to a command")
    return answer
