"""`megascale plan`: what it ranks, writes, has compiled, and refuses."""

import json

import pytest
from typer.testing import CliRunner

import megascale_jax.aot.compile as compiler
import megascale_jax.cli.plan_compile as plan_compile
from megascale_jax.cli.main import app
from megascale_jax.config.load import load_experiment
from megascale_jax.errors import CompileError, ConfigError, UsageError
from megascale_jax.sim.analytic import predict
from tests.cli.test_compile import REPORT

GIB = 2**30
LARGEST = ("--model", "gpt-175b", "--gpus", "12288", "--system", "a100")


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments])


def refused(*arguments):
    found = run(*arguments)
    assert isinstance(found.exception, UsageError), found.output
    return str(found.exception)


@pytest.fixture
def asked(monkeypatch):
    """Stands for the compiler, which answers the first plan, finds the second too large and gives up on the third."""
    plans = []

    def compile_experiment(plan, target, folder):
        assert folder.is_dir()
        plans.append((plan, target))
        if len(plans) == 3:
            raise CompileError("the compiler was ended by SIGABRT: a check")
        size = {"peak_bytes": (50 if len(plans) == 1 else 78) * GIB}
        return type(REPORT)(**{name: getattr(REPORT, name) for name in REPORT.__dataclass_fields__} | size)

    monkeypatch.setattr(compiler, "check_compile", lambda experiment: None)
    monkeypatch.setattr(plan_compile, "compile_experiment", compile_experiment)
    return plans


def test_layouts_are_ranked_shown_and_written(tmp_path):
    path = tmp_path / "out.json"
    found = run(*LARGEST, "--top", "3", "--json", str(path))
    assert found.exit_code == 0, found.output
    for text in ("simulated", "where the time goes", "pipeline bubble", "refused, layers do not divide", "refused, memory", "fits with"):
        assert text in found.output
    data = json.loads(path.read_text())
    (search,) = data["searches"]
    ranked = search["ranked"]
    assert [item["rank"] for item in ranked] == list(range(1, len(ranked) + 1)) and not data["invalid"]
    assert (data["global_batch_size"], data["software"], data["grade"]) == (6144, "megascale", "simulated")
    own = ranked[search["own_rank"] - 1]
    assert (own["tensor"], own["pipe"], own["virtual_stages"], own["micro_batch_size"]) == (8, 8, 6, 1)
    assert f"{search['own_rank']} own" in found.output and found.output.count(" none ") + found.output.count(" selective ") == 4
    for item in ranked[:5]:
        assert sum(item["parts_s"].values()) == pytest.approx(item["iteration_s"])
        assert item["tensor"] * item["pipe"] * item["data"] == 12288
    assert search["quickest_too_large"]["iteration_s"] < ranked[-1]["iteration_s"]


def test_a_written_plan_is_an_experiment_that_predicts_the_same(tmp_path):
    path, out = tmp_path / "best.yaml", tmp_path / "out.json"
    more = ("--pin", "pipe=8", "model.window=full", "--global-batch", "3072")
    found = run("gpt-175b", "--gpus", "6144", *more, "--write", str(path), "--json", str(out))
    assert found.exit_code == 0, found.output
    best = json.loads(out.read_text())["searches"][0]["ranked"][0]
    plan = load_experiment(str(path))
    assert plan.name == "gpt-175b" and plan.train.global_batch_size == 3072 and plan.model.window == "full"
    assert {name: getattr(plan.parallel, name) for name in ("pipe", "data", "tensor", "remat")} == {
        name: best[name] for name in ("pipe", "data", "tensor", "remat")
    }
    assert predict(plan).iteration_s == best["iteration_s"]
    assert path.read_text().startswith("# Layout found by `megascale plan` for 6,144 x NVIDIA A100")
    assert "# Simulated, not measured" in path.read_text()
    again = CliRunner().invoke(app, ["simulate", str(path), "--json", str(out)])
    assert again.exit_code == 0 and json.loads(out.read_text())["points"][0]["iteration_s"] == best["iteration_s"]


def test_several_counts_have_a_line_each_and_reasons(tmp_path):
    path = tmp_path / "out.json"
    found = run("gpt-175b", "--gpus", "8,256,1001", "--gpus", "1072", "--gpus", "1024", "--global-batch", "768", "--json", str(path))
    assert found.exit_code == 0, found.output
    data = json.loads(path.read_text())
    assert [search["devices"] for search in data["searches"]] == [256, 1024]
    reasons = {item["devices"]: item["reason"] for item in data["invalid"]}
    assert "the least memory is" in reasons[8] and "what would fit:" in reasons[8]
    assert reasons[1001] == "1,001 devices are no whole nodes of 8; nearest: 1,000, 1,008"
    assert "nearest counts that work: 1,024, 1,536" in reasons[1072]
    assert all(f"{count:,} GPUs: " in found.output for count in reasons)


