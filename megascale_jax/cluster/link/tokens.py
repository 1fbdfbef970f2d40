"""Tokens: who the peer at the other end of a connection is, and what it may do, signed with HMAC-SHA256.

``v1.PAYLOAD.MAC``, both in URL-safe base64; the payload is the JSON of `Token`. Whoever holds the signing key makes tokens; whoever
holds a token is its subject until it expires, so both live in files for their owner only. There is no list of revoked tokens: a new
signing key voids them all. A token is checked when its holder connects: one that expires later ends no connection, but lets nobody
come back.
"""

import base64
import binascii
import hashlib
import hmac
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megascale_jax.errors import LinkError

LONGEST_TOKEN = 4096
"""Characters."""

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
"""Pattern of a subject: host names, Slurm's node names, people's account names."""

_CONTEXT = b"megascale_jax control token "
_VERSION = "v1"


class Role(StrEnum):
    """What a peer is: a node's executor, or an operator with the rights of his role and of those before it."""

    NODE = "node"
    VIEW = "view"
    OPERATE = "operate"
    ADMIN = "admin"


class Token(BaseModel):
    """What a token says. ``expires``: seconds since 1970."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(pattern=NAME)
    role: Role
    job: str = Field(min_length=1, max_length=128)
    expires: int = Field(ge=0)


class TokenRefused(LinkError):
    """A token that does not let its holder in; the text says why, for the driver's log only."""


def sign(key: bytes, token: Token) -> str:
    """The token as its holder shows it."""
    payload = f"{_VERSION}.{_encode(token.model_dump_json().encode())}"
    return f"{payload}.{_encode(_mac(key, payload))}"


def verify(key: bytes, text: str, job: str, now: float) -> Token:
    """What the token says, after its signature, job and expiry were checked; ``now``: seconds since 1970. Raises TokenRefused."""
    payload, _, mac = text.rpartition(".")
    try:
        given = _decode(mac)
        text.encode("ascii")
    except ValueError as error:
        raise TokenRefused("the token is not in the form v1.PAYLOAD.MAC") from error
    if not hmac.compare_digest(given, _mac(key, payload)):
        raise TokenRefused("the token's signature is wrong: changed, or signed with another key")
    token = read_unverified(text)
    # In constant time too, although neither is a secret.
    if not hmac.compare_digest(token.job.encode(), job.encode()):
        raise TokenRefused(f"the token is for job {token.job}; this is job {job}")
    if now >= token.expires:
        raise TokenRefused(f"the token of {token.name} expired {now - token.expires:.0f} s ago")
    return token


def read_unverified(text: str) -> Token:
    """What a token says, for its holder, who cannot check the signature. Raises TokenRefused when it is none."""
    if len(text) > LONGEST_TOKEN:
        raise TokenRefused(f"a token of {len(text)} characters; expected at most {LONGEST_TOKEN}")
    parts = text.split(".")
    if len(parts) != 3 or parts[0] != _VERSION:
        raise TokenRefused("the token is not in the form v1.PAYLOAD.MAC")
    try:
        return Token.model_validate_json(_decode(parts[1]))
    except ValidationError as error:
        raise TokenRefused(f"the token's payload is not understood: {error.errors(include_input=False)[0]['msg']}") from error
    except ValueError as error:
        raise TokenRefused("the token's payload is not base64") from error


def _mac(key: bytes, payload: str) -> bytes:
    return hmac.new(key, _CONTEXT + payload.encode(), hashlib.sha256).digest()


def _encode(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise ValueError("not base64") from error
