"""A small three-dimensional step compiled for absent H100s; skips where the parts of ``[aot]`` are not installed."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from importlib.metadata import distributions
from pathlib import Path

import pytest

import megascale_jax.aot.compile as compiling
from megascale_jax.aot.compile import PARTS, _end_of, _last_words, check_compile, compile_experiment
from megascale_jax.aot.cost import COLLECTIVES, CostModel
from megascale_jax.aot.hlo import Array, parse_module
from megascale_jax.aot.overlap import PARTS as STEP_PARTS
from megascale_jax.aot.overlap import loop_bodies, loop_records, part_of
from megascale_jax.aot.worker import _largest_buffers
from megascale_jax.cli.compile import resolve, target_of
from megascale_jax.cli.schedule import schedule_of, tick_plans
from megascale_jax.config.layout import MeshShape
from megascale_jax.config.load import load_experiment
from megascale_jax.errors import CompileError, ConfigError, UsageError

ROOT = Path(__file__).resolve().parents[2]
LENGTH = 1536
"""Sequence length: no other dim has this number, or its half (halves of the sequence, a rank's own tokens), so that an array
with two of them is a mask or a score."""
SMALL = [
    "model.num_layers=8",
    "model.hidden_size=4096",
    "model.num_heads=32",
    "model.mlp_size=16384",
    "model.vocab_size=2000",
    f"model.sequence_length={LENGTH}",
    "model.window=[512, full]",
    "parallel.pipe=2",
    "parallel.tensor=2",
    "parallel.virtual_stages=2",
    "parallel.micro_batch_size=1",
    "train.global_batch_size=16",
]
ONE_STAGE = [
    "parallel.pipe=1",
    "parallel.virtual_stages=null",
    "parallel.micro_batch_size=2",
]
PLANS = {"64-gpus": (8, []), "64-gpus-one-stage": (8, ONE_STAGE)}
EXPOSED = {
    "64-gpus": {"P.gather_a"},
    "64-gpus-one-stage": {"B1.gather", "L0.scatter"},
}
"""Messages of loops that need not be covered. ``P.gather_a``: nothing follows the last phase of a warm-up tick, and XLA lets a
message as short as here end under copies. One stage: its plan has no product left beside these two in the cool-down."""
PEAK_MIB = {"64-gpus": 8_485, "64-gpus-one-stage": 8_045}
"""Recorded peak, with 3 % of air: a plan that needs more has lost a buffer's reuse."""


@pytest.fixture(scope="module", params=PLANS)
def compiled(request, tmp_path_factory):
    nodes, overrides = PLANS[request.param]
    experiment = resolve("gpt-1b", [*SMALL, f"train.global_batch_size={16 * nodes}", *overrides], "h100", nodes)
    experiment = experiment.model_copy(update={"name": request.param})
    check_installed()
    folder = tmp_path_factory.mktemp("compiled")
    return compile_experiment(experiment, "h100", folder), folder, experiment


def check_installed():
    """Skip a test that compiles where the compiler is not installed."""
    try:
        check_compile(load_experiment("gpt-1b"))
    except ConfigError as error:
        pytest.skip(str(error))


def test_small_step_fits(compiled):
    report, _, experiment = compiled
    assert report.devices == 2 * experiment.parallel.pipe * experiment.parallel.data
    assert report.fits and report.peak_bytes < PEAK_MIB[experiment.name] * 2**20
    assert 0 < report.modelled_mfu < 1
    assert 1.0 < report.executed_over_model_flops < 1.4, "bubble of 1/8 and the head's padding"
    assert {group["part"] for group in report.collectives} == {*STEP_PARTS, "outside"}


def test_compiled_schedule_covers_every_message_of_the_loops(compiled):
    """In every loop body there is no synchronous message, and none without a GEMM; and all are those of the plan of some tick."""
    _, folder, experiment = compiled
    plans = tick_plans(experiment, schedule_of(experiment)).values()
    planned = [{name for phase in plan.phases for name in phase.collectives} for plan in plans]
    rates, mesh = experiment.system.rates, MeshShape.of(experiment.parallel).by_axis
    model = CostModel(parse_module((folder / "module.hlo").read_text()), rates, mesh)
    bodies = 0
    for part, records in loop_records(model, json.loads((folder / "streams.json").read_text())):
        assert {r.scope.split("/")[-1] for r in records} in planned, part
        wrong = {r.scope.split("/")[-1] for r in records if r.is_sync or not r.gemms_beside}
        assert wrong <= EXPOSED[experiment.name], part
        bodies += 1
    assert bodies >= (3 if experiment.parallel.pipe == 1 else 7)


def test_loop_bodies_hold_each_kernel_once_for_each_layer_that_it_serves(compiled):
    """XLA would run a forward kernel twice where a loop stacks what it gives. One layer of a chunk has a window, one has not."""
    _, folder, _ = compiled
    module = parse_module((folder / "module.hlo").read_text())
    seen = set()
    for body, trips in loop_bodies(module, module.entry):
        calls = Counter(kernel for i in body.instructions if (kernel := kernel_of(i)))
        part = part_of(body)
        if trips == 1 or not calls:
            continue
        seen.add(part)
        slots = {"warmup": (2, 0), "cooldown": (0, 1)}.get(part, (2 if calls["attention.forward"] == 2 else 1, 1))
        for name, count in zip(("forward", "backward"), slots, strict=True):
            kernels = ("attention.forward",) if name == "forward" else ("attention.backward_q", "attention.backward_kv")
            assert [calls[kernel] for kernel in (*kernels, f"cudnn.{name}")] == [count] * (len(kernels) + 1), (part, calls)
        assert calls["loss.statistics"] == calls["loss.gradient"] <= 1
    assert seen == {"warmup", "steady", "cooldown"}


def test_no_kernel_is_counted_as_waiting(compiled):
    """Between the end of a collective and the stamp that follows it there is neither attention nor a loss: glue comes after it."""
    _, folder, _ = compiled
    module = parse_module((folder / "module.hlo").read_text())
    stamps, counted = 0, []
    for body, _ in loop_bodies(module, module.entry):
        waits = False
        for instruction in body.instructions:
            if is_stamp(instruction):
                stamps, waits = stamps + 1, False
            elif instruction.opcode.endswith("-done") and instruction.opcode.removesuffix("-done") in COLLECTIVES:
                waits = True
            elif waits and kernel_of(instruction):
                counted.append((part_of(body), instruction.name))
    assert stamps > 50 and counted == []


def is_stamp(instruction):
    """Whether an instruction reads the devices' clock."""
    return instruction.opcode == "custom-call" and "/clock/" in (instruction.text("op_name") or "")


@pytest.mark.parametrize("compiled", ["64-gpus"], indirect=True)
def test_stamps_hide_no_message_less(compiled, tmp_path):
    """Beside the same step without them: no message loses its GEMM but one that may be `EXPOSED` in so small a step."""
    report, _, experiment = compiled
    events = experiment.train.events.model_copy(update={"stamps": False})
    plain = experiment.model_copy(update={"train": experiment.train.model_copy(update={"events": events})})
    without = compile_experiment(plain, "h100", tmp_path)
    assert "/clock/triton_kernel_call" not in (tmp_path / "module.hlo").read_text()
    for part, fraction in without.hidden_fraction.items():
        assert fraction is None or (report.hidden_fraction[part] or 0) > fraction - 0.005, part
    lost = set(report.uncovered_collectives) - set(without.uncovered_collectives)
    assert {name.split()[0].split("/")[-1] for name in lost} <= EXPOSED[experiment.name]
    assert report.peak_bytes < 1.06 * without.peak_bytes and report.modelled_step_s < 1.02 * without.modelled_step_s


@pytest.mark.parametrize("target", ["a100", "b200"])
def test_sharded_step_holds_the_kernels_of_other_gpus(target, tmp_path):
    """All of Triton's kernels inside the step of eight GPUs, compiled for their compute capability."""
    check_installed()
    # one window: each of attention's kernels is compiled once
    kernels = [f"system.kernels.{operator}=triton" for operator in ("attention", "norm", "activation", "loss")]
    sizes = ["model.num_layers=2", "model.hidden_size=256", "model.num_heads=2", "model.mlp_size=1024", "model.window=512"]
    experiment = resolve("gpt-1b", [*SMALL, *sizes, *kernels, "parallel.pipe=1", "parallel.virtual_stages=1"], target, 1)
    compile_experiment(experiment, target, tmp_path)
    module = parse_module((tmp_path / "module.hlo").read_text())
    found = {kernel_of(i) for part in module.computations.values() for i in part.instructions if i.opcode == "custom-call"}
    assert found >= {
        *("attention.forward", "attention.backward_q", "attention.backward_kv", "norm.forward", "norm.backward"),
        *("activation.forward", "activation.backward", "loss.statistics", "loss.gradient"),
    }


def kernel_of(instruction):
    """Name of the kernel of ours, or of cuDNN's, that an instruction calls."""
    target = instruction.text("custom_call_target") or ""
    if "fmha" in target:
        return "cudnn.backward" if "Backward" in target else "cudnn.forward"
    words = re.split(r"[/()]", instruction.text("op_name") or "") if "triton" in target else []
    return next((word for word in words if word.startswith(("attention.", "norm.", "activation.", "loss."))), None)


def test_no_loop_copies_a_large_array(compiled):
    """Stash, rings and totals are updated in place: XLA copies them whole where it cannot tell reads from writes.

    Zeros for the sums of the next window may be copies of one another.
    """
    _, folder, _ = compiled
    module = parse_module((folder / "module.hlo").read_text())
    copies = [(i, body) for body, _ in loop_bodies(module, module.entry) for i in body.instructions if i.opcode == "copy"]
    assert [(i.name, i.bytes) for i, body in copies if i.bytes > 16 * 2**20 and "broadcast" not in i.operands[0]] == []


def test_program_holds_no_array_of_sequence_by_sequence(compiled):
    _, folder, _ = compiled
    module = parse_module((folder / "module.hlo").read_text())
    arrays = [array for part in module.computations.values() for i in part.instructions for array in i.arrays]
    assert all(any(length in array.dims for array in arrays) for length in (LENGTH, LENGTH // 2))
    assert [array for array in arrays if is_sequence_by_sequence(array)] == []


def test_program_holds_no_fp32_logits(compiled):
    """Neither whole nor those of a rank; in registers of a fusion, or as partial sums of a narrow product that XLA splits, they may be."""
    _, folder, experiment = compiled
    module = parse_module((folder / "module.hlo").read_text())
    parallel, vocabulary = experiment.parallel, experiment.model.vocab_size
    widths = [vocabulary, vocabulary // parallel.tensor, vocabulary // (parallel.tensor * parallel.pipe)]
    shapes = [[LENGTH * rows, width] for rows in (1, parallel.micro_batch_size) for width in widths]
    bodies = [module.entry, *(body for body, _ in loop_bodies(module, module.entry))]
    logits = {array for body in bodies for i in body.instructions for array in i.arrays if [n for n in array.dims if n > 1] in shapes}
    assert {array.dtype for array in logits} == {"bf16"}


def is_sequence_by_sequence(array):
    return sum(dim in (LENGTH, LENGTH // 2) for dim in array.dims) > 1


@pytest.mark.parametrize(
    ("dims", "found"),
    [
        ((LENGTH, LENGTH), True),
        ((4, LENGTH // 2, LENGTH), True),
        ((LENGTH // 2, 4, LENGTH // 2), True),
        ((1, LENGTH // 2, 1024), False),
        ((2, LENGTH, 128), False),
    ],
)
def test_halves_of_the_sequence_count_as_the_sequence(dims, found):
    assert is_sequence_by_sequence(Array("f32", dims)) == found


def test_streams_are_known_for_the_asynchronous_collectives(compiled):
    _, folder, _ = compiled
    assert set(json.loads((folder / "streams.json").read_text()).values()) == {0, 1}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((SMALL, "tpu", 1), UsageError, "--target tpu is not known; known: a100, h100"),
        (
            ([*SMALL, "parallel.pipe=3", "model.num_layers=6", "train.global_batch_size=24"], "h100", 1),
            UsageError,
            "--nodes 1 are 8 devices",
        ),
    ],
)
def test_wrong_requests_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        resolve("gpt-1b", *arguments)


def test_nodes_decide_the_data_axis_before_the_batch_is_judged():
    assert resolve("gpt-175b", ["train.global_batch_size=768"], "h100", 32).parallel.data == 4


def test_system_without_a_target_is_refused():
    with pytest.raises(ConfigError, match=r"system.device is CPU, which no target is; use --target"):
        target_of(load_experiment("quickstart"))


def test_every_package_of_the_extra_is_looked_for_by_a_name_of_its_own():
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["aot"]
    assert set(PARTS.values()) == {re.match(r"[\w-]+", requirement).group() for requirement in extra}
    check_installed()
    owners = {module: set() for module in PARTS}
    for package in distributions():
        folders = {".".join(folder.parts) for file in package.files or () for folder in file.parents}
        for module in folders & PARTS.keys():
            owners[module].add(package.metadata["Name"])
    assert owners == {module: {package} for module, package in PARTS.items()}


@pytest.mark.parametrize("missing", PARTS)
def test_missing_parts_are_named(monkeypatch, missing):
    monkeypatch.setattr(compiling, "find_spec", lambda module: None if module == missing else object())
    with pytest.raises(ConfigError, match=f"^compiling for absent GPUs needs {PARTS[missing]}: run `make aot`"):
        check_compile(load_experiment("gpt-1b"))


def test_part_of_a_missing_package_is_missing():
    assert not compiling._is_installed("no_such_package.part")


def test_plan_that_the_worker_refuses_is_an_error_of_the_configuration_in_its_words(tmp_path):
    check_installed()
    experiment = load_experiment("gpt-1b", ["parallel.data=16"])
    request = {"experiment": experiment.model_dump(mode="json"), "target": "h100", "nodes": 1}
    (tmp_path / "request.json").write_text(json.dumps(request))
    with pytest.raises(ConfigError, match=r"^mesh pipe 1 x data 16 x tensor 1 needs 16 devices, found 8; lower parallel.data"):
        compiling._run_worker(tmp_path)


def test_real_abort_of_the_compiler_is_one_line_and_exit_code_one(tmp_path):
    """XLA ends with SIGSEGV, in one of its last passes, where it finds no folder for its temporary files."""
    check_installed()
    sizes = ("num_layers=1", "hidden_size=64", "num_heads=1", "mlp_size=64", "vocab_size=64", "sequence_length=64", "window=full")
    overrides = [*(f"model.{size}" for size in sizes), "parallel.micro_batch_size=1", "train.global_batch_size=8"]
    overrides.append("system.kernels.loss=reference")  # a Triton kernel's assembler would fail before
    command = [sys.executable, "-m", "megascale_jax.cli.main", "compile", "gpt-1b", *overrides, "--target", "h100"]
    environment = os.environ | {"TMPDIR": str(tmp_path / "absent")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert re.fullmatch(r"error: the compiler was ended by SIG[A-Z]+: .*\(last pass: [\w-]+\)\n", done.stderr), done.stderr


def test_abort_of_the_compiler_ends_with_its_reason_and_last_pass():
    passes = "I1129 20:50:11.6 28528 hlo_pass_pipeline.cc:1]   HLO pass {}\n"
    stderr = passes.format("fusion") + passes.format("gemm-rewriter") + "F1129 20:50:11.7 28528 verifier.cc:234] Shapes differ\n*** Check"
    assert _last_words(stderr) == "F1129 20:50:11.7 28528 verifier.cc:234] Shapes differ (last pass: gemm-rewriter)"
    assert _last_words("Traceback\nValueError: please pass a smaller one\n") == "ValueError: please pass a smaller one"
    assert _last_words("I1129 x\nFatal Python error: Aborted\nExtension modules: numpy\n") == "Fatal Python error: Aborted"
    assert _end_of(-9) == "was ended by SIGKILL (out of memory?)" and _end_of(1) == "ended with code 1"
    assert issubclass(CompileError, Exception)


def test_largest_buffers_are_sizes_and_arrays_without_sums(tmp_path):
    rows = [
        "Memory Space: default (color=0)",
        "Total bytes: 46952867926 (43.73GiB)",
        "  cumulative_size;       size;       offset; used_by_n_values; shapes_list",
        "  ------------------------------------------------------------",
        "    9.64GiB( 20%);    9.64GiB;            0;               47; bf16[1,1,512,17920], 31×bf16[141,1,2048,17920]",
        "   10.14GiB(100%);  512.00MiB;  10349445120;               15; 15×f32[3,1,20480,17920]",
        "   10.14GiB(100%);    8.00KiB;  10349445128;                1; f32[2048]",
    ]
    (tmp_path / "m.memory-usage-report.txt").write_text("\n".join(rows) + "\n")
    assert _largest_buffers(tmp_path) == [
        "9.64 GiB: bf16[1,1,512,17920], 31×bf16[141,1,2048,17920]",
        "512.00 MiB: 15×f32[3,1,20480,17920]",
    ]
    assert len(_largest_buffers(tmp_path, count=1)) == 1
