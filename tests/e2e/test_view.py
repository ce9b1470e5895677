"""`dora view`, `dora report` and `dora trace` of a paced run, as a user calls them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dora.core import events as ev
from dora.journal.reader import Journal
from dora.journal.run_folder import RunFolder
from dora.journal.spans import read_timeline
from dora.status.data import NAMES
from tests.e2e.runs import (
    Run,
    assert_one_clear_error,
    command,
    environment,
    get,
    heed_ctrl_c,
    paced_workload,
    run_to_end,
    small,
    until,
)

pytestmark = [pytest.mark.deep, pytest.mark.timeout(400)]

WORKLOAD = paced_workload(steps=5, devices=10, rollout_devices=8, slots=4, kv_tokens=4000, tokens_s_per_device=3000.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    home = tmp_path_factory.mktemp("viewed")
    workload = home / "workload.toml"
    workload.write_text(WORKLOAD)
    result = run_to_end("pace", str(workload), "--seed", "3", "--time-scale", "20", "--folder", str(home / "runs"))
    assert result.returncode == 0, result
    [found] = [path for path in (home / "runs").iterdir() if (path / "journal.msgpack").exists()]
    return RunFolder(found)


class View:
    """A `dora view` process."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            command("view", *arguments, "--port", "0"),
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
            preexec_fn=heed_ctrl_c,
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline()
        [self.url] = re.findall(r"http://\S+", self.said)

    def end(self) -> int:
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(timeout=30)
        finally:
            self.process.kill()
            self.process.communicate()


def test_a_run_folder_is_served_until_ctrl_c(folder: RunFolder) -> None:
    view = View(str(folder.root))
    assert view.said == f"{view.url} shows {folder.root} (Ctrl-C ends it)\n"
    code, kind, page = get(view.url)
    assert (code, kind) == (200, "text/html; charset=utf-8")
    assert 'src="page/main.js"' in page
    answers = {name: json.loads(get(f"{view.url}/data/{name}")[2]) for name in NAMES}
    assert answers["status"]["phase"] == "finished"
    assert answers["info"]["run_id"] == folder.run_id
    assert [row["step"] for row in answers["steps"]["rows"]] == [*range(5)]
    assert answers["timeline"]["rows"]
    assert "# TYPE dora_" in get(f"{view.url}/metrics")[2]
    assert view.end() == 0


def test_the_demo_needs_no_run() -> None:
    view = View("--demo")
    home = Path(re.findall(r"shows (\S+)", view.said)[0])
    assert home.is_dir()
    assert json.loads(get(f"{view.url}/data/status")[2])["phase"] == "finished"
    assert json.loads(get(f"{view.url}/data/timeline")[2])["rows"]
    assert view.end() == 0
    assert not home.exists()


def test_a_report_is_one_file(folder: RunFolder, tmp_path: Path) -> None:
    result = run_to_end("report", str(folder.root), cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    [path] = tmp_path.iterdir()
    assert path.name == f"{folder.run_id}.html"
    assert 'id="recorded"' in path.read_text()
    assert 100_000 < path.stat().st_size < 5_000_000


def tracks(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return found


def test_a_trace_has_the_spans_of_every_rank_and_instance_and_the_sums_of_the_timeline(
    folder: RunFolder, tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    result = run_to_end("trace", str(folder.root), "-o", str(path))
    assert (result.returncode, result.stderr) == (0, "")
    events = json.loads(path.read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = tracks(events)
    assert set(found) == set(names)
    assert sorted(names.values()) == [*(f"instance {i}" for i in range(8)), "rank 0", "rank 1"]
    total: dict[tuple[int, str, int | None], float] = defaultdict(float)
    for spans in found.values():
        assert all(a["ts"] + a["dur"] == b["ts"] for a, b in pairwise(spans))  # they follow each other, to the µs
        for span in spans:
            total[span["pid"], span["name"], span.get("args", {}).get("version")] += span["dur"] / 1e6
    in_rows: dict[tuple[int, str, int | None], float] = defaultdict(float)
    for row in read_timeline(folder.timeline):
        for entries in row.lanes.values():
            for activity, version, seconds in entries:
                in_rows[{"rank": 1, "instance": 2}[row.kind], activity, version] += seconds
    assert total.keys() == in_rows.keys()
    assert total == pytest.approx(in_rows, abs=1e-2)
    assert {version for _, _, version in total} >= {None, 0, 1}


def test_a_trace_has_counters_and_marks(folder: RunFolder, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    assert run_to_end("trace", str(folder.root), "-o", str(path)).returncode == 0
    events = json.loads(path.read_text())["traceEvents"]
    counted = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            counted[event["name"]].append(event["args"]["value"])
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert counted["reward trained"] == [row["reward_mean"] for row in rows if row["kind"] == "step"]
    assert counted["staleness"] == [row["staleness_mean"] for row in rows if row["kind"] == "step"]
    told = [event for event, _ in Journal(folder.journal) if isinstance(event, ev.VersionPublished)]
    published = [(event.version, round(event.at * 1e6)) for event in told]
    marks = [(event["name"], event["ts"]) for event in events if event["ph"] == "i"]
    assert marks == [(f"version {version} published", at) for version, at in published]
    assert len(marks) == 6


@pytest.mark.parametrize("name", ["view", "report", "trace"])
def test_a_folder_that_is_no_run_is_one_clear_error(name: str, tmp_path: Path) -> None:
    result = run_to_end(name, str(tmp_path))
    assert_one_clear_error(result, code=2, says="is not a run folder")
    assert not [*tmp_path.iterdir()]


def test_a_run_without_spans_or_status_is_one_clear_error(tmp_path: Path) -> None:
    for name in ("config.toml", "journal.msgpack"):
        (tmp_path / name).touch()
    assert_one_clear_error(run_to_end("trace", str(tmp_path)), code=2, says="has no spans.jsonl")
    assert_one_clear_error(run_to_end("report", str(tmp_path)), code=2, says="has no status.json")
    assert_one_clear_error(run_to_end("view"), code=2, says="give a run folder, or --demo")


def test_a_run_and_a_view_of_its_folder_show_it_while_it_goes_on(tmp_path: Path) -> None:
    with Run(*small(tmp_path, run__steps=200, engine__instances=2, rollout__max_staleness=1)) as run:
        run.until_trained(2)
        groups = until(lambda: json.loads(get(f"{run.url}/data/groups")[2]), what="a step being formed")
        assert {"group", "version", "slack", "unfinished", "queued", "graded", "oldest_s"} <= set(groups[0])
        view = View(str(run.folder.root))
        try:
            for url in (run.url, view.url):
                assert json.loads(get(f"{url}/data/info")[2])["live"]
                assert json.loads(get(f"{url}/data/timeline")[2])["rows"]
                assert json.loads(get(f"{url}/data/samples")[2])["rows"][0]["text"]
            first = json.loads(get(f"{view.url}/data/steps")[2])
            run.until_trained(len(first["rows"]) + 2)
            later = json.loads(get(f"{view.url}/data/steps?from={first['next']}")[2])
            assert later["rows"][0]["step"] == first["rows"][-1]["step"] + 1
            assert json.loads(get(f"{view.url}/data/status")[2])["phase"] == "running"
            run.interrupt()
            assert run.end() == 130, run.told()
            until(lambda: json.loads(get(f"{view.url}/data/status")[2])["phase"] == "interrupted", what="that it ended")
        finally:
            assert view.end() == 0
