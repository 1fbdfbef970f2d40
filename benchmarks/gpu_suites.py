"""Part (a): the operators' shared suites of ``tests/kernels`` on the device, with the block sizes that it uses."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from megascale_jax.config.schema import TRITON_HEAD_SIZES
from megascale_jax.kernels.attention import api
from megascale_jax.kernels.target import Target
from tests.kernels import attention_suite, elementwise_suite
from tests.kernels.attention_suite import Case

Job = Callable[[], dict[str, Any]]


def suite_rows(target: Target, dry: bool) -> Iterator[tuple[str, Job]]:
    """A job for each group of cases of each implementation; the wanted result is ``passed``."""
    for implementation in ("triton",) if dry else ("triton", "cudnn"):
        for name, cases in attention_groups(dry).items():
            kept = [case for case in cases if runs(case, implementation, target)]
            yield f"attention by {implementation}: {name}", partial(check_all, kept, implementation, target)
    for name, checks in elementwise_groups(target, dry).items():
        yield name, partial(all_of, checks)


def attention_groups(dry: bool) -> dict[str, list[Case]]:
    """Groups of cases; every shape and mask is compiled anew, so on a device they are few."""
    block, head = (32, 32) if dry else (128, 64)
    dtype = "float32" if dry else "bfloat16"
    edges = [replace(case, head=head, dtype=dtype) for case in attention_suite.edge_cases(block)]
    documents = [replace(case, head=head, dtype=dtype) for case in attention_suite.documents_cases(block)]
    sizes = (32, 48) if dry else TRITON_HEAD_SIZES
    groups = {
        "head sizes and types": attention_suite.type_cases(2 * block + 7, sizes),
        "rows and windows at the edges of blocks": edges,
        "documents and padding": documents,
        "extreme scores": attention_suite.extreme_cases(dtype),
    }
    return {name: cases[::8] for name, cases in groups.items()} if dry else groups


def runs(case: Case, implementation: str, target: Target) -> bool:
    """Whether an implementation takes a case; documents of no token and more than it has room for are not cuDNN's."""
    if api.refusals(case.head, attention_suite.jnp.dtype(case.dtype), case.window, target)[implementation] is not None:
        return False
    return implementation != "cudnn" or case.segments is None or 0 < len(case.segments) <= target.max_documents


def elementwise_groups(target: Target, dry: bool) -> dict[str, list[Callable[[], None]]]:
    """Checks of the Triton kernels by operator."""
    suite, triton = elementwise_suite, {"implementation": "triton", "target": target}
    types = ("float32",) if dry else ("float32", "bfloat16")
    widths, shapes = ((33, 64), ((5, 37),)) if dry else ((33, 1000, 2048, 8192, 12288), ((5, 37), (257, 6144)))
    norms = product(("layernorm", "rmsnorm"), widths, types, (True,))
    activations = product((True, False), (True,), shapes, types)
    losses = product((1, 4), (37,), types)
    return {
        "norms": [partial(suite.check_norm, *case, **triton) for case in norms],
        "activations": [partial(suite.check_activation, *case, **triton) for case in activations],
        "loss": [partial(suite.check_loss, *case, **triton, size=size) for case in losses for size in (1.0, 1e3)],
    }


def check_all(cases: list[Case], implementation: str, target: Target) -> dict[str, Any]:
    """Check attention cases; the row says how many were right and names the first wrong one."""
    return all_of([partial(attention_suite.check, case, implementation, target) for case in cases], [case.name for case in cases])


def all_of(checks: list[Callable[[], None]], names: list[str] | None = None) -> dict[str, Any]:
    """Run checks; an AssertionError is a wrong value, and the next check still runs."""
    wrong = []
    for index, check in enumerate(checks):
        try:
            check()
        except AssertionError as error:
            wrong.append(f"{names[index] if names else check}: {str(error).splitlines()[0]}")
    result = f"wrong in {len(wrong)} of {len(checks)}" if wrong else f"passed {len(checks)}"
    return {"result": result, "wrong": wrong[:20]}
