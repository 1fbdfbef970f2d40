"""Digests of shared state: every single flipped bit is found and its device named, and equal copies agree, on every layout."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_jax.errors import UsageError
from megascale_jax.observe.marks import MARKS, Marks
from megascale_jax.train.digest import GATHERED, Digests, Finding, decisive, differing, digest
from megascale_jax.train.flip import DRILL, BitFlip, flipped
from megascale_jax.train.integrity import Integrity
from megascale_jax.train.saved import named_arrays
from megascale_jax.train.state import initial_state
from megascale_jax.train.step import make_steps
from tests.build import experiment, plan_of


def digested(config):
    plan = plan_of(config)
    optimizer = make_steps(config, plan).optimizer
    return plan, Digests(plan, optimizer), initial_state(plan, optimizer, 0)


@pytest.fixture(scope="module", params=[(4, 2, 1), (2, 2, 2)], ids=["data4-tensor2", "pipe2-data2-tensor2"])
def sharded(request):
    data, tensor, pipe = request.param
    return digested(experiment(data, tensor, parallel={"pipe": pipe, "micro_batch_size": 2}))


@pytest.mark.parametrize(("data", "tensor", "pipe"), [(3, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_a_state_agrees_with_itself_on_every_layout(data, tensor, pipe):
    config = experiment(data, tensor, parallel={"pipe": pipe, "micro_batch_size": 1}, train={"global_batch_size": 4 * data})
    _, digests, state = digested(config)
    assert digests.compare(state) == []
    assert digests.arrays


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_of_any_copy_is_found_and_its_device_named(sharded, data):
    plan, digests, state = sharded
    names = [name for name in digests.arrays if not name.startswith(GATHERED)]
    name = data.draw(st.sampled_from(names))
    array = named_arrays(state)[name]
    number = data.draw(st.integers(0, len(array.addressable_shards) - 1))
    shard = array.addressable_shards[number]
    element = data.draw(st.integers(0, max(0, shard.data.size - 1)))
    changed = flipped(state, name, shard.device, element, data.draw(st.integers(0, 31)))
    ((place, _),) = [(place, device) for place, device in np.ndenumerate(plan.mesh.devices) if device == shard.device]
    copies = int(np.prod([dict(plan.mesh.shape)[axis] for axis in digests.arrays[name]]))
    (finding,) = decisive(digests.compare(changed))
    assert (finding.array, finding.copies, finding.is_certain) == (name, copies, copies > 2)
    assert finding.devices == (place,) if copies > 2 else place in finding.devices
    assert digests.compare(state) == [], "the state itself stays as it was"


def test_weights_that_one_device_gathers_wrongly_are_found(sharded, monkeypatch):
    """A wrong wire or memory: the shards are right, what one data rank makes of them is not."""
    plan, _, state = sharded
    gather = type(plan.zero).gather

    def wrong(self, params):
        weights = gather(self, params)
        group = next(iter(plan.zero.matrices))
        is_odd = (jax.lax.axis_index("data") == 1) & (jax.lax.axis_index("tensor") == 1) & (jax.lax.axis_index("pipe") == 0)
        weights["layers"][group] = weights["layers"][group].at[0, 0, 3, 1].add(is_odd * np.float32(2**-20))
        return weights

    monkeypatch.setattr(type(plan.zero), "gather", wrong)
    config = plan.experiment
    findings = Digests(plan, make_steps(config, plan).optimizer).compare(state)
    (finding,) = findings
    assert finding.array == f"{GATHERED}.{next(iter(plan.zero.matrices))}"
    assert (0, 1, 1) in finding.devices and finding.is_certain == (config.parallel.data > 2)


def test_moved_values_have_another_digest():
    values = np.array([1.0, -1.0, 2.0, 2.0], np.float32)  # a sign is the highest bit, which sums with odd factors lose
    moved = values[[1, 0, 2, 3]]
    assert not np.array_equal(jax.jit(digest)(values), jax.jit(digest)(moved))
    assert jax.jit(digest)(values.astype(jax.numpy.bfloat16)).dtype == np.uint32


def test_the_minority_is_odd_and_without_a_majority_all_are_suspects():
    digests = np.zeros((1, 5, 1, 2), np.uint32)
    digests[0, 3] = digests[0, 1] = 7
    assert differing("a", digests, ("data",)) == [Finding("a", ((0, 1, 0), (0, 3, 0)), 5, True)]
    assert [len(finding.devices) for finding in differing("a", digests[:, 1:5], ("data",))] == [4]
    digests[0, 4] = 9
    assert not differing("a", digests, ("data",))[0].is_certain
    assert differing("a", digests, ("pipe", "tensor")) == []


def test_one_device_has_nothing_to_compare_and_says_so():
    config, said = experiment(train={"digest_every": 1}), []
    plan = plan_of(config)
    integrity = Integrity(config, plan, make_steps(config, plan).optimizer, Marks(), said.append)
    integrity.begin(None)
    assert not integrity.is_due(1) and "none can be compared" in said[0]


def test_only_a_drill_can_flip_bits(tmp_path, sharded):
    _, digests, state = sharded
    environment = {MARKS: str(tmp_path / "rank-0.marks")}
    assert BitFlip.from_environment(environment) is None
    with pytest.raises(UsageError, match="MEGASCALE_MARKS is not set"):
        BitFlip.from_environment({DRILL: "1"})
    flip, file = BitFlip.from_environment(environment | {DRILL: "1"}), tmp_path / "rank-0.flip"
    assert flip.apply(state) is state
    file.write_text('{"array": "second_moment.norm_scale", "element": 2, "bit": 30}')
    assert {finding.array for finding in decisive(digests.compare(flip.apply(state)))} == {"second_moment.norm_scale"}
    assert not file.exists()
    file.write_text('{"array": "params.nothing"}')
    with pytest.raises(UsageError, match="expected nothing or an array"):
        flip.apply(state)
