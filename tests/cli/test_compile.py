"""`megascale compile` as a user calls it: which plans it compiles, and what it says about them. Nothing is compiled here."""

import dataclasses
import json
import xml.etree.ElementTree as ET

import pytest
from typer.testing import CliRunner

import megascale_jax.cli.compile as command
from megascale_jax.aot.overlap import Span
from megascale_jax.aot.report import CompileReport
from megascale_jax.cli.compile import resolve, split_overrides
from megascale_jax.cli.main import app
from megascale_jax.errors import UsageError

GIB = 2**30
REPORT = CompileReport(
    experiment="gpt-175b",
    target="h100",
    devices=12288,
    lower_s=4.0,
    compile_s=49.0,
    argument_bytes=2 * GIB,
    temp_bytes=29 * GIB,
    peak_bytes=31 * GIB,
    device_bytes=79 * GIB,
    largest_buffers=("9.64 GiB: 31×bf16[141,1,2048,17920]", "512.00 MiB: f32[8]"),
    modelled_step_s=2.325,
    modelled_mfu=0.472,
    executed_over_model_flops=1.03,
    tick_over_gemm=1.17,
    hidden_fraction={"warmup": 0.968, "steady": 0.998, "cooldown": None, "whole": 0.908},
    seconds_of={"gemm": 1.8},
    waits_s=0.062,
    collectives=(
        {"part": "steady", "axis": "tensor", "kind": "all-gather", "count": 1536, "bytes": 2e9, "seconds": 0.5, "hidden_seconds": 0.25},
    ),
    sync_collectives=("drain reduce-scatter over data (megascale_jax/parallel/zero.py:164)",),
    uncovered_collectives=(),
    steady_tick=(Span("compute", "F0.in", "gemm", 0.0, 1e-3), Span("tensor", "H.gather", "transfer", 0.0, 5e-4)),
)
ENOUGH = {"peak_bytes": 31 * GIB}
TOO_MUCH = {"peak_bytes": 72 * GIB}
PLAN = ("gpt-175b", "--target", "h100", "--nodes", "1536")


def run(*arguments):
    return CliRunner().invoke(app, ["compile", *arguments], catch_exceptions=False, env={"COLUMNS": "160"})


@pytest.fixture
def compiler(monkeypatch):
    """Stands for the compiler: ``compiler(*changes)`` makes one report after the other; gives the plans that it was asked for."""

    def answering(*changes):
        asked, reports = [], [dataclasses.replace(REPORT, **change) for change in changes]

        def compile_experiment(experiment, target, folder):
            (folder / "module.hlo").write_text(f"program {len(asked)}")
            asked.append((experiment, target))
            return reports[len(asked) - 1]

        monkeypatch.setattr(command, "check_compile", lambda experiment: None)
        monkeypatch.setattr(command, "compile_experiment", compile_experiment)
        return asked

    return answering


def test_plan_that_fits_is_shown_with_exit_code_zero(compiler):
    asked = compiler(ENOUGH)
    result = run(*PLAN)
    assert result.exit_code == 0, result.output
    ((experiment, target),) = asked
    assert (target, experiment.parallel.data) == ("h100", 192)
    shown = " ".join(result.output.replace("│", " ").split())
    for line in (
        "devices 12,288 h100",
        "peak memory 31.0 of 79.0 GiB",
        "modelled step 2.325 s",
        "modelled MFU 47.2%",
        "hidden, steady 0.998",
        "hidden, cooldown -",
        "steady tensor all-gather 1,536 2 500 250",
        "synchronous: drain reduce-scatter over data (megascale_jax/parallel/zero.py:164)",
    ):
        assert line in shown, result.output
    assert "no GEMM between" not in shown and "What would help" not in shown


def test_plan_that_does_not_fit_ends_with_exit_code_one_and_advice(compiler):
    compiler(TOO_MUCH)
    result = run(*PLAN, "parallel.remat=full")
    assert result.exit_code == 1
    assert "peak memory" in result.output and "72.0 of 79.0 GiB, does not fit" in result.output
    said = result.output[result.output.index("plan: 72.0 GiB") :]
    assert said.startswith("plan: 72.0 GiB do not fit into 90% of 79.0 GiB. Largest buffers:\n  9.64 GiB: 31×bf16[141,1,2048,17920]\n")
    assert "What would help: parallel.pipe=16 parallel.virtual_stages=null (all of the state, on 24,576 devices); parallel.data=256" in said
    assert "remat" not in said


def test_json_holds_the_report_of_a_plan_that_does_not_fit_too(compiler, tmp_path):
    compiler(TOO_MUCH)
    path = tmp_path / "report.json"
    assert run(*PLAN, "--json", str(path)).exit_code == 1
    written = json.loads(path.read_text())
    assert written["fits"] is False and written["peak_bytes"] == 72 * GIB and written["device_bytes"] == 79 * GIB
    assert (written["compile_s"], written["modelled_step_s"], written["modelled_mfu"]) == (49.0, 2.325, 0.472)
    assert (written["executed_over_model_flops"], written["tick_over_gemm"]) == (1.03, 1.17)
    assert written["hidden_fraction"] == {"steady": 0.998, "warmup": 0.968, "cooldown": None, "whole": 0.908}
    assert written["collectives"] == [dict(group) for group in REPORT.collectives]
    assert written["sync_collectives"] == list(REPORT.sync_collectives)


