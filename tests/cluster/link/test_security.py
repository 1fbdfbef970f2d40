"""Certificates and tokens: what is missing, expired, readable by others or not matching is said; nothing is overwritten."""

import datetime
import errno
import os
import time
from pathlib import Path

import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from megascale_jax.cli.certs import app
from megascale_jax.cluster.job import secure
from megascale_jax.cluster.link import certificates
from megascale_jax.cluster.link.certificates import make_folder
from megascale_jax.cluster.link.security import TOKEN_FILE, Security, make_token
from megascale_jax.cluster.link.tokens import Role, Token, TokenRefused, read_unverified, sign, verify
from megascale_jax.errors import UsageError

KEY = b"k" * 32


@pytest.fixture
def made(tmp_path):
    """A folder with certificates and one token."""
    make_folder(tmp_path / "certs", ["node-0.cluster"], job="job-1")
    make_token(Security.load(tmp_path / "certs", role="driver"), "node-1", Role.NODE, days=1, path=tmp_path / "certs" / "node-1.token")
    return tmp_path / "certs"


def test_both_ends_load_and_files_are_for_their_owner_only(made):
    assert Security.load(made, role="driver").job == "job-1"
    assert read_unverified(Security.load(made, role="client").read_token()).name == "node-1"
    assert {path.stat().st_mode & 0o777 for path in made.iterdir()} == {0o600}
    assert made.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("role", "harm", "expected"),
    [
        ("driver", lambda f: (f / "job").unlink(), "job's identity .* cannot be read: No such file"),
        ("driver", lambda f: (f / "ca.pem").unlink(), "authority .*ca.pem cannot be read: No such file .*certs init"),
        ("driver", lambda f: (f / "driver.key").unlink(), "private key .*driver.key cannot be read"),
        ("driver", lambda f: (f / "signing.key").chmod(0o644), "signing key .* can be read by others .*chmod 600"),
        ("driver", lambda f: (f / "signing.key").write_text("short"), "signing key .* holds 5 bytes; expected 32"),
        ("driver", lambda f: (f / "driver.key").chmod(0o640), "private key .* can be read by others"),
        ("driver", lambda f: (f / "driver.pem").write_text("x"), "is no certificate in PEM"),
        ("driver", lambda f: (f / "driver.key").write_text("x"), "is no private key in PEM"),
        ("driver", lambda f: (f / "driver.key").write_bytes((f / "client.key").read_bytes()), "is not the key of"),
        ("client", lambda f: (f / "node-1.token").chmod(0o604), "token .* can be read by others"),
        ("client", lambda f: (f / "node-1.token").write_text("x"), "not in the form"),
        ("client", lambda f: (f / "job").write_text("job-2"), "is for job job-1; expected job job-2"),
        ("client", lambda f: (f / "node-1.token").unlink(), "holds no token"),
        ("client", lambda f: (f / "b.token").write_text("x"), "holds 2 tokens; name one"),
    ],
)
def test_what_is_wrong_is_said(made, role, harm, expected):
    harm(made)
    with pytest.raises(UsageError, match=expected):
        Security.load(made, role=role)


def test_another_authority(made, tmp_path):
    make_folder(tmp_path / "other", [])
    (made / "ca.pem").write_bytes((tmp_path / "other" / "ca.pem").read_bytes())
    with pytest.raises(UsageError, match="was not signed by"):
        Security.load(made, role="driver")


@pytest.mark.parametrize(("days", "backdated", "expected"), [(-1, 5, "expired on"), (9, -5, "is valid from")])
def test_expired_and_not_yet_valid(tmp_path, monkeypatch, days, backdated, expected):
    monkeypatch.setattr(certificates, "_BACKDATED", datetime.timedelta(days=backdated))
    make_folder(tmp_path / "certs", [], days=days)
    with pytest.raises(UsageError, match=expected):
        Security.load(tmp_path / "certs", role="driver")


def test_an_expired_token(made):
    (made / "node-1.token").write_text(sign(KEY, Token(name="node-1", role=Role.NODE, job="job-1", expires=5)))
    with pytest.raises(UsageError, match="of node-1 has expired"):
        Security.load(made, role="client")


def test_the_environment_names_a_token(made, monkeypatch):
    make_token(Security.load(made, role="driver"), "alice", Role.ADMIN, days=1, path=made / "alice.token")
    monkeypatch.setenv(TOKEN_FILE, str(made / "alice.token"))
    assert read_unverified(Security.load(made, role="client").read_token()).role is Role.ADMIN


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to others")
def test_a_secret_of_roots_may_be_read_by_its_group(made, monkeypatch):
    (made / "signing.key").chmod(0o440)
    with pytest.raises(UsageError, match="can be read by others"):
        Security.load(made, role="driver")
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    Security.load(made, role="driver")


def test_nothing_is_overwritten_without_force(made):
    before = {path: path.read_bytes() for path in made.iterdir()}
    (made / "ca.key").unlink()
    with pytest.raises(UsageError, match="already there"):
        make_folder(made, [])
    assert not (made / "ca.key").exists(), "all or none"
    make_folder(made, [], force=True)
    assert (made / "signing.key").read_bytes() != before[made / "signing.key"]