def test_when_nothing_fits_it_says_what_would_and_ends_with_code_one():
    found = run("gpt-175b", "--gpus", "16")
    assert found.exit_code == 1
    assert "no layout fits: the least memory is" in found.output and "a device of" in found.output
    tight = run(*LARGEST, "--memory-margin", "0.02")
    assert tight.exit_code == 1 and "2% of NVIDIA A100" in tight.output


def test_a_model_without_an_experiment_needs_a_batch(tmp_path, monkeypatch):
    (tmp_path / "configs" / "model").mkdir(parents=True)
    (tmp_path / "configs" / "model" / "mine.yaml").write_text("base: gpt\nnum_layers: 16\n")
    monkeypatch.chdir(tmp_path)
    assert "give --global-batch" in refused("--model", "mine", "--gpus", "16")
    found = run("--model", "mine", "--gpus", "16", "--system", "h100", "--global-batch", "64", "--write", "mine.yaml")
    assert found.exit_code == 0, found.output
    plan = load_experiment("mine.yaml")
    assert (plan.name, plan.model.num_layers, plan.train.global_batch_size) == ("mine", 16, 64)


def test_programs_are_an_option_or_an_override(tmp_path):
    best = []
    for more in ((), ("--software", "megatron-lm"), ("software=megatron-lm", "software.host_s=9")):
        path = tmp_path / "out.json"
        assert run("gpt-175b", *more, "--json", str(path)).exit_code == 0
        best.append(json.loads(path.read_text())["searches"][0]["ranked"][0]["iteration_s"])
    assert best[0] < best[1] and best[2] == pytest.approx(best[1] + 8.8)


def test_the_best_are_compiled_and_stand_beside_what_was_simulated(asked, tmp_path):
    path = tmp_path / "out.json"
    found = run(*LARGEST, "--compile", "3", "--json", str(path))
    assert found.exit_code == 0, found.output
    data = json.loads(path.read_text())
    ranked = data["searches"][0]["ranked"][:3]
    assert [(plan.parallel.pipe, plan.parallel.micro_batch_size, target) for plan, target in asked] == [
        (item["pipe"], item["micro_batch_size"], "a100") for item in ranked
    ]
    assert [item["fits"] for item in data["compiled"]] == [True, False, False]
    assert data["compiled"][0]["peak_bytes"] == 50 * GIB and data["compiled"][0]["modelled_step_s"] == 2.325
    assert "50.0 of 79.0" in found.output and "3: the compiler was ended by SIGABRT" in found.output


def test_code_one_when_the_compiler_finds_none_to_fit(asked):
    asked.append("one before")
    found = run(*LARGEST, "--compile", "1")
    assert found.exit_code == 1 and "78.0 of 79.0" in found.output


def test_a_system_without_a_compiler_target_says_so(asked):
    text = refused(*LARGEST, "--compile", "1", "system.device=NVIDIA A800")
    assert "no compiler target for NVIDIA A800" in text and "NVIDIA H100" in text and not asked


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name an experiment"),
        (["--model", "gpt-175"], "did you mean 'gpt-175b'"),
        (["gpt-17b"], "no experiment named 'gpt-17b'; did you mean"),
        ([*LARGEST[:4], "--system", "a10"], "did you mean 'a100'"),
        (["gpt-175b", "--software", "megatron"], "did you mean 'megatron-lm'"),
        (["gpt-175b", "software.hosts=1"], "did you mean 'host_s'"),
        (["gpt-175b", "model.windows=full"], "did you mean model.window"),
        (["gpt-175b", "--pin", "tensors=8"], "did you mean 'tensor'"),
        (["gpt-175b", "--pin", "tensor=eight"], "expected a whole number"),
        (["gpt-175b", "--pin", "remat=some"], "expected none, selective, full"),
        (["gpt-175b", "parallel.tensor=4"], "--pin tensor=8"),
        (["gpt-175b", "system=h100", "--system", "a100"], "decide the same thing"),
        (["gpt-175b", "--gpus", "many"], "expected numbers of GPUs"),
        (["gpt-175b", "--gpus", "256,512", "--write", "x.yaml"], "take one plan"),
        (["gpt-175b", "--write", "x.txt"], "ends in .yaml"),
        (["gpt-175b", "--write", "no/such/x.yaml"], "does not exist"),
        (["gpt-175b", "train.schedule.warmup_steps=999999"], "whatever its layout"),
        (["gpt-175b", "--system", "cpu"], "system.hardware is missing for CPU"),
    ],
)
def test_what_it_refuses(arguments, says):
    found = refused(*arguments)
    assert says in found


def test_a_count_that_no_layout_divides_has_the_nearest_that_work():
    found = run("gpt-175b", "--gpus", "12280")
    assert found.exit_code == 1 and "nearest counts that work: 8,192, 12,288" in found.output


def test_parts_of_the_compiler_that_are_missing_are_told_before_the_search(monkeypatch):
    monkeypatch.setattr(compiler, "PARTS", {"no_such_part": "some-package"})
    found = run(*LARGEST, "--compile", "1")
    assert isinstance(found.exception, ConfigError) and "some-package" in str(found.exception) and not found.output