def test_two_plans_stand_side_by_side_and_the_first_decides_the_exit_code(compiler, tmp_path):
    asked = compiler(ENOUGH, TOO_MUCH)
    path = tmp_path / "report.json"
    result = run(*PLAN, "model.block=serial", "--compare", "parallel.remat=full", "--json", str(path))
    assert result.exit_code == 0
    assert [(plan.model.block, plan.parallel.remat) for plan, _ in asked] == [("serial", "none"), ("serial", "full")]
    shown = " ".join(result.output.replace("│", " ").split())
    assert "peak memory 31.0 of 79.0 GiB 72.0 of 79.0 GiB, does not fit" in shown
    assert "\nother plan: 72.0 GiB do not fit" in result.output and "\nplan: " not in result.output
    written = json.loads(path.read_text())
    assert [written[name]["peak_bytes"] for name in ("plan", "other")] == [31 * GIB, 72 * GIB]


def test_links_scale_both_rates_of_every_plan(compiler):
    asked = compiler(ENOUGH, ENOUGH)
    run(*PLAN, "--compare", "parallel.remat=full", "--links", "0.5")
    given = resolve("gpt-175b", [], "h100", 1536).system.rates
    for plan, _ in asked:
        assert plan.system.rates == given.model_copy(update={"tensor_gbps": given.tensor_gbps / 2, "network_gbps": given.network_gbps / 2})


def test_program_and_lanes_of_the_first_plan_are_written(compiler, tmp_path):
    compiler(ENOUGH, ENOUGH)
    program, picture = tmp_path / "step.hlo", tmp_path / "tick.svg"
    result = run(*PLAN, "--compare", "parallel.remat=full", "--keep-hlo", str(program), "--lanes", str(picture))
    assert result.exit_code == 0, result.output
    assert program.read_text() == "program 0"
    root = ET.parse(picture).getroot()
    drawn = "".join(root.itertext())
    assert root.tag.endswith("svg") and "gpt-175b, 12,288 h100: one steady tick" in drawn
    assert "F0.in: 1000 us" in drawn and "H.gather: 500 us" in drawn


@pytest.mark.parametrize("option", ["--json", "--keep-hlo", "--lanes"])
def test_nothing_is_compiled_when_a_file_cannot_be_written(compiler, tmp_path, option):
    asked = compiler(ENOUGH)
    with pytest.raises(UsageError, match=f"{option} .* does not exist"):
        run(*PLAN, option, str(tmp_path / "absent" / "file"))
    assert asked == []


@pytest.mark.parametrize(
    ("overrides", "target", "nodes", "message"),
    [
        (["system=a100"], "h100", None, "system=a100 and --target h100 decide the same thing; leave one of them out"),
        (["system.device=X"], "h100", None, "system.device=X and --target h100 decide the same thing"),
        (["parallel.remat=full", "parallel.data=96"], None, 1536, "parallel.data=96 and --nodes 1536 decide the same thing"),
    ],
)
def test_override_that_an_option_would_undo_is_refused(overrides, target, nodes, message):
    with pytest.raises(UsageError, match=message):
        resolve("gpt-175b", overrides, target, nodes)


def test_overrides_that_no_option_decides_stay():
    plan = resolve("gpt-175b", ["system=h100", "system.devices_per_node=16", "parallel.data=96"], None, None)
    assert (plan.system.device, plan.system.devices_per_node, plan.parallel.data) == ("NVIDIA H100 80GB HBM3", 16, 96)
    assert resolve("gpt-175b", ["system.devices_per_node=16"], "h100", None).system.devices_per_node == 16


@pytest.mark.parametrize(
    ("overrides", "nodes", "nearest"),
    [
        ([], 3, "8, 16"),
        ([], 39, "32, 48"),  # 40 are whole replicas, but their data axis of 5 does not divide the batch
        ([], 9999, "6144"),
        (["parallel.tensor=6"], 8, "6, 12"),
        (["train.global_batch_size=7"], 3, "none for this batch: change train.global_batch_size"),
    ],
)
def test_nodes_that_hold_no_whole_replicas_are_refused_with_good_ones(overrides, nodes, nearest):
    with pytest.raises(UsageError, match=rf"--nodes {nodes} are {8 * nodes} devices, not divisible by .*; nearest: {nearest}$"):
        resolve("gpt-175b", overrides, "h100", nodes)


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("parallel.remat=full  model.block=serial", ["parallel.remat=full", "model.block=serial"]),
        ("model.window=[768, full] parallel.remat=full", ["model.window=[768, full]", "parallel.remat=full"]),
        ("'model.window=[768, full]' parallel.remat=full", ["model.window=[768, full]", "parallel.remat=full"]),
        ("full", ["full"]),
    ],
)
def test_overrides_of_the_other_plan_are_split_as_a_shell_does(text, overrides):
    assert split_overrides(text) == overrides


def test_quote_that_does_not_end_is_refused():
    with pytest.raises(UsageError, match="No closing quotation; expected overrides such as"):
        split_overrides("model.window='[768, full]")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--target", "h100", "--compare", "system=a100"), "system=a100 and --target h100 decide the same thing"),
        (("--nodes", "1536", "--compare", "parallel.data=96"), "parallel.data=96 and --nodes 1536 decide the same thing"),
        (("--compare", "parallel.remat=none"), "--compare 'parallel.remat=none' changes nothing"),
    ],
)
def test_plan_is_not_compared_with_itself(compiler, arguments, message):
    compiler(ENOUGH, ENOUGH)
    with pytest.raises(UsageError, match=message):
        run("gpt-175b", *arguments)