def test_a_first_start_that_fails_leaves_nothing_that_the_next_one_stumbles_over(tmp_path, monkeypatch):
    """A disk that is full at the third file; then a machine that goes down between two files."""

    def fail_at(number):
        left, real = [number], os.fsync

        def fsync(descriptor):
            left[0] -= 1
            if left[0] == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(descriptor)

        return fsync

    place = tmp_path / "security"
    with monkeypatch.context() as patch:
        patch.setattr(certificates.os, "fsync", fail_at(3))
        with pytest.raises(UsageError, match="cannot be written: No space left"):
            secure(tmp_path, ("node-0",))
    assert list(place.iterdir()) == []
    (place / "ca.pem").write_text("half a certif")
    (place / "driver.key").touch()
    assert secure(tmp_path, ("node-0",)) == place
    Security.load(place, role="client", token=place / "tokens" / "node-0")


@pytest.mark.parametrize("content", ["", "v1.x", "v1.a.b\n"])
def test_a_token_that_is_broken_is_made_anew_and_others_stay(tmp_path, content):
    tokens = secure(tmp_path, ("node-0", "node-1")) / "tokens"
    kept = (tokens / "node-1").read_text()
    (tokens / "node-0").write_text(content)
    (tokens / "owner").write_text(content)
    place = secure(tmp_path, ("node-0", "node-1"))
    for name in ("node-0", "node-1", "owner"):
        assert read_unverified(Security.load(place, role="client", token=tokens / name).read_token()).name == name
    assert (tokens / "node-1").read_text() == kept


def test_a_folder_that_is_replaced_has_no_identity_until_all_is_new(made, monkeypatch):
    def crash(self, target):
        if target.name == "client.pem":
            raise OSError(errno.EIO, "Input/output error")
        return real(self, target)

    real = Path.replace
    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(UsageError, match=r"client\.pem cannot be written"):
        make_folder(made, [], force=True)
    assert not (made / "job").exists()


NAMES = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")


@given(NAMES, st.sampled_from(Role), st.text(st.characters(codec="utf-8"), min_size=1, max_size=128), st.integers(0, 2**40))
def test_a_token_says_what_was_signed_until_it_expires(name, role, job, expires):
    token = Token(name=name, role=role, job=job, expires=expires)
    text = sign(KEY, token)
    if expires > 0:
        assert verify(KEY, text, job, expires - 1) == token
    with pytest.raises(TokenRefused, match="expired"):
        verify(KEY, text, job, expires)
    with pytest.raises(TokenRefused, match="is for job"):
        verify(KEY, text, job + "x", 0)
    with pytest.raises(TokenRefused, match="signature"):
        verify(b"x" * 32, text, job, 0)


TOKEN = sign(KEY, Token(name="node-1", role=Role.NODE, job="job-1", expires=1000))


@given(st.integers(0, len(TOKEN) - 1), st.characters(codec="utf-8"))
def test_a_changed_token_is_refused_or_the_same(place, character):
    changed = TOKEN[:place] + character + TOKEN[place + 1 :]
    try:
        assert verify(KEY, changed, "job-1", 0).role is Role.NODE
    except TokenRefused:
        return
    # The last character of base64 holds bits that mean nothing.
    assert changed[:-1] == TOKEN[:-1]


@given(st.text())
def test_any_text_is_refused_without_another_exception(text):
    with pytest.raises(TokenRefused):
        verify(KEY, text, "job-1", 0)
    with pytest.raises(TokenRefused):
        read_unverified(text)


@pytest.mark.parametrize("name", ["", "../x", "a b", "-x", "x" * 64, "node\n"])
def test_names_that_are_none(made, name):
    with pytest.raises(UsageError, match="no token for"):
        make_token(Security.load(made, role="driver"), name, Role.NODE, days=1, path=made / "x.token")


def test_the_command_line(tmp_path):
    place = str(tmp_path / "certs")
    result = CliRunner().invoke(app, ["init", place, "--host", "node-0.cluster", "--host", "10.0.0.7", "--job", "job-1"])
    assert result.exit_code == 0 and "signing.key" in result.output
    result = CliRunner().invoke(app, ["token", place, "--name", "alice", "--role", "admin", "--days", "2"])
    assert result.exit_code == 0 and "alice as admin of job job-1" in result.output
    text = (tmp_path / "certs" / "alice.token").read_text().strip()
    assert text not in result.output
    said = verify(Security.load(place, role="driver").read_signing_key(), text, "job-1", time.time())
    assert (said.name, said.role) == ("alice", Role.ADMIN) and 1.9 < (said.expires - time.time()) / 86400 <= 2
    assert isinstance(CliRunner().invoke(app, ["token", place, "--name", "../x", "--role", "admin"]).exception, UsageError)
    assert isinstance(CliRunner().invoke(app, ["init", place]).exception, UsageError)
    assert isinstance(CliRunner().invoke(app, ["init", place, "--force", "--host", "ü"]).exception, UsageError)


def test_a_driver_is_known_by_its_name_wherever_it_comes_up(tmp_path):
    """After a new start on a host that the certificate does not name: the certificate is checked for the job's fixed name instead."""
    make_folder(tmp_path / "certs", ["10.0.0.7"])
    client = Security.load(tmp_path / "certs", role="driver")
    names = x509.load_pem_x509_certificate(client.certificate.read_bytes()).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert client.server_name in names.value.get_values_for_type(x509.DNSName)
    assert str(names.value.get_values_for_type(x509.IPAddress)[0]) == "10.0.0.7"
