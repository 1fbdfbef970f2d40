"""The devices' clock inside a program: read in the program's order, by every device for itself, in no time that matters."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from megascale_jax.kernels.clock.api import STAMP, Clock, Stamps, nanoseconds
from megascale_jax.kernels.target import Target

HERE = Target("cpu")


def test_stamps_lie_between_what_the_host_saw_and_in_the_order_of_the_program():
    @jax.jit
    def program(x):
        stamps = Stamps(Clock(HERE))
        stamps.take(x)
        for _ in range(3):
            x = stamps.mark(jnp.tanh(x @ x))
        return x, stamps.all()

    x = jnp.full((64, 64), 0.01)
    program(x)
    before = time.monotonic_ns()
    _, stamps = jax.block_until_ready(program(x))
    after = time.monotonic_ns()
    ns = nanoseconds(np.asarray(stamps))
    assert ns.shape == (4,) and before < ns[0] and ns[-1] < after
    assert (np.diff(ns) > 0).all(), "taken one after the other, and none merged with another"


def test_a_loop_takes_a_stamp_in_every_turn():
    def turn(last, x):
        stamps = Stamps(Clock(HERE), last)
        stamps.mark(jnp.tanh(x))
        return stamps.last, stamps.all()

    _, stamps = jax.jit(lambda xs: jax.lax.scan(turn, jnp.zeros(STAMP.shape, STAMP.dtype), xs))(jnp.ones((5, 8)))
    ns = nanoseconds(np.asarray(stamps))
    assert ns.shape == (5, 1) and (np.diff(ns[:, 0]) > 0).all()


def test_what_follows_a_stamp_waits_for_it():
    """The wait for a slow peer lies behind a device's own compute: devices that had nothing to do waited, the slow one did not."""
    devices = jax.devices()[:4]
    mesh = jax.sharding.Mesh(np.array(devices), ("d",))

    def slow(index, x):
        time.sleep(0.2 * (int(index) == 2))
        return x

    def body(x):
        stamps = Stamps(Clock(HERE))
        x = stamps.mark(x)
        x = stamps.mark(jax.pure_callback(slow, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.axis_index("d"), x))
        x = stamps.mark(jax.lax.psum(x, "d"))
        taken = stamps.all()
        assert taken is not None
        return x, taken[None]

    specs = PartitionSpec("d"), (PartitionSpec("d"), PartitionSpec("d"))
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False))
    x = jax.device_put(np.ones((4, 8), np.float32), jax.NamedSharding(mesh, specs[0]))
    _, stamps = program(x)
    spans = np.diff(nanoseconds(np.asarray(stamps)), axis=1) / 1e9
    computing, waiting = spans.T
    assert np.argmax(computing) == 2 and computing[2] >= 0.2
    assert (np.delete(computing, 2) < 0.2).all() and np.argmin(waiting) == 2


def test_without_a_clock_nothing_is_taken():
    stamps = Stamps(None)
    stamps.take(jnp.ones(2))
    assert stamps.mark(7) == 7 and stamps.all() is None and stamps.last is None
    assert "ffi" not in str(jax.make_jaxpr(lambda x: Stamps(None).tie(x))(jnp.ones(2)))


def test_stamps_beyond_32_bits_keep_all_their_digits():
    values = np.array([0, 1, 2**31, 2**40 + 5, 2**62 + 2**31 + 1], np.int64)
    words = np.stack([(values & 0xFFFFFFFF).astype(np.uint32).view(np.int32), (values >> 32).astype(np.int32)], -1)
    assert (nanoseconds(words) == values).all()
    with pytest.raises(AssertionError, match="no stamps"):
        nanoseconds(values)


def test_stamps_of_a_mesh_are_counted_by_device():
    """What a host can see while a program runs: every device's own count, also in loops."""
    devices = np.array(jax.devices()[:4]).reshape(2, 1, 2)
    mesh = jax.sharding.Mesh(devices, ("a", "b", "c"))
    clock = Clock(HERE, ("a", "b", "c"))

    def turn(last, x):
        stamps = Stamps(clock, last)
        stamps.mark(x)
        return stamps.last, stamps.all()

    def body(x):
        stamps = Stamps(clock)
        stamps.take({"one": x, "other": x[0]})
        last, taken = jax.lax.scan(turn, stamps.last, x)
        stamps.append(taken, last)
        every = stamps.all()
        assert every is not None
        return every[None]

    spec = PartitionSpec(("a", "b", "c"))
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    x = jax.device_put(np.ones((4 * 5, 8), np.float32), jax.NamedSharding(mesh, spec))
    before = np.array([clock.taken(device) for device in range(4)])
    assert jax.block_until_ready(program(x)).shape == jax.block_until_ready(program(x)).shape == (4, 6, 2)
    assert (np.array([clock.taken(device) for device in range(4)]) - before == 2 * 6).all()
    assert Clock(HERE).taken(0) is None and clock.taken(1 << 20) == 0
