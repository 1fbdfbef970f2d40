"""Source lines of collectives, from the tables that XLA prints at the head of a program."""

from pathlib import Path

import megascale_jax.aot.sources as sources
from megascale_jax.aot.hlo import parse_module
from megascale_jax.aot.report import make_report
from megascale_jax.config.load import load_experiment
from tests.aot.programs import HEADER, SYNC, done, gather, gemm, program

PACKAGE = Path(sources.__file__).parents[1]
TABLES = f"""
FileNames
1 "{PACKAGE}/train/step.py"
2 "{PACKAGE}/parallel/tensor.py"
3 "{PACKAGE.parent}/.venv/site-packages/optax/base.py"

FunctionNames
1 "train"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=68 end_line=69 column=30 end_column=30}}
2 {{file_name_id=2 function_name_id=1 line=18 end_line=18 column=1 end_column=2}}
3 {{file_name_id=3 function_name_id=1 line=7 end_line=7 column=1 end_column=2}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=2}}
3 {{file_location_id=3 parent_frame_id=2}}
4 {{file_location_id=3 parent_frame_id=5}}

"""
"""Frame 1 called 2, the innermost of ours, and 3, which is another package's; 4 is its own caller."""


def instruction(name, frame):
    return gather(name, more=f", {SYNC}, metadata={{stack_frame_id={frame}}}")


def source_of(frame, tables=TABLES):
    module = parse_module(program(instruction("g", frame), done("g")).replace(HEADER, HEADER + tables))
    return module.source_of(module.entry.by_name["g"])


def test_line_is_that_of_the_innermost_frame_in_the_package():
    assert source_of(1) == "megascale_jax/train/step.py:68"
    assert source_of(2) == "megascale_jax/parallel/tensor.py:18"
    assert source_of(3) == "megascale_jax/train/step.py:68", "the caller of the other package"


def test_program_without_tables_or_with_damaged_ones_has_no_lines():
    assert source_of(2, tables="") == ""
    assert source_of(9) == source_of(4) == ""
    assert source_of(2, tables=TABLES.replace("FileLocations", "Places")) == ""
    assert source_of(2, tables=TABLES.replace("line=18", "")) == "megascale_jax/train/step.py:68"


def test_report_names_the_lines_of_synchronous_collectives():
    mesh = ["parallel.pipe=2", "parallel.data=2", "parallel.tensor=2"]
    lines = [instruction("g", 2), gemm("k"), gather("h", "data"), done("h")]
    sizes = dict.fromkeys(("lower_s", "compile_s", "argument_bytes", "temp_bytes", "peak_bytes"), 1) | {"largest_buffers": []}
    for tables, where in ((TABLES, " (megascale_jax/parallel/tensor.py:18)"), ("", "")):
        module = parse_module(program(*lines).replace(HEADER, HEADER + tables))
        report = make_report(load_experiment("gpt-1b", mesh), "h100", 80, module, {}, sizes)
        assert report.sync_collectives == (f"outside all-gather over tensor{where}",)
