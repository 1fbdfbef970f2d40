"""The picture of a step: its units in the order of the schedule's table, well-formed SVG, bounded size."""

from xml.etree import ElementTree

import pytest

from megascale_jax.parallel.pipeline.schedule import Schedule
from megascale_jax.views import step_picture as module
from megascale_jax.views.step_picture import picture_svg, pipeline_devices, step_picture
from megascale_jax.views.timeline import read_timeline
from tests.views.fake_steps import stamps_of, write_steps
from tests.views.test_trace import GRIDS, scheduled

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("grid", GRIDS)
def test_the_order_of_a_picture_is_that_of_the_schedule(grid, tmp_path):
    schedule = Schedule(*grid)
    mesh = (schedule.pipe, 1, 2)
    write_steps(tmp_path / "run", stamps_of(schedule), mesh, [3], ranks=2)
    picture = step_picture(read_timeline(tmp_path / "run", 3, devices=pipeline_devices(mesh, 0, 1)))
    assert [one.device.place for one in picture.stages] == [(stage, 0, 1) for stage in range(schedule.pipe)]
    names, shapes = picture_svg(picture)
    ElementTree.fromstring(names)
    drawn = ElementTree.fromstring(shapes)
    boxes = [
        (box.get("class"), int(box.get("y")), int(box.get("x")), box.find(f"{SVG}title").text)
        for box in drawn.iter(f"{SVG}rect")
        if len(box)
    ]
    lanes = sorted({y for _, y, _, _ in boxes})
    for stage in picture.stages:
        for of in ("forward", "backward", "weight"):
            expected = scheduled(schedule, stage.device.stage, of)
            for units in (stage.real, stage.ideal):
                assert [(one.tick, one.micro_batch, one.chunk) for one in units if one.of == of] == expected, f"{stage.device.place}, {of}"
    of_lanes = {y: [box for box in boxes if box[1] == y] for y in lanes}
    assert len(of_lanes) == len(picture.stages) * 2 * len(picture.passes)
    for own in of_lanes.values():
        assert len({kind.split()[-2] for kind, *_ in own}) == 1, "a lane is of one pass"
        assert [x for _, _, x, _ in own] == sorted(x for _, _, x, _ in own), "what was earlier is further to the left"
    titles = [title for _, _, _, title in of_lanes[lanes[1]]]
    assert [title.split(",")[1] for title in titles] == [f" tick {tick}" for tick, *_ in scheduled(schedule, 0, "forward")]


def test_many_units_are_a_few_paths_in_the_same_places(tmp_path):
    schedule = Schedule(4, 3, 8, 0)
    write_steps(tmp_path / "run", stamps_of(schedule), (4, 1, 1), [1])
    picture = step_picture(read_timeline(tmp_path / "run", 1))
    fine = ElementTree.fromstring(picture_svg(picture)[1])
    coarse = ElementTree.fromstring(picture_svg(picture, 10)[1])
    boxes = {(int(box.get("x")), int(box.get("y"))) for box in fine.iter(f"{SVG}rect") if len(box)}
    pieces = [piece.partition("h")[0].split() for path in coarse.iter(f"{SVG}path") for piece in path.get("d").split("M")[1:]]
    assert {(int(x), int(y)) for x, y in pieces} == boxes
    assert not list(coarse.iter(f"{SVG}title"))


def test_a_step_without_details_has_its_units_and_no_ideal(tmp_path):
    write_steps(tmp_path / "run", stamps_of(Schedule(2, 1, 2, 1)), (2, 1, 2), range(1, 7), detail_every=4, ranks=2)
    picture = step_picture(read_timeline(tmp_path / "run", 6, devices=pipeline_devices((2, 1, 2), 0, 0)))
    assert picture.ideal_ns == 0 and all(stage.real and not stage.ideal and not stage.waits for stage in picture.stages)
    ElementTree.fromstring(picture_svg(picture)[1])


def test_waits_are_drawn_where_they_were(tmp_path):
    schedule = Schedule(2, 1, 2, 0)
    write_steps(tmp_path / "run", stamps_of(schedule), (2, 1, 2), [1])
    picture = step_picture(read_timeline(tmp_path / "run", 1, devices=[0]))
    (stage,) = picture.stages
    drawn = ElementTree.fromstring(picture_svg(picture)[1])
    boxes = [box for box in drawn.iter(f"{SVG}rect") if box.get("class").startswith("wait-")]
    inked = {x for box in boxes for x in range(int(box.get("x")), int(box.get("x")) + int(box.get("width")))}
    for _, _, begin_ns, end_ns in stage.waits:
        assert round(module.WIDE * (begin_ns + end_ns) / 2 / picture.length_ns) in inked
    assert len(inked) < module.WIDE
