"""The search for layouts: complete, in order, right about what fits, and what it says where nothing does."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_jax.config.checks import check
from megascale_jax.config.load import load_document, load_experiment
from megascale_jax.config.schema import Experiment
from megascale_jax.config.software import SoftwareConfig
from megascale_jax.errors import ConfigError
from megascale_jax.sim.analytic import predict
from megascale_jax.sim.search import FIELDS, REMATS, check_base, search, with_layout
from megascale_jax.sim.search_advice import change_of, least_count, nearest_counts, nearest_fits, why_none
from megascale_jax.sim.step_memory import step_bytes

SOFTWARE = load_document("software", "megascale", SoftwareConfig)
LARGE = load_experiment("gpt-175b")
FEW_ROWS = LARGE.model_copy(update={"train": LARGE.train.model_copy(update={"global_batch_size": 768})})
SMALL = load_experiment("gpt-1b", ["model.num_layers=12", "train.global_batch_size=48"], checked=False)


def layout_of(plan):
    return tuple(getattr(plan.parallel, name) for name in FIELDS)


def layouts_in(found):
    return {tuple(item.layout.values()) for item in found.ranked}


def with_memory(plan, memory_gib):
    return plan.model_copy(update={"system": plan.system.model_copy(update={"memory_gib": memory_gib})})


def accepted(plan):
    try:
        check(plan)
    except ConfigError:
        return False
    return True


@st.composite
def questions(draw):
    """An experiment and a number of GPUs, of which many have no layout at all."""
    heads = draw(st.sampled_from([6, 8, 16]))
    changes = {
        "num_layers": draw(st.integers(1, 12)),
        "num_heads": heads,
        "num_kv_heads": draw(st.sampled_from([None, 2])),
        "hidden_size": heads * 64,
        "head_size": None,
        "mlp_size": draw(st.sampled_from([1024, 1536])),
        "sequence_length": draw(st.sampled_from([512, 2048])),
        "window": draw(st.sampled_from(["full", 256, (256, "full")])),
    }
    base = load_base(draw(st.sampled_from([24, 32, 36])), draw(st.sampled_from([8.0, 16.0, 79.1])), changes)
    return base, draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]))


def load_base(batch, memory_gib, changes):
    return SMALL.model_copy(
        update={
            "model": SMALL.model.model_copy(update=changes),
            "train": SMALL.train.model_copy(update={"global_batch_size": batch}),
            "system": SMALL.system.model_copy(update={"memory_gib": memory_gib}),
        }
    )


def brute_force(base, devices, limit_bytes):
    """Every tuple of numbers in reach, judged by `check` and `predict` alone."""
    batch, layers = base.train.global_batch_size, base.model.num_layers
    found = {}
    for tensor, pipe, chunks, rows in product(range(1, devices + 1), range(1, layers + 1), range(1, layers + 1), range(1, batch + 1)):
        if devices % (tensor * pipe):
            continue
        data = devices // (tensor * pipe)
        if batch % (data * rows * (pipe if pipe > 1 else 1)):
            continue  # `check` says the same, slowly
        for remat in REMATS:
            plan = with_layout(base, tensor=tensor, pipe=pipe, virtual_stages=chunks, data=data, micro_batch_size=rows, remat=remat)
            if accepted(plan) and step_bytes(plan).total <= limit_bytes:
                found[layout_of(plan)] = predict(plan, SOFTWARE)
    return found


@settings(max_examples=12, deadline=None)
@given(questions(), st.sampled_from([0.2, 0.9]))
def test_nothing_is_missed_nothing_is_made_up_and_all_is_in_order(question, margin):
    base, devices = question
    if devices > 8 and devices % 8:
        with pytest.raises(ConfigError, match="no whole nodes of 8"):
            search(base, devices, SOFTWARE)
        return
    found = search(base, devices, SOFTWARE, margin=margin)
    expected = brute_force(base, devices, margin * base.system.memory_gib * 2**30)
    assert {tuple(item.layout.values()): item.prediction for item in found.ranked} == expected
    assert len(found.ranked) == len(expected)
    seconds = [item.prediction.iteration_s for item in found.ranked]
    assert seconds == sorted(seconds)
    assert found.ranked or found.too_large or found.rejected


@settings(max_examples=15, deadline=None)
@given(questions(), st.floats(0.02, 1), st.floats(0.02, 1))
def test_more_memory_never_removes_a_layout(question, one, other):
    base, devices = question
    if devices > 8 and devices % 8:
        return
    less, more = sorted((one, other))
    few, many = (search(base, devices, SOFTWARE, margin=margin) for margin in (less, more))
    assert layouts_in(few) <= layouts_in(many)
    assert len(few.ranked) + len(few.too_large) == len(many.ranked) + len(many.too_large)
    assert not layouts_in(many) & {tuple(item.layout.values()) for item in many.too_large}


def test_every_ranked_layout_of_the_largest_run_is_an_experiment_that_predicts_the_same():
    found = search(LARGE, 12288, SOFTWARE)
    assert len(found.ranked) > 100 and len(layouts_in(found)) == len(found.ranked)
    for item in found.ranked:
        plan = Experiment.model_validate_json(item.experiment(LARGE).model_dump_json())
        check(plan)
        assert plan == item.experiment(LARGE) and item.prediction == predict(plan, SOFTWARE)
        assert item.prediction.devices == 12288
        assert item.needed_bytes == step_bytes(plan).total <= 0.9 * 79.2 * 2**30 == found.limit_bytes
    assert {item.reason for item in found.rejected} == {"node", "batch", "layers"}


def test_the_papers_layout_is_ranked_and_told():
    found = search(LARGE, 12288, SOFTWARE)
    rank = found.rank_of(LARGE) or 0
    assert layout_of(LARGE) == tuple(found.ranked[rank - 1].layout.values()) == (8, 8, 6, 192, 1, "none")
    assert 1 < rank <= 40
    assert found.ranked[0].prediction.iteration_s < found.ranked[rank - 1].prediction.iteration_s
    fewer = search(LARGE, 6144, SOFTWARE)
    assert fewer.ranked[(fewer.rank_of(LARGE) or 0) - 1].layout["data"] == 96
    assert found.rank_of(with_layout(LARGE, pipe=5)) is None
    listed = LARGE.model_copy(update={"parallel": LARGE.parallel.model_copy(update={"layers": (2,) * 48})})
    assert found.rank_of(listed) is None


def test_pins_hold():
    found = search(LARGE, 12288, SOFTWARE, {"tensor": 4, "remat": "full"})
    assert {(item.layout["tensor"], item.layout["remat"]) for item in found.ranked} == {(4, "full")}
    free = layouts_in(search(LARGE, 12288, SOFTWARE))
    assert layouts_in(found) == {layout for layout in free if layout[0] == 4 and layout[-1] == "full"}
    for name, value in (("pipe", 8), ("virtual_stages", 6), ("data", 192), ("micro_batch_size", 2)):
        expected = {layout for layout in free if layout[FIELDS.index(name)] == value}
        assert layouts_in(search(LARGE, 12288, SOFTWARE, {name: value})) == expected and expected


@pytest.mark.parametrize(
    ("pins", "reason", "says"),
    [
        ({"tensor": 5}, "devices", "tensor 5 does not divide 12,288 devices"),
        ({"tensor": 16}, "node", "parallel.tensor 16 leaves the node"),
        ({"tensor": 8, "pipe": 7}, "devices", "tensor 8 x pipe 7 = 56 does not divide"),
        ({"tensor": 8, "pipe": 128}, "layers", "exceeds model.num_layers 96"),
        ({"tensor": 8, "pipe": 8, "data": 100}, "devices", "leaves data 192, not 100"),
        ({"tensor": 8, "pipe": 8, "micro_batch_size": 3}, "batch", "data 192: train.global_batch_size 6144 is not divisible"),
        ({"tensor": 8, "pipe": 8, "virtual_stages": 12}, "layers", "model.window gives layer 0 768 and layer"),
    ],
)
def test_pins_that_nothing_meets_have_their_reason(pins, reason, says):
    found = search(LARGE, 12288, SOFTWARE, pins)
    assert not found.ranked and not found.too_large
    assert any(says in item.example for item in found.rejected if item.reason == reason), found.rejected
    said = why_none(LARGE, found, SOFTWARE, pins)
    assert "no layout with tensor" in said and says in said


def test_counts_that_nothing_divides_have_the_nearest_that_work():
    for count in (7, 1072):
        found = search(FEW_ROWS, count, SOFTWARE)
        assert not found.ranked and not found.too_large
        near = nearest_counts(FEW_ROWS, count)
        for good in near:
            again = search(FEW_ROWS, good, SOFTWARE)
            assert again.ranked or again.too_large
        between = range(near[0] + 1, near[-1]) if len(near) == 2 else range(0)
        for bad in between:
            if bad <= 8 or bad % 8 == 0:
                none = search(FEW_ROWS, bad, SOFTWARE)
                assert not none.ranked and not none.too_large, bad
        assert f"nearest counts that work: {', '.join(f'{good:,}' for good in near)}" in why_none(FEW_ROWS, found, SOFTWARE)


def test_where_nothing_fits_each_way_out_is_one():
    found = search(FEW_ROWS, 32, SOFTWARE)
    assert not found.ranked and found.too_large
    said = why_none(FEW_ROWS, found, SOFTWARE)
    least = min(item.needed_bytes for item in found.too_large)
    assert f"the least memory is {least / 2**30:.1f} GiB a device" in said
    count = least_count(FEW_ROWS, 32)
    assert f"{count:,} devices" in said and search(FEW_ROWS, count, SOFTWARE).ranked
    for fewer in range(40, count, 8):
        assert not search(FEW_ROWS, fewer, SOFTWARE).ranked
    assert "system h200 or b200" not in said or search(with_memory(FEW_ROWS, 139.0), 32, SOFTWARE).ranked
    needed = float(said.rpartition("a device of ")[2].removesuffix(" GiB"))
    for memory_gib, fits in ((needed + 0.1, True), (needed - 0.1, False)):
        assert bool(search(with_memory(FEW_ROWS, memory_gib), 32, SOFTWARE).ranked) == fits


def test_what_is_pinned_is_blamed_where_it_is_to_blame():
    pins = {"tensor": 1, "pipe": 1}
    small = load_experiment("gpt-13b")
    found = search(small, 64, SOFTWARE, pins)
    assert not found.ranked and found.too_large
    assert "without what is pinned" in why_none(small, found, SOFTWARE, pins)


def test_the_nearest_layouts_that_fit_differ_least():
    found = search(LARGE, 12288, SOFTWARE)
    wanted = found.too_large[0].parallel
    near = nearest_fits(found, wanted)
    assert near and all(item in found.ranked for item in near)
    assert all("," not in change_of(item.parallel, wanted) for item in near), "one field is enough here"
    assert len({change_of(item.parallel, wanted).rpartition(" ")[0] for item in near}) == len(near)


def test_no_memory_is_no_limit():
    found, limited = search(with_memory(LARGE, None), 12288, SOFTWARE), search(LARGE, 12288, SOFTWARE)
    assert found.limit_bytes is None and not found.too_large
    assert len(found.ranked) == len(limited.ranked) + len(limited.too_large)


def test_an_experiment_that_no_layout_can_mend_is_refused():
    check_base(LARGE)
    for change, says in (("train.schedule.warmup_steps=999999", "warmup_steps"), ("model.rotary_size=7", "rotary_size 7")):
        with pytest.raises(ConfigError, match=f"whatever its layout:(?s:.*){says}"):
            check_base(load_experiment("gpt-175b", [change], checked=False))


def test_weights_that_a_program_shards_still_need_room_in_this_trainer():
    sharded = load_document("software", "maxtext", SoftwareConfig)
    found = search(LARGE, 512, sharded)
    for item in found.ranked:
        check(item.experiment(LARGE))
