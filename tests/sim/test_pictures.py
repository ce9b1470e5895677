"""The pictures show one version at a time on a server, and a point for every setting."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dora.sim import svg
from dora.sim.pictures import draw, scaling, staleness, step_time, timeline
from dora.sim.report import rows
from dora.sim.sweep import cases, run
from dora.sim.trace import Period, Trace, trace
from dora.sim.world import World
from tests.sim.test_simulate import dora
from tests.sim.test_world import TROUBLE
from tests.sim.worlds import workload


def shapes(picture: str, kind: str) -> list[dict[str, str]]:
    """Attributes of all shapes of a kind, except for the white background."""
    found = [element.attrib for element in ElementTree.fromstring(picture) if element.tag.endswith(kind)]
    return [attributes for attributes in found if attributes.get("fill") != "white"]


def texts(picture: str) -> set[str]:
    return {element.text or "" for element in ElementTree.fromstring(picture) if element.tag.endswith("text")}


@pytest.fixture(scope="module")
def traced() -> tuple[Trace, World]:
    one = workload("dora", k=2, **TROUBLE)
    found = Trace(one.num_instances)
    world = World(one, seed=3, sink=found)
    world.run()
    found.finish(world.now)
    return found, world


def test_a_trace_shows_one_version_at_a_time_and_decoding_only_under_it(traced: tuple[Trace, World]) -> None:
    _lanes_are_possible(traced[0])


def _lanes_are_possible(found: Trace) -> None:
    for lane in (lane for row in found.rows for lane in row):
        assert all(a.end <= b.begin for a, b in zip(lane.held, lane.held[1:], strict=False))
        for span in lane.decoding:
            assert any(h.begin <= span.begin and span.end <= h.end and h.version == span.version for h in lane.held)


def test_a_trace_of_adapters_shows_as_many_versions_at_a_time_as_a_server_has_places() -> None:
    one = workload("dora", k=2, adapters={"use": "served"}, **TROUBLE)
    found, begin, end = trace(one, seed=3)
    _lanes_are_possible(found)
    assert {len(row) for row in found.rows} == {5}
    for row in found.rows:
        held = [period for lane in row for period in lane.held]
        together = [[p.version for p in held if p.begin <= one.begin < p.end] for one in held]
        assert max(map(len, together)) > 2
        assert all(len(versions) == len(set(versions)) for versions in together)
    bars = shapes(timeline(found, title="", begin=begin, end=end), "rect")
    assert len({bar["y"] for bar in bars}) > 1 + 2 * len(found.rows), "the trainer, and lanes of their own"


def test_a_trace_adds_up_to_the_simulations_measurements(traced: tuple[Trace, World]) -> None:
    found, world = traced
    assert len(found.published) == world.newest + 1
    assert sum(s.end - s.begin for s in found.trainer) == pytest.approx(world.measure.marks[-1].busy_s)
    assert Counter(s.version for s in found.trainer).keys() == set(range(24))
    for [row], instance in zip(found.rows, world.instances, strict=True):
        decoding_s = sum(s.end - s.begin for s in row.decoding)
        use = instance.use
        assert decoding_s >= use.full_s + use.thin_new_s + use.thin_old_s + use.prefill_s + use.again_s - 1e-6


def test_a_timeline_has_a_bar_for_every_span_in_the_colors_of_the_versions() -> None:
    found = Trace(2)
    found.rows[0][0].held = [Period(0, 40, 1), Period(50, 100, 2)]
    found.rows[0][0].decoding = [Period(10, 30, 1), Period(30.001, 35, 1), Period(200, 300, 2)]
    found.trainer = [Period(90, 120, 3)]
    found.published = [0.0, 50.0, 51.0]
    picture = timeline(found, title="a < b", begin=0, end=100)
    bars = shapes(picture, "rect")
    assert Counter(bar["fill"] for bar in bars) == {svg.color(1): 2, svg.color(2): 1, svg.color(3): 1}
    pixel_s = 100 / (svg.WIDTH - 24 - svg.LEFT)
    widths = sorted(round(float(bar["width"]) * pixel_s) for bar in bars)
    assert widths == [10, 25, 40, 50], "a gap that cannot be seen is closed, what is outside is cut"
    assert {"a < b", "v0", "v1"} <= texts(picture)
    assert "v2" not in texts(picture), "labels do not overlap"


def test_a_large_fleet_is_drawn_in_part() -> None:
    found = Trace(200)
    for [lane] in found.rows:
        lane.held = [Period(0, 10, 0)]
    picture = timeline(found, title="", begin=0, end=10)
    assert len(shapes(picture, "rect")) == 50
    assert "1 of 4" in texts(picture)


def test_a_traced_job_shows_the_steady_state() -> None:
    _, begin, end = trace(workload("dora", k=2), seed=0)
    assert 0 < begin < end


def test_charts_have_a_point_for_every_setting_and_shares_that_add_up() -> None:
    found = cases(workload(), strategies=["dora", "sync"], staleness=[1, 2], splits=[], instances=[8, 16], seeds=[0])
    made = rows(run(found, processes=1))
    assert len(shapes(step_time(made), "circle")) == len(shapes(scaling(made), "circle")) == len(made) == 6
    bars = [bar for bar in shapes(staleness(made), "rect") if float(bar["x"]) < svg.WIDTH - svg.RIGHT]
    full = svg.Frame(0, 1, 1.0)
    for number in range(len(made)):
        heights = sum(float(bar["height"]) for bar in bars if bar["fill"] == svg.color(number))
        assert heights == pytest.approx(full.y(0) - full.y(1), abs=0.1)
    assert set(draw(made[:1], found[:1])) == {"staleness", "step-time", "timeline-dora-k1-8of12"}


def test_settings_that_differ_in_rules_or_adapters_have_pictures_of_their_own() -> None:
    found = cases(workload(), strategies=[], staleness=[], splits=[], instances=[], seeds=[0], rules=["dora", "paper"])
    found += cases(
        workload(job={"without": ("tail_care",)}), strategies=[], staleness=[], splits=[], instances=[], seeds=[0]
    )
    found += cases(
        workload(adapters={"use": "served"}), strategies=[], staleness=[], splits=[], instances=[], seeds=[0]
    )
    made = rows(run(found, processes=1))
    drawn = draw(made, found)
    assert set(drawn) - {"staleness", "step-time"} == {
        f"timeline-dora-{part}8of12" for part in ("k2-", "k2-paper-", "k2-dora-no_tail_care-", "served-k2-")
    }
    assert [title in drawn["timeline-dora-k2-paper-8of12"] for title in ("rules of paper", "tail_care")] == [
        True,
        False,
    ]
    assert len(shapes(step_time(made), "circle")) == len(made) == 4


def test_charts_show_only_the_fastest_split() -> None:
    found = cases(workload(), strategies=[], staleness=[], splits=[11, 3, 6], instances=[], seeds=[0])
    made = rows(run(found, processes=1))
    points = shapes(step_time(made), "circle")
    frame = svg.Frame(1.7, 2.3, 1.1 * min(row.step_s for row in made))
    assert [float(point["cy"]) for point in points] == [
        pytest.approx(frame.y(min(row.step_s for row in made)), abs=0.1)
    ]


def test_ticks_are_round_numbers() -> None:
    assert svg.ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert svg.ticks(430, 1210) == [600, 800, 1000, 1200]


def test_the_command_writes_the_pictures(tmp_path: Path) -> None:
    words = ("launch/workloads/tail-bound.toml", "--steps", "10", "--pictures", str(tmp_path / "deep" / "pictures"))
    done = dora(*words)
    assert (done.returncode, done.stderr) == (0, "")
    names = {path.name for path in (tmp_path / "deep" / "pictures").iterdir()}
    assert names == {"staleness.svg", "step-time.svg", "timeline-dora-k1-8of12.svg"}
    (tmp_path / "taken").write_text("")
    done = dora(*words[:3], "--pictures", str(tmp_path / "taken"))
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
