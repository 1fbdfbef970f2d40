"""Garbage collection at moments that the loop chooses: ranks that collect at different steps wait for one another (paper section 6.3)."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_by_hand() -> Iterator[None]:
    """No automatic garbage collection; what is there already is left out of later ones."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
