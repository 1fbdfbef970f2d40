"""A certificate authority of one's own, and what it signs: P-256 keys, files for their owner only.

ca.pem ca.key            the authority; its key is needed to make certificates only and may be kept elsewhere
driver.pem driver.key    the driver; valid for the name `DRIVER_NAME`, the hosts given, localhost, 127.0.0.1 and ::1
client.pem client.key    executors and operators; what they may do is said by their tokens
signing.key              signs tokens; the driver's
job                      the job's identity, which tokens carry; written last: a folder without it is not a finished one
"""

import contextlib
import datetime
import ipaddress
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from megascale_jax.checkpoint.cipher import KEY_BYTES
from megascale_jax.errors import UsageError

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
DRIVER_NAME = "megascale-driver"
"""What clients of a folder verify: the driver may come up on another host, with the same authority and the same name."""

_BACKDATED = datetime.timedelta(days=1)
"""A node whose clock is behind accepts a new certificate."""


def make_folder(folder: Path, hosts: Sequence[str], *, job: str | None = None, days: int = 365, force: bool = False) -> list[Path]:
    """Make everything in ``folder``; the files. ``job`` default: a random identity.

    Raises UsageError when a host is no name or address, or when a file is there and ``force`` is false.
    """
    names = [_san(host) for host in dict.fromkeys([DRIVER_NAME, *hosts, *LOCAL_HOSTS])]
    ca_key, ca = _authority(days)
    contents = {"ca.pem": _pem(ca), "ca.key": _private(ca_key)}
    for name, usage, sans in (
        ("driver", ExtendedKeyUsageOID.SERVER_AUTH, names),
        ("client", ExtendedKeyUsageOID.CLIENT_AUTH, [x509.DNSName("megascale-client")]),
    ):
        key, certificate = _leaf(ca_key, ca, name, usage, sans, days)
        contents |= {f"{name}.pem": _pem(certificate), f"{name}.key": _private(key)}
    contents |= {"signing.key": secrets.token_hex(KEY_BYTES).encode() + b"\n", "job": f"{job or secrets.token_hex(8)}\n".encode()}
    return write_private({folder / name: content for name, content in contents.items()}, force=force)


def write_private(contents: dict[Path, bytes], *, force: bool) -> list[Path]:
    """Write files for their owner only, all or (when one is there and ``force`` is false) none. Raises UsageError.

    They come to their names once all are on the disk, in this order: where the last one is, all are, and of one and the same call.
    """
    if there := [path for path in contents if path.exists() and not force]:
        raise UsageError(f"{there[0]} is already there and would be overwritten; name another place, or --force to replace it")
    path, written = Path(), dict[Path, Path]()
    try:
        for path, content in contents.items():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
                written[path] = new
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
        if len(contents) > 1:
            path.unlink(missing_ok=True)
        for path, new in written.items():
            new.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        for new in written.values():
            with contextlib.suppress(OSError):
                new.unlink()
    return list(contents)


def _authority(days: int) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"megascale authority {secrets.token_hex(4)}")])
    builder = _builder(name, name, key.public_key(), key.public_key(), days).add_extension(x509.BasicConstraints(True, 0), critical=True)
    return key, builder.add_extension(_key_usage(signs_certificates=True), critical=True).sign(key, hashes.SHA256())


def _leaf(
    ca_key: ec.EllipticCurvePrivateKey,
    ca: x509.Certificate,
    name: str,
    usage: x509.ObjectIdentifier,
    sans: Sequence[x509.GeneralName],
    days: int,
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"megascale {name}")])
    builder = _builder(subject, ca.subject, key.public_key(), ca_key.public_key(), days)
    builder = builder.add_extension(x509.BasicConstraints(False, None), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    return key, builder.add_extension(x509.SubjectAlternativeName(sans), critical=False).sign(ca_key, hashes.SHA256())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, issuer_key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - _BACKDATED).not_valid_after(now + datetime.timedelta(days=days))
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    return builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _san(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise UsageError(f"--host {host!r} is neither a host name in ASCII nor an address") from error


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
