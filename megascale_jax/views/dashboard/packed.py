"""Arrays with what they mean, as bytes that a browser uses without parsing numbers: for grids of a million cells.

4 bytes     length of the header, little-endian, a multiple of 8 less 4
header      JSON: what was given, and ``arrays``: name -> [type, first byte after the header, count]; padded with spaces
arrays      little-endian, each at a multiple of 8
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from megascale_jax.observe.report import json_ready

TYPES = {"uint8", "int16", "int32", "float32"}
UNKNOWN = -32768
"""Of a fraction that is not known."""
_PER_UNIT = 10_000
_ALIGN = 8


def packed(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> bytes:
    """Facts, which JSON can hold, and arrays of `TYPES`. Raises KeyError, ValueError for others."""
    places, parts, at = {}, [], 0
    for name, array in (arrays or {}).items():
        if array.dtype.name not in TYPES:
            raise ValueError(f"{name} is {array.dtype}; expected one of {', '.join(sorted(TYPES))}")
        content = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        places[name] = [array.dtype.name, at, array.size]
        parts += [content, b"\0" * (-len(content) % _ALIGN)]
        at += len(content) + -len(content) % _ALIGN
    header = json.dumps(json_ready({**facts, "arrays": places}), allow_nan=False).encode()
    header += b" " * (-(len(header) + 4) % _ALIGN)
    return b"".join([len(header).to_bytes(4, "little"), header, *parts])


def fractions(values: np.ndarray) -> np.ndarray:
    """Fractions as int16 in ten-thousandths, `UNKNOWN` for NaN; what is beyond 3.27 becomes that."""
    whole = np.clip(np.nan_to_num(values, nan=0.0) * _PER_UNIT, 1 + UNKNOWN, -1 - UNKNOWN)
    return np.where(np.isnan(values), UNKNOWN, np.rint(whole)).astype(np.int16)
