"""Makes the checkpoint that every later release must load: ``python -m tests.checkpoint.make_fixture FORMAT``.

Run once when the format changes, never again for a format that has been released.
"""

import json
import shutil
import sys
import zlib
from pathlib import Path

import numpy as np

from megascale_jax.checkpoint.inspect import whole_arrays
from megascale_jax.checkpoint.manifest import FORMAT
from megascale_jax.comm.storage import Storage
from tests.checkpoint.states import plan, published

FIXTURES = Path(__file__).parent / "fixtures"
MODEL = {"hidden_size": 6, "num_heads": 2, "head_size": 2, "mlp_size": 6, "vocab_size": 11, "sequence_length": 8, "num_layers": 3}
MESH = {"pipe": 2, "data": 2, "virtual_stages": 1, "layers": (1, 2)}
STEP = 7


def digests(folder: Path) -> dict[str, int]:
    """CRC-32 of every logical array's bytes."""
    return {name: zlib.crc32(np.ascontiguousarray(value).tobytes()) for name, value in whole_arrays(Storage(folder), STEP, "")}


def main() -> None:
    folder = FIXTURES / f"format-{FORMAT}"
    if sys.argv[1:] != [str(FORMAT)] or folder.exists():
        raise SystemExit(f"this release writes format {FORMAT}; give that number, and only where {folder} does not exist yet")
    try:
        published(folder, plan(**MESH, **MODEL), STEP)
        (folder / "expected.json").write_text(json.dumps(digests(folder), indent=1) + "\n")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


if __name__ == "__main__":
    main()
