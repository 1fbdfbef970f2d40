"""What produced a number: the source revision and the versions of the libraries that decide it."""

import importlib.metadata
import subprocess
from pathlib import Path

PACKAGE = "megascale_jax"
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
_GIT_LIMIT_S = 5.0


def library_versions() -> dict[str, str]:
    """Installed version of this package, as far as it is installed, and of each library."""
    versions = {}
    for name in (PACKAGE, *LIBRARIES):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def source_commit(folder: Path | None = None) -> str | None:
    """Commit of the checkout that this package runs from, with ``-dirty`` when files differ; ``None`` for an installed wheel.

    An environment may lie inside somebody else's checkout, so the package's own files must be tracked.
    """
    here = folder or Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=_GIT_LIMIT_S, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    commit = git("rev-parse", "HEAD")
    return commit if not commit or not git("status", "--porcelain", "--untracked-files=no") else f"{commit}-dirty"
