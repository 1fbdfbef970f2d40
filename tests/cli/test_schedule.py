import json
import xml.etree.ElementTree as ET

import pytest
from typer.testing import CliRunner

from megascale_jax.cli.main import app
from megascale_jax.errors import ConfigError
from megascale_jax.parallel.pipeline.schedule import Schedule
from megascale_jax.views.schedule import schedule_svg, schedule_text


def run(*arguments):
    return CliRunner().invoke(app, ["schedule", *arguments], catch_exceptions=False)


def test_schedule_and_phases_are_shown_and_written(tmp_path):
    svg, data = tmp_path / "s.svg", tmp_path / "s.json"
    result = run("quickstart", "--phases", "--ticks", "5", "--svg", str(svg), "--json", str(data))
    assert result.exit_code == 0
    assert "2 stages x 2 chunks, 8 micro-batches: 4 warm-up + 13 steady + 4 cool-down ticks, bubble 6.2%" in result.stdout
    assert "5 of 21 ticks shown" in result.stdout
    assert "F0.in   | H.spread, L0.scatter" in result.stdout
    assert ET.parse(svg).getroot().tag.endswith("svg")
    written = json.loads(data.read_text())
    assert written["ticks"] == {"warmup": 4, "steady": 13, "cooldown": 4}
    assert written["phases"]["steady with embed, head, embed backward, weight gradients"][0] == {
        "compute": "F0.in",
        "collectives": ["H.spread", "L0.scatter"],
    }


def test_one_stage_has_a_schedule_without_a_bubble():
    result = run("gpt-1b", "--phases")
    assert "1 stage x 6 chunks, 8 micro-batches: 6 warm-up + 42 steady + 6 cool-down ticks, bubble 0.0%" in result.stdout
    assert "end with embed backward" in result.stdout


def test_impossible_plan_is_refused_with_good_values():
    with pytest.raises(ConfigError, match="nearest: 16, 32"):
        run("quickstart", "train.global_batch_size=20", "parallel.micro_batch_size=4")


def test_text_is_cut_into_blocks_and_shows_idle_slots():
    text = schedule_text(Schedule(2, 1, 2, 0), width=22)
    assert text.splitlines()[:3] == ["tick        0  1  2  3", "stage 0  F 0a 1a  .  .", "         B  .  . 0a 1a"]


def test_chunks_beyond_the_alphabet_have_letters_of_their_own():
    text = schedule_text(Schedule(1, 28, 1, 0), width=130)
    assert "  0y  0z 0aa 0ab" in text


def test_picture_has_a_cell_for_every_slot_of_every_stage():
    schedule = Schedule(4, 2, 8, 1)
    picture = schedule_svg(schedule, "<heading>")
    assert "&lt;heading&gt;" in picture
    assert "hsl" not in picture, "a notation that many viewers paint black"
    assert picture.count("<rect") == 1 + 2 * schedule.pipe * schedule.ticks
