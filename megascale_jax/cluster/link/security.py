"""The files that authenticate one end of the control link, checked before the first connection.

`Security.load` takes them from a folder of `megascale certs init`; a `Security` made of other paths (a company's authority) is
checked by `check` alike. The driver needs the signing key, everyone else a token. Secrets are read when needed and kept nowhere.
"""

import datetime
import os
import ssl
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

from megascale_jax.checkpoint.cipher import read_key, read_private
from megascale_jax.cluster.link.certificates import DRIVER_NAME, write_private
from megascale_jax.cluster.link.tokens import Role, Token, TokenRefused, read_unverified, sign
from megascale_jax.errors import UsageError

TOKEN_FILE = "MEGASCALE_TOKEN_FILE"
"""Environment variable that names the token file where nothing else does."""

_MAKE = "make one with `megascale certs init FOLDER`, or name the right folder"
_MAKE_TOKEN = "make one with `megascale certs token FOLDER --name NAME --role ROLE`"


@dataclass(frozen=True, kw_only=True)
class Security:
    """Paths of one end. ``server_name``: what the driver's certificate must be for; default the host connected to.

    ``shown``: a client's token itself, in place of its file: of somebody on whose behalf this process asks.
    """

    ca: Path
    certificate: Path
    key: Path
    job: str
    token: Path | None = None
    signing_key: Path | None = None
    server_name: str | None = None
    shown: str = field(default="", repr=False)

    @classmethod
    def load(cls, folder: str | Path, *, role: Literal["driver", "client"], token: str | Path | None = None, shown: str = "") -> Self:
        """The files of ``folder``, checked. ``token``: a client's token file; default as the environment says, else the only one there.

        ``shown``: the token itself; no file is looked for then.

        Raises UsageError: something is missing, expired, readable by others, or does not belong together.
        """
        place = Path(folder).expanduser()
        if not place.is_dir():
            raise UsageError(f"{place} is no folder; expected the certificates of `megascale certs init`")
        try:
            job = (place / "job").read_text().strip()
        except OSError as error:
            raise UsageError(f"the job's identity {place / 'job'} cannot be read: {error.strerror}; {_MAKE}") from error
        has_file = role == "client" and not shown
        chosen = Path(token or os.environ.get(TOKEN_FILE) or _only_token(place)).expanduser() if has_file else None
        security = cls(
            ca=place / "ca.pem",
            certificate=place / f"{role}.pem",
            key=place / f"{role}.key",
            job=job,
            token=chosen,
            signing_key=place / "signing.key" if role == "driver" else None,
            server_name=DRIVER_NAME,
            shown=shown,
        )
        security.check()
        return security

    def check(self) -> None:
        """Raises UsageError when a file is missing, expired, readable by others, or does not belong to the others."""
        ca, certificate = _read_certificate(self.ca, "authority"), _read_certificate(self.certificate, "certificate")
        try:
            certificate.verify_directly_issued_by(ca)
        except (ValueError, TypeError, InvalidSignature) as error:
            raise UsageError(f"{self.certificate} was not signed by {self.ca}; take both from the same `megascale certs init`") from error
        content = read_private(self.key, "private key", _MAKE)
        try:
            key = serialization.load_pem_private_key(content, None)
        except (ValueError, TypeError) as error:
            raise UsageError(f"{self.key} is no private key in PEM without a passphrase; {_MAKE}") from error
        if key.public_key() != certificate.public_key():
            raise UsageError(f"{self.key} is not the key of {self.certificate}; take both from the same `megascale certs init`")
        if self.signing_key is not None:
            self.read_signing_key()
        if self.token is not None or self.shown:
            self._check_token(self.read_token())

    def read_signing_key(self) -> bytes:
        """The key of tokens. Raises UsageError."""
        if self.signing_key is None:
            raise UsageError("no signing key for tokens was named; only the driver's end has one")
        return read_key(self.signing_key, "signing key", _MAKE)

    def read_token(self) -> str:
        """The token as it is shown to the driver. Raises UsageError."""
        if self.shown:
            return self.shown
        if self.token is None:
            raise UsageError(f"no token was named; {_MAKE_TOKEN}")
        return read_private(self.token, "token", _MAKE_TOKEN).decode("ascii", "replace").strip()

    def server_context(self) -> ssl.SSLContext:
        """TLS 1.3 for the driver; a client must show a certificate of the authority."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        # Sessions are never resumed: a peer connects once and stays. Tickets would cost two messages a handshake.
        context.num_tickets = 0
        return context

    def client_context(self) -> ssl.SSLContext:
        """TLS 1.3 for a client; the driver must show a certificate of the authority for its host."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        try:
            context.load_verify_locations(self.ca)
            # Without a password callback OpenSSL would ask the terminal for an encrypted key's passphrase.
            context.load_cert_chain(self.certificate, self.key, password=_no_passphrase)
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.ca}, {self.certificate} and {self.key} cannot be loaded: {error}; {_MAKE}") from error
        return context

    @property
    def _token_name(self) -> str:
        return f"token {self.token}" if self.token is not None else "the token that was shown"

    def _check_token(self, text: str) -> None:
        try:
            token = read_unverified(text)
        except TokenRefused as error:
            raise UsageError(f"{self._token_name}: {error}; {_MAKE_TOKEN}") from error
        if token.expires <= time.time():
            raise UsageError(f"{self._token_name} of {token.name} has expired; {_MAKE_TOKEN}")
        if token.job != self.job:
            raise UsageError(f"{self._token_name} is for job {token.job}; expected job {self.job}; {_MAKE_TOKEN}")


def make_token(security: Security, name: str, role: Role, *, days: float, path: Path, job: str | None = None, force: bool = False) -> Token:
    """Sign a token with the driver's key and write it to ``path``, for its owner only; what it says. ``job`` default: the folder's.

    Raises UsageError: a name that is none, no signing key, or a file that is already there and not to be replaced.
    """
    try:
        token = Token(name=name, role=role, job=job or security.job, expires=int(time.time() + days * 86400))
    except ValueError as error:
        raise UsageError(f"no token for {name!r}: expected letters, digits, '.', '_' and '-', at most 63 of them") from error
    write_private({path: (sign(security.read_signing_key(), token) + "\n").encode()}, force=force)
    return token


def _read_certificate(path: Path, what: str) -> x509.Certificate:
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{what} {path} cannot be read: {error.strerror}; {_MAKE}") from error
    except ValueError as error:
        raise UsageError(f"{what} {path} is no certificate in PEM; {_MAKE}") from error
    now = datetime.datetime.now(datetime.UTC)
    if now >= certificate.not_valid_after_utc:
        raise UsageError(f"{what} {path} expired on {certificate.not_valid_after_utc:%Y-%m-%d}; make new ones with `megascale certs init`")
    if now < certificate.not_valid_before_utc:
        raise UsageError(f"{what} {path} is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC only; is this clock right?")
    return certificate


def _only_token(folder: Path) -> Path:
    found = sorted(folder.glob("*.token"))
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{folder} holds {len(found)} tokens; name one of them in {TOKEN_FILE} or on the command line")
    raise UsageError(f"{folder} holds no token; {_MAKE_TOKEN}")


def _no_passphrase() -> str:
    raise ValueError("the private key is locked by a passphrase")
