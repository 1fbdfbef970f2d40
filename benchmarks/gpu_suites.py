"""The operators' shared suites of ``tests/kernels`` on the device, with the block sizes that it uses; and what only a device can show.

The values of every tile of the table are checked where tiles are ranked (`gpu_operators.py`).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megascale_jax.config.schema import TRITON_HEAD_SIZES
from megascale_jax.kernels.attention import api
from megascale_jax.kernels.target import Target
from tests.kernels import attention_suite, elementwise_suite
from tests.kernels.attention_suite import Case

Job = Callable[[], dict[str, Any]]


def suite_jobs(target: Target, dry: bool) -> Iterator[tuple[str, Job]]:
    """A job a case, the most telling first; the wanted result is ``right``."""
    yield "attention by triton gives the same bits twice", partial(same_bits, target, dry)
    yield from elementwise_jobs(target, dry)
    for case in attention_cases(dry):
        for implementation in ("triton", "cudnn"):
            if runs(case, implementation, target):
                yield f"attention by {implementation} {case.name}", partial(judged, attention_suite.check, case, implementation, target)


def attention_cases(dry: bool) -> list[Case]:
    """Every shape and mask is compiled anew on a device, so it sees a part of the cases that the interpreter sees."""
    block, head, dtype = (32, 32, "float32") if dry else (128, 64, "bfloat16")
    sizes = (32, 48) if dry else TRITON_HEAD_SIZES
    documents = [replace(case, head=head, dtype=dtype) for case in attention_suite.documents_cases(block)]
    edges = [replace(case, head=head, dtype=dtype) for case in attention_suite.edge_cases(block)]
    several = [*attention_suite.type_cases(2 * block + 7, sizes), *documents, *attention_suite.extreme_cases(dtype), *edges[::3]]
    return several[::9] if dry else several


def runs(case: Case, implementation: str, target: Target) -> bool:
    """Whether an implementation takes a case; rows without a token and more documents than it has room for are not cuDNN's."""
    if api.refusals(case.head, jnp.dtype(case.dtype), case.window, target)[implementation] is not None:
        return False
    return implementation != "cudnn" or case.segments is None or 0 < len(case.segments) <= target.max_documents


def elementwise_jobs(target: Target, dry: bool) -> Iterator[tuple[str, Job]]:
    """Checks of the other Triton kernels."""
    suite, triton = elementwise_suite, {"implementation": "triton", "target": target}
    types = ("float32",) if dry else ("bfloat16", "float32")
    norms = [(33, 7)] if dry else [(2048, 2000), (12288, 128), (1000, 7), (8192, 7)]
    shapes = [(5, 37)] if dry else [(257, 6144), (5, 37)]
    for kind, (width, rows), dtype in product(("layernorm", "rmsnorm"), norms, types):
        yield f"{kind} {2 * rows}x{width} {dtype}", partial(judged, suite.check_norm, kind, width, dtype, True, rows=rows, **triton)
    for gated, shape, dtype in product((True, False), shapes, types):
        name = f"{'swiglu' if gated else 'gelu'} {shape} {dtype}"
        yield name, partial(judged, suite.check_activation, gated, True, shape, dtype, **triton)
    for ways, dtype in product((1, 4), types):
        yield f"loss over {ways} {dtype}", partial(judged, suite.check_loss, ways, 37, dtype, size=1e3, **triton)


def judged(check: Callable[..., None], *arguments: Any, **options: Any) -> dict[str, Any]:
    """Run a check; an AssertionError is a wrong value."""
    try:
        check(*arguments, **options)
    except AssertionError as error:
        return {"result": f"wrong: {str(error).splitlines()[0]}"}
    return {"result": "right"}


def same_bits(target: Target, dry: bool) -> dict[str, Any]:
    """The gradients of two runs, which atomics would tell apart."""
    length, heads, head, dtype = (70, 2, 32, "float32") if dry else (4096, 8, 128, "bfloat16")
    q, k, v, d_out = (jax.random.normal(jax.random.key(n), (1, length, heads, head), dtype) for n in range(4))

    @jax.jit
    def gradients(q, k, v, d_out):
        return jax.vjp(lambda *x: api.attention(*x, window=length // 2, implementation="triton", target=target), q, k, v)[1](d_out)

    first, second = gradients(q, k, v, d_out), gradients(q, k, v, d_out)
    same = all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(first, second, strict=True))
    return {"result": "right" if same else "wrong: two runs differ"}
