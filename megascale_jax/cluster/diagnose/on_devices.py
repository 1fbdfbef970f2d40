"""Checks that compute, with JAX. Only the probe process imports this: JAX may hang or abort on a sick device.

Rates are medians over repetitions. Shapes on GPUs: those of Megatron-LM's GPU sniff test; on CPUs small ones, for a second or two.
"""

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megascale_jax.cluster.diagnose.checks import CORRUPTION, DEVICE, DIGEST, PAIR, Number, Outcome, Status, not_run, outcome
from megascale_jax.cluster.diagnose.request import Options, PairTask
from megascale_jax.comm.init import start
from megascale_jax.comm.processes import Processes
from megascale_jax.config.schema import SystemConfig

AXIS = "all"
SEED = 2024


def platform_here(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> str:
    """``gpu`` where the NVIDIA driver shows one, unless ``JAX_PLATFORMS`` says ``cpu``."""
    wants_cpu = environment.get("JAX_PLATFORMS", "") == "cpu"
    return "gpu" if not wants_cpu and any(devices.glob("nvidia[0-9]*")) else "cpu"


def prepare(options: Options) -> None:
    """Start JAX for the node's devices, with the peer where a pair is asked for. Raises UsageError."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    system = SystemConfig.model_validate({"platform": platform_here(), "device": "any"})
    if options.pair is None:
        start(system, options.cpu_devices, Processes())
    else:
        start(system, 2 * options.cpu_devices, Processes(2, options.pair.index, options.pair.coordinator))


def gemm() -> Outcome:
    """Rate of matrix products on each device."""
    shapes = ((8192, 8192, 8192), (4096, 4096, 16384)) if _is_gpu() else ((768, 768, 768), (512, 512, 2048))
    kind = jnp.bfloat16 if _is_gpu() else jnp.float32
    multiply = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32))
    numbers = []
    for m, n, k in shapes:
        for device in _devices():
            a, b = (jax.device_put(jnp.ones(shape, kind), device) for shape in ((m, k), (k, n)))
            seconds = _seconds(lambda a=a, b=b: multiply(a, b))
            name = f"{m}x{n}x{k} {kind.dtype.name}"
            numbers.append(Number(name=name, value=2 * m * n * k / seconds / 1e12, unit="TFLOP/s", part=_name(device)))
    return outcome("gemm", numbers=numbers, facts=_facts())


def copy() -> Outcome:
    """Rate at which each device copies its own memory; bytes read and written both count."""
    size = (1 << 30) if _is_gpu() else (32 << 20)
    increment = jax.jit(lambda x: x + 1)
    numbers = []
    for device in _devices():
        source = jax.device_put(jnp.zeros(size // 4, jnp.int32), device)
        seconds = _seconds(lambda source=source: increment(source))
        numbers.append(Number(name="copy", value=2 * size / seconds / 1e9, unit="GB/s", part=_name(device)))
    return outcome("copy", numbers=numbers, facts=_facts())


def corruption(multiply: Callable[[Any, Any], Any] | None = None) -> Outcome:
    """Products of seeded integer matrices that are exact in any order of summation, so every device everywhere gives the same bits.

    Judged three ways: against arithmetic on the host (Freivalds' check, 64 bits), against itself again and again, and, through the digest,
    against all other nodes. |entries| <= 128 fill the significand of bfloat16; sums stay far below 2^24, where float32 is exact.
    """
    size, repeats = (4096, 50) if _is_gpu() else (512, 10)
    random = np.random.default_rng(SEED)
    left, right = (random.integers(-128, 128, (size, size), np.int32) for _ in range(2))
    weights = random.integers(0, 1 << 20, size)
    wanted = left.astype(np.int64) @ (right.astype(np.int64) @ weights)
    run = multiply or jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(jnp.int32))
    count_other = jax.jit(lambda one, other: jnp.sum(one != other))
    kind = jnp.bfloat16 if _is_gpu() else jnp.float32
    problems: list[tuple[Status, str]] = []
    digests = set()
    for device in _devices():
        a, b = (jax.device_put(jnp.asarray(one, kind), device) for one in (left, right))
        first = run(a, b)
        changed = sum(int(count_other(first, run(a, b))) > 0 for _ in range(repeats))
        result = np.asarray(first)
        wrong = int(np.sum(result.astype(np.int64) @ weights != wanted))
        if wrong:
            problems.append(("fail", f"{_name(device)}: {wrong} of {size} rows of a product are wrong"))
        if changed:
            problems.append(("fail", f"{_name(device)}: {changed} of {repeats} repetitions of a product differ"))
        digests.add(hashlib.blake2b(np.ascontiguousarray(result), digest_size=16).hexdigest())
    numbers = [Number(name="repetitions", value=repeats * len(_devices()), unit="products")]
    facts = _facts() | {"case": f"{size} seed {SEED}"} | ({DIGEST: digests.pop()} if len(digests) == 1 else {})
    return outcome(CORRUPTION, problems, numbers, facts)


def all_to_all() -> Outcome:
    """Each device of the node sends a part to each other one; what arrives is compared."""
    devices = jax.local_devices()
    count = len(devices)
    if count < 2:
        return not_run("all_to_all", "one device only")
    mesh, spec = Mesh(np.array(devices), (AXIS,)), PartitionSpec(AXIS)
    width = ((256 << 20) if _is_gpu() else (4 << 20)) // 4 // count
    exchange = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.all_to_all(x, AXIS, split_axis=1, concat_axis=0, tiled=True).reshape(1, count, width),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
        )
    )
    sent = np.broadcast_to(np.arange(count * count, dtype=np.int32).reshape(count, count, 1), (count, count, width))
    source = jax.device_put(sent, NamedSharding(mesh, spec))
    is_right = bool(jnp.all(exchange(source) == jnp.swapaxes(jnp.asarray(sent[..., :1]), 0, 1)))
    seconds = _seconds(lambda: exchange(source))
    rate = Number(name="sent by each device", value=4 * width * (count - 1) / seconds / 1e9, unit="GB/s")
    return outcome("all_to_all", [] if is_right else [("fail", "what arrives is not what was sent")], [rate], _facts())


def pair(task: PairTask) -> Outcome:
    """All-reduce over all devices of two nodes: bus bandwidth, ``2 (n - 1) / n`` times the bytes of one device per second."""
    devices = jax.devices()
    count = len(devices)
    mesh, spec = Mesh(np.array(devices), (AXIS,)), PartitionSpec(AXIS)
    width = ((256 << 20) if _is_gpu() else (4 << 20)) // 4
    fill = jax.shard_map(lambda: jnp.full((1, width), jax.lax.axis_index(AXIS) + 1, jnp.float32), mesh=mesh, in_specs=(), out_specs=spec)
    source = jax.jit(fill)()
    reduce = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, AXIS), mesh=mesh, in_specs=spec, out_specs=PartitionSpec()))
    total = reduce(source)
    is_right = bool(np.all(np.asarray(total.addressable_data(0)) == count * (count + 1) / 2))
    seconds = _seconds(lambda: reduce(source))
    rate = Number(name="all-reduce", value=2 * (count - 1) / count * 4 * width / seconds / 1e9, unit="GB/s")
    problems: list[tuple[Status, str]] = [] if is_right else [("fail", f"the sum with {task.peer} is wrong")]
    return outcome(PAIR, problems, [rate], _facts() | task.facts)


def _is_gpu() -> bool:
    return jax.default_backend() == "gpu"


def _devices() -> list[Any]:
    """Those that are measured one by one. Virtual CPU devices are one and the same."""
    return jax.local_devices() if _is_gpu() else jax.local_devices()[:1]


def _name(device: Any) -> str:
    return f"GPU {device.local_hardware_id}" if device.platform == "gpu" else "CPU"


def _facts() -> dict[str, str]:
    return {DEVICE: jax.local_devices()[0].device_kind}


def _seconds(run: Callable[[], Any]) -> float:
    """Median time of a run, after some to warm up. The number of runs is fixed: processes must agree on it."""
    warm_up, timed = (5, 20) if _is_gpu() else (2, 7)
    times = []
    for index in range(warm_up + timed):
        began_s = time.perf_counter()
        jax.block_until_ready(run())
        if index >= warm_up:
            times.append(time.perf_counter() - began_s)
    return max(median(times), 1e-9)
