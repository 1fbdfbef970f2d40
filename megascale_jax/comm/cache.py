"""Where this user's compiled programs and prepared corpora are kept. Imports no JAX."""

import os
from collections.abc import Mapping
from pathlib import Path

CACHE = "MEGASCALE_CACHE"


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """``$MEGASCALE_CACHE``, else ``~/.cache/megascale_jax``."""
    chosen = environment.get(CACHE)
    return Path(chosen).expanduser() if chosen else Path("~/.cache/megascale_jax").expanduser()
