"""Reads a trace in the public format of ByteDance's StragglerAnalysis: ``trace-X.parquet``, its layout ``meta-X.yaml`` beside it.

One row for each operation of each worker: ``dp_rank, stage, rank, step, optype, start_ts, duration`` (seconds), ``seq_id`` (its number
among those of its type), ``mc`` (chunk) and ``mb_id`` (micro-batch), -1 where there is none. Devices of one worker (tensor or sequence
parallelism) share a row. Transfers carry no micro-batch: the k-th receive of a worker belongs to the k-th pass that needs one.

Failure case: a file that is no such trace, a damaged one, or a layout that its rows contradict is refused (TraceError) with what was
expected. Files are read as data only.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megascale_jax.config.layout import MeshShape
from megascale_jax.errors import TraceError
from megascale_jax.views.operations import CODES, NONE, Operations, TraceLayout

OPTYPE_OF = {
    "forward-compute": "forward",
    "backward-compute": "backward",
    "forward-send": "forward-send",
    "forward-recv": "forward-recv",
    "backward-send": "backward-send",
    "backward-recv": "backward-recv",
    "params-all-gather": "params-sync",
    "grads-reduce-scatter": "grads-sync",
    "embedding-grads-all-reduce": "embedding-sync",
    "layernorm-grads-all-reduce": "tensor-sync",
    "optimizer-clip-main-grad": "gradient-norm",
    "optimizer": "optimizer",
    "gc": "garbage-collection",
}
"""Their operation types, and ours."""

_NUMBERS = ("dp_rank", "stage", "rank", "step", "mc", "mb_id")
_SECONDS = ("start_ts", "duration")

MOST_ROWS = 20_000_000
"""Operations that are read at most; a small damaged file may claim any number."""

_Size = Annotated[int, Field(ge=1, le=1_000_000)]
_Chunks = Annotated[int, Field(ge=1, le=1_000)]


class _Meta(BaseModel):
    """What ``meta-X.yaml`` says."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    dp_size: _Size
    pp_size: _Size
    tp_size: _Size = 1
    dsp_size: _Size = 1
    vpp_size: _Chunks = 1


def read_straggler_trace(path: Path) -> Operations:
    """The operations of a trace file. Raises TraceError."""
    if not path.is_file():
        raise TraceError(f"{path} is no file; expected a trace such as trace-X.parquet, with meta-X.yaml beside it")
    meta = _read_meta(_meta_of(path))
    columns = _read_columns(path)
    layout = TraceLayout(
        mesh=MeshShape(meta.pp_size, meta.dp_size, 1),
        chunks=meta.vpp_size,
        devices_per_worker=meta.tp_size * meta.dsp_size,
        schedule="1f1b" if meta.vpp_size == 1 else "interleaved-1f1b",
    )
    try:
        return _operations(columns, layout)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error


def _meta_of(path: Path) -> Path:
    """The layout file of a trace file."""
    name = path.stem
    if not name.startswith("trace-"):
        raise TraceError(f"{path}: the name should be trace-X.parquet, so that meta-X.yaml is known to belong to it; rename both")
    return path.with_name(f"meta-{name.removeprefix('trace-')}.yaml")


def _read_meta(path: Path) -> _Meta:
    try:
        return _Meta.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise TraceError(f"{path} is missing: the layout of a trace lies beside it; copy it there") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise TraceError(f"{path} cannot be read as YAML ({error}); expected dp_size, pp_size, vpp_size") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise TraceError(f"{path}: {where}: {first['msg']}; expected the sizes dp_size, pp_size, vpp_size, each 1 or more") from error


def _read_columns(path: Path) -> dict[str, np.ndarray]:
    """The columns, numbers as int64, seconds as float64, ``optype`` as our codes."""
    import pyarrow as arrow
    from pyarrow import parquet

    wanted = (*_NUMBERS, "optype", *_SECONDS)
    try:
        with parquet.ParquetFile(path) as file:
            if missing := [name for name in wanted if name not in file.schema_arrow.names]:
                raise TraceError(f"{path} has no column {', '.join(missing)}; expected {', '.join(wanted)}")
            if file.metadata.num_rows > MOST_ROWS:
                raise TraceError(
                    f"{path} has {file.metadata.num_rows:,} operations, at most {MOST_ROWS:,} fit into memory; cut it by steps"
                )
            table = file.read(columns=list(wanted)).combine_chunks()
        for name in wanted:
            if nulls := table[name].null_count:
                raise TraceError(f"{path}: column {name} is empty in {nulls} of {table.num_rows} rows; expected a value in each")
        columns = {name: table[name].cast(arrow.int64()).to_numpy() for name in _NUMBERS}
        columns |= {name: table[name].cast(arrow.float64()).to_numpy() for name in _SECONDS}
        names = table["optype"].cast(arrow.string()).combine_chunks().dictionary_encode()
        found = names.dictionary.to_pylist()
        if unknown := sorted(set(found) - OPTYPE_OF.keys()):
            raise TraceError(f"{path}: operation type {unknown[0]!r} is not known; known: {', '.join(OPTYPE_OF)}")
        columns["optype"] = np.array([CODES[OPTYPE_OF[name]] for name in found], np.int64)[names.indices.to_numpy()]
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} is no readable Parquet file ({error}); copy it again") from error
    return columns


def _operations(columns: dict[str, np.ndarray], layout: TraceLayout) -> Operations:
    optype, chunk, microbatch = columns["optype"], columns["mc"].copy(), columns["mb_id"].copy()
    # What is done once a step may carry a number that means nothing.
    once = ~np.isin(optype, [CODES[name] for name in ("forward", "backward", "params-sync", "grads-sync")])
    chunk[once] = NONE
    microbatch[~np.isin(optype, [CODES["forward"], CODES["backward"]])] = NONE
    order = np.lexsort((columns["start_ts"], columns["stage"], columns["dp_rank"], columns["step"]))
    ends = {"forward": (0, layout.mesh.pipe * layout.chunks - 1), "backward": (layout.mesh.pipe * layout.chunks - 1, 0)}
    virtual = chunk * layout.mesh.pipe + columns["stage"]
    for direction, (first, last) in ends.items():
        passes = order[optype[order] == CODES[direction]]
        for transfer, end in ((f"{direction}-recv", first), (f"{direction}-send", last)):
            rows = order[optype[order] == CODES[transfer]]
            of = passes[virtual[passes] != end]
            where = ("step", "dp_rank", "stage")
            if rows.size != of.size or any((columns[name][rows] != columns[name][of]).any() for name in where):
                raise TraceError(
                    f"{rows.size} {transfer} for {of.size} {direction} passes that need one, or on other workers; expected one each. "
                    "The trace lacks operations, or vpp_size or pp_size is wrong"
                )
            chunk[rows], microbatch[rows] = chunk[of], microbatch[of]
    return Operations(
        step=columns["step"],
        rank=columns["rank"],
        pipe=columns["stage"],
        data=columns["dp_rank"],
        tensor=np.zeros_like(optype),
        optype=optype,
        microbatch=microbatch,
        chunk=chunk,
        start_s=columns["start_ts"],
        duration_s=columns["duration"],
        layout=layout,
    )
