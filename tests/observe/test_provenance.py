"""Revision and versions that a run records."""

import subprocess

from megascale_jax.observe import provenance


def git(folder, *arguments):
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    subprocess.run(["git", *identity, "-C", str(folder), *arguments], check=True, capture_output=True)


def test_commit_is_known_only_when_the_file_itself_is_tracked(tmp_path):
    git(tmp_path, "init")
    (tmp_path / "other.txt").write_text("x")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "theirs")
    (tmp_path / "provenance.py").write_text("installed here")
    assert provenance.source_commit(tmp_path) is None
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "ours")
    commit = provenance.source_commit(tmp_path)
    assert commit is not None and len(commit) == 40
    (tmp_path / "provenance.py").write_text("changed")
    assert provenance.source_commit(tmp_path) == f"{commit}-dirty"


def test_commit_is_unknown_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.source_commit() is None


def test_versions_name_what_decides_the_numbers():
    assert {"jax", "jaxlib", "orbax-checkpoint"} <= provenance.library_versions().keys()
