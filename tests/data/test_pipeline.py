"""Packing, sharding by data-parallel index, and exact resume."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megascale_jax.data.batch import NO_TARGET, Batch, decode_row
from megascale_jax.data.manifest import MANIFEST_FILE, read_manifest
from megascale_jax.data.pipeline import UNTOUCHED, TrainIterator, held_out_batches
from megascale_jax.data.prepared import Prepared, open_prepared, stored_rows
from megascale_jax.errors import DataError

GLOBAL_BATCH = 16


@pytest.fixture
def prepared(make_prepared) -> Prepared:
    return open_prepared(make_prepared(), sequence_length=32, vocab_size=257)


def rows(prepared: Prepared, split):
    return stored_rows(prepared.folder, prepared.manifest, split)


def iterator(prepared: Prepared, data_size: int = 2, data_indices: list[int] | None = None, **options) -> TrainIterator:
    layout: dict[str, Any] = {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": 2, "seed": 3} | options
    return TrainIterator(prepared, data_size=data_size, data_indices=range(data_size) if data_indices is None else data_indices, **layout)


def assert_equal(left: Batch, right: Batch) -> None:
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert np.array_equal(array, right[name]), name


def global_rows(prepared: Prepared, data_size: int, steps: int, state: dict | None = None, **options) -> np.ndarray:
    """Input tokens [steps * GLOBAL_BATCH, S] in global order, from one process per data index."""
    processes = [iterator(prepared, data_size, [index], **options) for index in range(data_size)]
    collected = []
    for process in processes:
        if state is not None:
            process.restore(state)
    for _ in range(steps):
        parts = [next(process)["tokens"] for process in processes]
        collected.append(np.concatenate(parts, axis=1).reshape(GLOBAL_BATCH, -1))
    for process in processes:
        process.close()
    return np.concatenate(collected)


@settings(max_examples=200)
@given(
    tokens=st.lists(st.integers(0, 4), max_size=13),
    sequence_length=st.just(12),
    end=st.just(4),
)
def test_row_is_decoded_by_the_definition(tokens, sequence_length, end):
    decoded = decode_row(np.array(tokens, np.uint16), sequence_length, end)
    segment, position = 1, 0
    for place in range(sequence_length):
        values = {name: int(array[place]) for name, array in decoded.items()}
        if place >= len(tokens) - 1:
            assert values == {"tokens": 0, "targets": NO_TARGET, "segment_ids": 0, "positions": 0}
            continue
        is_end = tokens[place] == end
        target = NO_TARGET if is_end else tokens[place + 1]
        assert values == {"tokens": tokens[place], "targets": target, "segment_ids": segment, "positions": position}
        segment, position = (segment + 1, 0) if is_end else (segment, position + 1)
    assert all(array.dtype == np.int32 and array.shape == (sequence_length,) for array in decoded.values())


def test_every_target_of_the_held_out_stream_has_a_loss_once(prepared):
    source = rows(prepared, "held_out")
    stream = np.concatenate([source[0][:1], *(source[index][1:] for index in range(len(source)))])
    expected = stream[1:][stream[:-1] != 256]
    batches = list(held_out_batches(prepared, global_batch_size=8, data_size=1, data_indices=[0], micro_batch_size=8))
    targets = np.concatenate([batch["targets"].reshape(-1) for batch in batches])
    assert np.array_equal(targets[targets != NO_TARGET], expected)


def test_held_out_batches_have_train_shapes_and_end_in_padding(prepared):
    count = prepared.manifest.held_out.rows
    assert count % GLOBAL_BATCH != 0
    layout: dict[str, Any] = {"global_batch_size": GLOBAL_BATCH, "data_size": 4, "micro_batch_size": 2}
    parts = [list(held_out_batches(prepared, data_indices=[index], **layout)) for index in range(4)]
    assert {len(part) for part in parts} == {-(-count // GLOBAL_BATCH)}
    assert {array.shape for part in parts for batch in part for array in batch.values()} == {(2, 2, 32)}
    joined = np.concatenate(
        [np.concatenate([part[step]["segment_ids"] for part in parts], axis=1).reshape(-1, 32) for step in range(len(parts[0]))]
    )
    assert (joined[:count, 0] == 1).all()
    assert not joined[count:].any()
    last = {name: np.concatenate([part[-1][name] for part in parts], axis=1).reshape(-1, 32) for name in ("targets", "tokens")}
    assert (last["targets"][count % GLOBAL_BATCH :] == NO_TARGET).all()
    assert len(list(held_out_batches(prepared, data_indices=[0], batches=1, **layout))) == 1
    assert_equal(next(held_out_batches(prepared, data_indices=[3], batches=1, **layout)), parts[3][0])


def test_batches_hold_the_rows_that_sample_ids_name_in_their_fixed_places(prepared):
    source = rows(prepared, "train")
    with iterator(prepared, 4, [2, 1]) as train:
        for step in range(3):
            batch = next(train)
            ids = train.sample_ids(step).reshape(2, 4, 2)  # micro-batch, data index, row
            assert batch["tokens"].shape == (2, 4, 32)
            for micro in range(2):
                for column, (index, row) in enumerate([(2, 0), (2, 1), (1, 0), (1, 1)]):
                    expected = decode_row(source[int(ids[micro, index, row])], 32, 256)
                    assert_equal({name: array[micro, column] for name, array in batch.items()}, expected)


def test_each_epoch_has_every_row_once_in_a_fresh_order(prepared):
    count = prepared.manifest.train.rows
    train = iterator(prepared)
    steps = -(-2 * count // GLOBAL_BATCH)
    ids = np.concatenate([train.sample_ids(step) for step in range(steps)])
    first, second = ids[:count], ids[count : 2 * count]
    assert sorted(first) == sorted(second) == list(range(count))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, np.arange(count))
    assert not np.array_equal(iterator(prepared, seed=4).sample_ids(0), ids[:GLOBAL_BATCH])
    assert np.array_equal(iterator(prepared, shuffle=False).sample_ids(0), np.arange(GLOBAL_BATCH))


@pytest.mark.parametrize("stop", [1, 4, 9])
def test_global_list_continues_when_the_data_size_changes_at_any_step_and_over_an_epoch_edge(prepared, stop):
    count = prepared.manifest.train.rows
    assert count % GLOBAL_BATCH != 0
    steps = count // GLOBAL_BATCH + 6
    unbroken = global_rows(prepared, 4, steps)
    with iterator(prepared, 4, [3]) as before:
        stop = count // GLOBAL_BATCH if stop == 9 else stop  # 9: the batch that holds the epoch edge comes next
        for _ in range(stop):
            next(before)
        state = json.loads(json.dumps(before.state()))
    assert np.array_equal(unbroken[: stop * GLOBAL_BATCH], global_rows(prepared, 2, stop))
    assert np.array_equal(unbroken[stop * GLOBAL_BATCH :], global_rows(prepared, 2, steps - stop, state))


def test_state_is_of_the_last_batch_handed_out_and_restores_exactly(prepared):
    with iterator(prepared) as train, iterator(prepared) as resumed:
        for _ in range(5):
            next(train)
        state = train.state()
        assert state["samples"] == 5 * GLOBAL_BATCH
        assert len(json.dumps(state)) < 300
        expected = [next(train) for _ in range(4)]
        next(resumed)
        resumed.restore(state)
        assert resumed.state() == state
        for batch in expected:
            assert_equal(next(resumed), batch)
        train.restore(state)
        assert_equal(next(train), expected[0])


def test_closing_keeps_the_position(prepared):
    with iterator(prepared) as train, iterator(prepared) as unbroken:
        assert_equal(next(train), next(unbroken))
        train.close()
        assert_equal(next(train), next(unbroken))


def test_state_of_a_run_that_took_no_row_fits_any_data(prepared):
    with iterator(prepared) as train, iterator(prepared) as unbroken:
        next(train)
        train.restore(UNTOUCHED)
        assert train.state() == unbroken.state()
        assert_equal(next(train), next(unbroken))


def test_order_goes_on_when_the_global_batch_size_changes(prepared):
    with iterator(prepared) as train, iterator(prepared, global_batch_size=8) as smaller:
        next(train)
        smaller.restore(train.state())
        expected = next(train)["tokens"].reshape(GLOBAL_BATCH, -1)
        halves = [next(smaller)["tokens"].reshape(8, -1) for _ in range(2)]
        assert np.array_equal(np.concatenate(halves), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 9}, "another train.seed"),
        ({"digest": "0"}, "other prepared data"),
        ({"shuffle": False}, "another train.data.shuffle"),
        ({"next_ids": [0, 1, 2, 3]}, "shuffles in another order"),
        ({"samples": -1}, "damaged"),
        ({"samples": 1.5}, "damaged"),
        ({"extra": 1}, "another version"),
    ],
)
def test_state_of_another_order_is_refused_and_changes_nothing(prepared, change, message):
    with iterator(prepared) as train:
        next(train)
        state = train.state()
        with pytest.raises(DataError, match=message):
            train.restore(state | change)
        assert train.state() == state


def test_seed_of_any_size_is_accepted(prepared):
    assert len(set(iterator(prepared, seed=2**40 + 1).sample_ids(0))) == GLOBAL_BATCH


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch_size": 10}, "10 rows is not divisible by .*2 x 2 = 4"),
        ({"global_batch_size": 0}, "not divisible"),
        ({"data_indices": [2]}, r"must be some of 0..1"),
        ({"data_indices": []}, "must be some of"),
    ],
)
def test_layout_that_does_not_divide_is_refused(prepared, options, message):
    with pytest.raises(DataError, match=message):
        iterator(prepared, **options)


def test_damaged_row_stops_the_iterator_with_a_data_error(prepared):
    (path,) = Path(prepared.folder).glob("rows-*/train-00000.rows")
    content = bytearray(path.read_bytes())
    content[content.index(rows(prepared, "train")[20].tobytes())] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="damaged"), iterator(prepared) as train:
        for _ in range(prepared.manifest.train.rows):
            next(train)


def test_manifest_whose_numbers_contradict_each_other_is_refused(prepared):
    file = Path(prepared.folder) / MANIFEST_FILE
    content = json.loads(file.read_text())
    content["train"]["tokens"] += 32
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"230 rows, its tokens give 231: it is damaged"):
        rows(open_prepared(prepared.folder), "train")


def test_folder_that_does_not_fit_the_model_is_refused(prepared):
    with pytest.raises(DataError, match=r"rows of 32 tokens, the model expects 64.*--sequence-length 64"):
        open_prepared(prepared.folder, sequence_length=64)
    with pytest.raises(DataError, match=r"257 token ids, the model knows 256. Set model.vocab_size=257"):
        open_prepared(prepared.folder, vocab_size=256)


def test_unfinished_folder_and_exchanged_tokenizer_are_refused(make_prepared, tmp_path):
    folder = make_prepared("bpe", train_bpe_vocab=300)
    other = make_prepared("other", train_bpe_vocab=280)
    assert open_prepared(folder).tokenizer.decode(open_prepared(folder).tokenizer.encode("λ")) == "λ"
    shutil.copy(other / read_manifest(other).tokenizer, folder / read_manifest(folder).tokenizer)
    with pytest.raises(DataError, match="not the one its rows were made with"):
        open_prepared(folder)
    (other / MANIFEST_FILE).unlink()
    with pytest.raises(DataError, match="unfinished"):
        open_prepared(other)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    skips=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 30)).map(lambda pair: (pair[0], sum(pair))), max_size=4),
    stop=st.integers(0, 5),
    sizes=st.permutations([1, 2, 4]),
)
def test_a_stream_with_skips_is_the_other_without_those_samples_from_anywhere_on_any_data_size(prepared, skips, stop, sizes):
    left = [sample for sample in range(400) if not any(begin <= sample < end for begin, end in skips)]
    with iterator(prepared, sizes[0], skip=skips) as train:
        for _ in range(stop):
            next(train)
        state = json.loads(json.dumps(train.state()))
    assert state["samples"] == (left[stop * GLOBAL_BATCH - 1] + 1 if stop else 0)
    unskipped = global_rows(prepared, 1, 20)
    expected = unskipped[left[stop * GLOBAL_BATCH : (stop + 3) * GLOBAL_BATCH]]
    assert np.array_equal(global_rows(prepared, sizes[1], 3, state, skip=skips), expected)


def test_a_position_means_the_same_whatever_is_skipped(prepared):
    """Also: what is consumed already is not undone, and what is skipped no longer comes back."""
    whole = global_rows(prepared, 1, 8)
    with iterator(prepared) as train:
        for _ in range(2):
            next(train)
        state = train.state()
    past = [(0, 20), (16, 24)]
    assert np.array_equal(global_rows(prepared, 1, 2, state, skip=past), whole[32:64])
    with iterator(prepared, skip=past) as train:
        train.restore(state)
        assert train.state() == state
    with iterator(prepared, skip=[(32, 40)]) as train:
        train.restore(state)
        next(train)
        later = train.state()
    assert later["samples"] == 56 and np.array_equal(global_rows(prepared, 1, 2, later), whole[56:88])
