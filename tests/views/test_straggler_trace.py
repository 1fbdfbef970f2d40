"""Import of the public trace format: what is written comes back, and whatever is damaged is refused in words."""

from pathlib import Path

import numpy as np
import pyarrow as arrow
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from megascale_jax.errors import TraceError
from megascale_jax.parallel.pipeline.schedule import Schedule
from megascale_jax.views import straggler_trace as module
from megascale_jax.views.operations import CODES, COLUMNS, NONE, Operations
from megascale_jax.views.straggler_trace import OPTYPE_OF, read_straggler_trace
from tests.views.made_trace import made_trace, names
from tests.views.public_traces import trace_file

THEIRS = {ours: theirs for theirs, ours in OPTYPE_OF.items()}


def as_public(operations: Operations) -> dict[str, list]:
    """The columns of a table in the public format, where transfers have no micro-batch."""
    transfers = operations.is_of("forward-send", "forward-recv", "backward-send", "backward-recv")
    return {
        "dp_rank": operations.data.tolist(),
        "stage": operations.pipe.tolist(),
        "rank": operations.rank.tolist(),
        "step": operations.step.tolist(),
        "optype": [THEIRS[name] for name in names(operations)],
        "start_ts": operations.start_s.tolist(),
        "duration": operations.duration_s.tolist(),
        "mc": np.where(transfers, NONE, operations.chunk).tolist(),
        "mb_id": np.where(transfers, NONE, operations.microbatch).tolist(),
    }


def write(folder: Path, columns: dict, **meta) -> Path:
    path = folder / "trace-M.parquet"
    parquet.write_table(arrow.table(columns), path)
    sizes = {"trial_name": "M", "dp_size": 2, "pp_size": 2, "vpp_size": 2, "world_size": 4} | meta
    (folder / "meta-M.yaml").write_text(yaml.safe_dump(sizes), encoding="utf-8")
    return path


MADE = made_trace(Schedule(2, 2, 4), data=2, steps=2)


@pytest.fixture
def public():
    return as_public(MADE)


def test_what_is_written_comes_back(tmp_path, public):
    read = read_straggler_trace(write(tmp_path, public))
    assert read.layout.schedule == "interleaved-1f1b" and read.layout.mesh == MADE.layout.mesh
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(read, name), getattr(MADE, name), err_msg=name)


def test_numbers_that_mean_nothing_are_left_out(tmp_path, public):
    """Collectors write micro-batch 0 for what happens once a step."""
    for column in ("mc", "mb_id"):
        public[column] = [
            0 if name.startswith("optimizer") else value for name, value in zip(public["optype"], public[column], strict=True)
        ]
    read = read_straggler_trace(write(tmp_path, public))
    once = read.is_of("optimizer", "gradient-norm")
    assert once.any() and (read.chunk[once] == NONE).all() and (read.microbatch[once] == NONE).all()


def test_devices_behind_a_worker_are_counted(tmp_path, public):
    assert read_straggler_trace(write(tmp_path, public, tp_size=4, dsp_size=2)).layout.devices_per_worker == 8


def test_a_public_trace_is_read():
    read = read_straggler_trace(trace_file("ST"))
    assert len(read) == 6784 and read.layout.mesh.by_axis == {"pipe": 4, "data": 2, "tensor": 1}
    assert np.count_nonzero(read.optype == CODES["forward"]) == 1024


@pytest.mark.parametrize("meta", [{"dp_size": 0}, {"pp_size": "many"}, {"pp_size": None}, {"vpp_size": 10**9}])
def test_layouts_that_mean_nothing_are_refused(tmp_path, public, meta):
    with pytest.raises(TraceError, match=f"meta-M.yaml: {next(iter(meta))}"):
        read_straggler_trace(write(tmp_path, public, **meta))


@pytest.mark.parametrize("text", ["- 1\n", "", "a: [", "dp_size: 2\x00", "!!python/object/apply:os.system ['true']"])
def test_a_layout_file_that_is_none_is_refused(tmp_path, public, text):
    path = write(tmp_path, public)
    (tmp_path / "meta-M.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(TraceError, match=r"meta-M.yaml"):
        read_straggler_trace(path)


@pytest.mark.parametrize("meta", [{"pp_size": 3}, {"vpp_size": 3}, {"vpp_size": 1}, {"dp_size": 1}])
def test_rows_that_contradict_the_layout_are_refused(tmp_path, public, meta):
    with pytest.raises(TraceError, match=r"trace-M.parquet: "):
        read_straggler_trace(write(tmp_path, public, **meta))


def test_missing_files_and_other_names_are_told(tmp_path, public):
    path = write(tmp_path, public)
    with pytest.raises(TraceError, match=r"is no file; expected a trace such as trace-X\.parquet"):
        read_straggler_trace(tmp_path / "trace-N.parquet")
    other = path.rename(tmp_path / "mine.parquet")
    with pytest.raises(TraceError, match=r"should be trace-X\.parquet"):
        read_straggler_trace(other)
    (tmp_path / "meta-M.yaml").unlink()
    with pytest.raises(TraceError, match=r"meta-M.yaml is missing"):
        read_straggler_trace(other.rename(path))


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("duration", -1.0, "duration_s is -1"),
        ("start_ts", float("nan"), "start_s is nan"),
        ("start_ts", None, "column start_ts is empty in 1 of"),
        ("optype", "lunch", "operation type 'lunch' is not known; known: forward-compute"),
        ("stage", 5, "expected one each|the layout has 0 to 1"),
        ("dp_rank", -3, "expected one each|the layout has 0 to 1"),
    ],
)
def test_rows_that_cannot_be_are_refused(tmp_path, public, column, value, words):
    public[column][0] = value
    with pytest.raises(TraceError, match=words):
        read_straggler_trace(write(tmp_path, public))


def test_columns_that_are_missing_or_of_another_kind_are_refused(tmp_path, public):
    with pytest.raises(TraceError, match=r"is no readable Parquet file|has no column"):
        read_straggler_trace(write(tmp_path, public | {"step": [str(step) + "x" for step in public["step"]]}))
    del public["mc"], public["stage"]
    with pytest.raises(TraceError, match="has no column stage, mc; expected dp_rank, stage"):
        read_straggler_trace(write(tmp_path, public))


def test_a_trace_without_rows_is_refused(tmp_path, public):
    empty = arrow.table(public).slice(0, 0)
    with pytest.raises(TraceError, match="without operations"):
        read_straggler_trace(write(tmp_path, {name: empty[name] for name in empty.column_names}))


def test_a_file_with_more_rows_than_fit_is_refused_before_it_is_read(tmp_path, public, monkeypatch):
    monkeypatch.setattr(module, "MOST_ROWS", 100)
    with pytest.raises(TraceError, match=f"has {len(MADE)} operations, at most 100 fit"):
        read_straggler_trace(write(tmp_path, public))


def test_a_lost_row_is_noticed(tmp_path, public):
    lost = public["optype"].index("forward-recv")
    with pytest.raises(TraceError, match=r"forward-recv for .* forward passes that need one"):
        read_straggler_trace(write(tmp_path, {name: values[:lost] + values[lost + 1 :] for name, values in public.items()}))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_are_refused_or_read_but_never_crash(tmp_path, data):
    path = write(tmp_path, as_public(MADE))
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans(), label="cut"):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    for place in data.draw(st.lists(st.integers(0, max(len(content) - 1, 0)), max_size=4)):
        if content:
            content[place % len(content)] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        read = read_straggler_trace(path)
    except TraceError as error:
        assert str(path) in str(error)
    else:
        assert len(read)
