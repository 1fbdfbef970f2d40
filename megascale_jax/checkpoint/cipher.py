"""Encryption of blocks at rest: AES-256-GCM with a key from a file, by the `cryptography` library.

Every block has a nonce of its own and is bound to its checkpoint and place, so a changed, exchanged or moved block does not
open. The manifest names the key by a fingerprint from which the key cannot be found, so a wrong key is told from a damaged block. The
manifest itself (configuration, position in the data) is readable without the key.
"""

import hashlib
import os
import secrets
import stat
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from megascale_jax.errors import CheckpointError, DamagedCheckpointError, UsageError

KEY_BYTES = 32
NONCE_BYTES = 12
KEY_FILE = "MEGASCALE_KEY_FILE"
"""Environment variable that names the key file where no configuration does."""


class Cipher:
    """Seals and opens blocks with the key of one file."""

    def __init__(self, key_file: str | Path):
        """Raises UsageError when the file is no key, or when others may read it."""
        key = read_key(Path(key_file).expanduser())
        self.key_id = hashlib.sha256(b"megascale_jax checkpoint key" + key).hexdigest()[:16]
        self._aead = AESGCM(key)

    def seal(self, content: bytes, place: str) -> bytes:
        """Nonce, sealed content and its tag."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + self._aead.encrypt(nonce, content, place.encode())

    def open(self, sealed: bytes, place: str) -> bytes:
        """The inverse of `seal`. Raises DamagedCheckpointError when a bit is not as it was sealed for this place."""
        try:
            return self._aead.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], place.encode())
        except (InvalidTag, ValueError) as error:
            raise DamagedCheckpointError(f"{place} does not open: its content is not what was sealed") from error


def cipher_for(key_id: str, key_file: str | Path | None, where: str) -> Cipher | None:
    """What opens a checkpoint sealed with the key ``key_id``; ``None`` for one that is not sealed.

    ``key_file`` default: as the environment says. Raises CheckpointError when there is no key, or another one.
    """
    if not key_id:
        return None
    chosen = key_file or os.environ.get(KEY_FILE)
    if not chosen:
        raise CheckpointError(f"{where} is encrypted (key {key_id}); name the key file in train.checkpoint.key_file or {KEY_FILE}")
    cipher = Cipher(chosen)
    if cipher.key_id != key_id:
        raise CheckpointError(f"{where} is encrypted with key {key_id}, but {chosen} holds key {cipher.key_id}; name the right key file")
    return cipher


def read_private(path: Path, what: str, make: str) -> bytes:
    """The content of a secret file. Raises UsageError when it cannot be read, or when others can; ``make``: how to come by one.

    The group may read a file of root's: so secrets are mounted into containers that do not run as root.
    """
    try:
        status, content = path.stat(), path.read_bytes()
    except OSError as error:
        raise UsageError(f"{what} {path} cannot be read: {error.strerror}; {make}") from error
    mode = stat.S_IMODE(status.st_mode)
    mounted = status.st_uid == 0 and os.getuid() != 0
    if mode & (0o037 if mounted else 0o077):
        raise UsageError(f"{what} {path} can be read by others (mode {mode:o}); chmod 600 {path}")
    return content


def read_key(path: Path, what: str = "key file", make: str = "make one with `openssl rand -hex 32`") -> bytes:
    """The 32 bytes of a key file, raw or as hex digits. Raises UsageError when it is no key, or when others may read it."""
    content = read_private(path, what, make)
    text = content.strip()
    try:
        key = bytes.fromhex(text.decode()) if len(text) == 2 * KEY_BYTES else content
    except ValueError:
        key = content
    if len(key) != KEY_BYTES:
        raise UsageError(f"{what} {path} holds {len(content)} bytes; expected {KEY_BYTES}, or {2 * KEY_BYTES} hex digits; {make}")
    return key
