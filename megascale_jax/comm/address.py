"""Which names are addresses of object stores rather than paths. Apart from `storage.py`, whose library takes a moment to load."""

from pathlib import Path

REMOTE = ("gs://", "s3://", "http://", "https://")
READ_ONLY = ("http://", "https://")


def is_remote(place: str | Path) -> bool:
    """Whether this is an address rather than a path."""
    return str(place).startswith(REMOTE)
