"""What a page asks, over real HTTP: of a status server and of a run folder. The folder is a recorded paced run."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from dora.app.demo import unpack_demo
from dora.app.saved_status import SavedStatus
from dora.app.viewing import folder_server
from dora.core.phases import GroupPhase
from dora.errors import ConfigError
from dora.journal.run_folder import RunFolder
from dora.journal.spans import TimelineRow, encode_line, read_timeline
from dora.observe.groups import MAX_GROUPS, forming
from dora.observe.snapshot import Snapshot, decode
from dora.observe.timeline import FOLDED_VERSIONS, LANE_VERSIONS, Digest, compact
from dora.status import page_server
from dora.status.data import NAMES
from dora.status.lines import tail
from dora.status.page_server import PageServer
from dora.status.records import MAX_CHARACTERS, MAX_TRANSCRIPT, Bounds, Records
from dora.status.server import StatusServer
from tests.core.builders import started
from tests.status.conftest import Watched
from tests.status.test_endpoint import Desk

TOKEN = "open sesame"


@pytest.fixture
def recorded(tmp_path: Path) -> RunFolder:
    return RunFolder(unpack_demo(tmp_path))


def sample(number: int, **changes: Any) -> bytes:
    line = {
        **{"step": 1, "group": 2, "trajectory": number, "version": 1, "reward": 0.5, "truncated": ""},
        **{"prompt": "1+1=", "text": "2", "prompt_tokens": [1, 2], "tokens": [3] * 10, "logprobs": [-0.5] * 10},
    }
    return json.dumps(line | changes).encode() + b"\n"


async def get(url: str, **headers: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        return answer.status, await answer.json()


def of_status(snapshot: Snapshot, folder: RunFolder, *, host: str = "127.0.0.1") -> StatusServer:
    return StatusServer(lambda: snapshot, host=host, port=0, requests=Desk(), token=TOKEN, folder=folder)


def of_folder(folder: RunFolder, *, host: str = "127.0.0.1") -> PageServer:
    return folder_server(folder.root, host=host, port=0)


def outside() -> str:
    """An address of this machine that is not on loopback."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])
    pytest.skip("this machine has loopback only")


# -- the same of a run and of a folder ---------------------------------------------------------------------------------


async def test_a_folder_and_a_run_answer_the_same_questions(recorded: RunFolder, middle: Snapshot) -> None:
    recorded.trajectories.write_bytes(sample(1))
    async with of_status(middle, recorded) as live, of_folder(recorded) as past:
        for name in NAMES:
            (code, of_live), (also, of_past) = (
                await get(f"{live.url}/data/{name}"),
                await get(f"{past.url}/data/{name}"),
            )
            assert (code, also) == (200, 200)
            assert type(of_live) is type(of_past)
            if "rows" in of_live:
                assert of_live == of_past
                assert of_live["rows"]
        assert decode(json.dumps((await get(f"{live.url}/data/status"))[1]).encode()) == middle
        assert (await get(f"{live.url}/data/info"))[1]["live"]
        told = (await get(f"{past.url}/data/info"))[1]
    assert not told["live"]
    assert told["audit"] == f"dora audit {recorded.root}"
    assert [(row["name"], row["count"]) for row in told["constraints"]] == [("C1", 0), ("C2", 0), ("C3", 0)]


async def test_a_constraint_that_the_strategy_breaks_by_design_says_so(recorded: RunFolder, middle: Snapshot) -> None:
    async with of_status(replace(middle, by_design={"C1": "3 of 10 answers"}), recorded) as server:
        rows = (await get(f"{server.url}/data/info"))[1]["constraints"]
    assert {row["name"]: row["by_design"] for row in rows} == {"C1": "3 of 10 answers", "C2": "", "C3": ""}


async def test_rows_are_those_of_the_files_and_later_only_what_was_added(recorded: RunFolder) -> None:
    async with of_folder(recorded) as server:
        for name, path in (("steps", recorded.metrics), ("timeline", recorded.timeline)):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            first = (await get(f"{server.url}/data/{name}"))[1]
            assert sorted(map(json.dumps, first["rows"])) == sorted(map(json.dumps, lines))
            assert first["next"] == len(lines)
            asked = f"{server.url}/data/{name}?from={first['next']}"
            assert (await get(asked))[1] == {"rows": [], "next": len(lines)}
            with path.open("ab") as file:
                file.write(json.dumps(lines[-1]).encode() + b"\n" + b'{"kind": "torn')
            assert (await get(asked))[1] == {"rows": [lines[-1]], "next": len(lines) + 1}
            assert (await get(f"{server.url}/data/{name}?from={first['next'] - 1}"))[1]["rows"][1:] == [lines[-1]]


async def test_any_number_of_requests_for_rows_leaves_threads_to_the_run(recorded: RunFolder) -> None:
    """The journal is committed in a thread of the same pool."""
    data = of_folder(recorded)._data
    assert data.records is not None
    with data.records._lock:  # as long as a large file is read for the first time
        asked = [asyncio.create_task(data.rows("samples")) for _ in range(64)]
        await asyncio.wait(asked, timeout=0)
        async with asyncio.timeout(10):
            await asyncio.to_thread(lambda: None)
    assert len(await asyncio.gather(*asked)) == 64


async def test_a_file_that_a_resume_cut_is_read_again(recorded: RunFolder) -> None:
    rows = [{"kind": "step", "step": step, "at": float(step)} for step in range(12)]
    lines = [json.dumps(row) + "\n" for row in rows]
    recorded.metrics.write_text("".join(lines))
    async with of_folder(recorded) as server:
        assert (await get(f"{server.url}/data/steps"))[1]["rows"] == rows
        other = [row | {"at": 100.0 + row["step"]} for row in rows[5:]]
        recorded.metrics.write_text("".join(lines[:5] + [json.dumps(row) + "\n" for row in other * 2]))
        assert (await get(f"{server.url}/data/steps?from=12"))[1] == {"rows": other, "next": 19}
        recorded.metrics.write_text(lines[0])
        assert (await get(f"{server.url}/data/steps?from=19"))[1] == {"rows": rows[:1], "next": 1}


async def test_lines_that_are_no_rows_are_left_out(recorded: RunFolder) -> None:
    recorded.metrics.write_bytes(
        b'{"kind":"step","step":0}\nnonsense\n\xff\xfe\n{"kind":"other"}\n[1]\n\n{"kind":"step","step":1}\n'
        b'{"kind":"evaluation_skipped","at":1.0,"version":3}\n'
    )
    recorded.timeline.write_bytes(b'{"kind":"rank"}\n[[[\n')
    recorded.trajectories.write_bytes(sample(1) + b"{}\n" + sample(2))
    async with of_folder(recorded) as server:
        rows = (await get(f"{server.url}/data/steps"))[1]
        assert [row.get("step", "skipped") for row in rows["rows"]] == [0, 1, "skipped"]
        assert rows["next"] == 8
        assert (await get(f"{server.url}/data/timeline"))[1] == {"rows": [], "next": 2}
        assert [row["trajectory"] for row in (await get(f"{server.url}/data/samples"))[1]["rows"]] == [1, 2]


async def test_a_missing_file_has_no_rows(recorded: RunFolder) -> None:
    recorded.metrics.unlink()
    async with of_folder(recorded) as server:
        assert (await get(f"{server.url}/data/steps"))[1] == {"rows": [], "next": 0}


@pytest.mark.parametrize("since", ["-1", "x", "", "1e3", "9" * 40, "٣"])
async def test_a_line_number_that_is_none_is_refused(recorded: RunFolder, since: str) -> None:
    async with of_folder(recorded) as server:
        code, said = await get(f"{server.url}/data/steps?from={since}")
        assert (code, said["said"]) == (400, "from: give the number of a line, 0 or more")


async def test_a_folder_that_is_gone_is_said(recorded: RunFolder) -> None:
    async with of_folder(recorded) as server:
        recorded.status.unlink()
        code, said = await get(f"{server.url}/data/status")
        assert (code, said["said"]) == (503, f"{recorded.root}: has no status.json: did the run never start?")


@pytest.mark.parametrize("name", ["other", "../status.json", "%2e%2e%2fstatus-token"])
async def test_nothing_else_is_served(recorded: RunFolder, name: str) -> None:
    async with of_folder(recorded) as server, aiohttp.ClientSession() as session:
        for place in ("data", "page"):
            async with session.get(f"{server.url}/{place}/{name}") as answer:
                assert answer.status == 404


async def test_the_page_works_below_a_path(recorded: RunFolder) -> None:
    """Behind a proxy that removes a prefix, every address that the page names is found."""
    async with of_folder(recorded) as server, aiohttp.ClientSession() as session:

        async def forward(request: web.Request) -> web.Response:
            async with session.get(f"{server.url}/{request.match_info['rest']}", headers={"Host": "localhost"}) as got:
                return web.Response(status=got.status, body=await got.read())

        proxy = web.Application()
        proxy.router.add_get("/jobs/7/{rest:.*}", forward)
        runner = web.AppRunner(proxy)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            base = f"http://127.0.0.1:{runner.addresses[0][1]}/jobs/7/"
            async with session.get(base) as got:
                page = await got.text()
            named = [part.split('"')[1] for part in page.replace("src=", "href=").split("href=")[1:]]
            assert "page/main.js" in named
            for name in [*named, *(f"data/{name}" for name in NAMES)]:
                assert not name.startswith(("/", "http"))
                async with session.get(base + name) as got:
                    assert got.status == 200, name
        finally:
            await runner.cleanup()


# -- who may see samples -----------------------------------------------------------------------------------------------


async def test_samples_need_the_token_when_the_server_is_not_on_loopback(recorded: RunFolder, middle: Snapshot) -> None:
    recorded.trajectories.write_bytes(sample(1, prompt="a secret"))
    recorded.status_token.write_text(TOKEN + "\n")
    for server in (of_status(middle, recorded, host=outside()), of_folder(recorded, host=outside())):
        async with server:
            asked = f"{server.url}/data/samples"
            assert (await get(asked))[0] == 401
            assert (await get(asked, Authorization="Bearer guess"))[0] == 401
            assert (await get(asked, Authorization=f"Bearer {TOKEN}"))[1]["rows"][0]["prompt"] == "a secret"
            assert (await get(f"{server.url}/data/steps"))[0] == 200


async def test_a_page_of_another_name_is_refused(recorded: RunFolder) -> None:
    async with of_folder(recorded) as server:
        assert (await get(f"{server.url}/data/samples", Host="evil.example"))[0] == 421


def test_a_folder_without_a_token_gets_a_random_one(recorded: RunFolder) -> None:
    first, second = of_folder(recorded).token, of_folder(recorded).token
    assert len(first) >= 32
    assert first != second


# -- bounds ------------------------------------------------------------------------------------------------------------


def rows_of(answer: bytes) -> list[dict[str, Any]]:
    return list(json.loads(answer)["rows"])


def test_a_long_run_is_thinned_evenly_and_keeps_both_ends(recorded: RunFolder) -> None:
    lines = []
    for step in range(10_000):
        lines.append(json.dumps({"kind": "step", "step": step}))
        if step % 2 == 0:
            lines.append(json.dumps({"kind": "evaluation", "version": step}))
    recorded.metrics.write_text("\n".join(lines) + "\n")
    records = Records(recorded)
    rows = rows_of(records.steps())
    steps = [row["step"] for row in rows if row["kind"] == "step"]
    assert len(rows) == 2_000
    assert len(steps) == 1_500
    assert (steps[0], steps[-1]) == (0, 9_999)
    assert {b - a for a, b in pairwise(steps)} == {6, 7}
    assert [row["step"] for row in rows_of(records.steps(14_990)) if row["kind"] == "step"] == [*range(9_993, 10_000)]


def test_rows_of_any_length_are_bounded_in_bytes(recorded: RunFolder) -> None:
    recorded.metrics.write_text("".join(json.dumps({"kind": "step", "x": "y" * 900}) + "\n" for _ in range(500)))
    answer = Records(recorded, bounds=Bounds(size=100_000)).steps()
    assert 50_000 < len(answer) <= 101_000


def timeline(*, rows: int, lanes: int, folded: bool) -> Iterator[TimelineRow]:
    draw = random.Random(7)
    for i in range(rows):
        entries = {lane: [("decoding", i // 3, draw.random()), ("prefill", i // 3, 0.25)] for lane in range(lanes)}
        if folded:
            yield TimelineRow(kind="instance", at=i * 0.25, s=0.25, num_lanes=1_000, folded=entries[0])
        else:
            yield TimelineRow(kind="instance", at=i * 0.25, s=0.25, num_lanes=lanes, lanes=entries)


def seconds(rows: list[TimelineRow]) -> dict[tuple[int | None, str], float]:
    spent: dict[tuple[int | None, str], float] = defaultdict(float)
    for row in rows:
        for lane, entries in [*row.lanes.items(), (None, row.folded)]:
            for activity, _, s in entries:
                spent[lane, activity] += s
    return spent


@pytest.mark.parametrize("folded", [False, True])
def test_a_long_timeline_is_joined_and_loses_no_second(recorded: RunFolder, folded: bool) -> None:
    rows = list(timeline(rows=9_000, lanes=3, folded=folded))
    recorded.timeline.write_bytes(b"".join(map(encode_line, rows)))
    records = Records(recorded)
    for answer in (records.timeline(), records.timeline(), records.timeline(1)):
        joined = [msgspec.convert(row, TimelineRow, strict=False) for row in rows_of(answer)]
        assert 750 <= len(joined) <= 2_000
        whole = rows if joined[0].at == 0 else rows[1:]
        assert seconds(joined) == pytest.approx(seconds(whole), abs=1e-2)
        assert all(a.at + a.s == pytest.approx(b.at) for a, b in pairwise(joined))
        assert joined[-1].at + joined[-1].s == 9_000 / 4
        most = FOLDED_VERSIONS if folded else LANE_VERSIONS
        assert max(len(row.folded or row.lanes[0]) for row in joined) <= 2 * most


def test_the_first_look_at_a_timeline_joins_rows_while_it_reads_them() -> None:
    rows = list(timeline(rows=9_000, lanes=3, folded=False))
    digest = Digest(most=300, size=10**6)
    digest.expect(9_000 / 4, encode_line(rows[-1]))
    held = []
    for row in rows:
        digest.add(row, encode_line(row))
        held.append(len(digest._lines))
    assert max(held) <= 300, "they were joined again and again without the expectation"
    joined = [msgspec.json.decode(line, type=TimelineRow) for line in digest.lines()]
    assert len(joined) >= 200
    assert seconds(joined) == pytest.approx(seconds(rows), abs=1e-2)


def test_the_end_of_a_file_is_its_complete_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    assert tail(path, 10) == []
    path.write_bytes(b"one\ntwo\nthree\nfo")
    assert tail(path, 100) == [b"one\n", b"two\n", b"three\n"]
    assert tail(path, 10) == [b"three\n"]


def test_a_timeline_of_many_lanes_is_bounded_in_bytes() -> None:
    lines = [encode_line(row) for row in timeline(rows=1_000, lanes=64, folded=False)]
    joined = compact(lines, most=2_000, size=500_000)
    assert 100_000 < sum(map(len, joined)) <= 500_000
    assert len(compact(lines[:50], most=2_000, size=10)) == 1


def test_lanes_of_a_fleet_that_grew_are_added_up() -> None:
    few = TimelineRow(kind="rank", at=0.0, s=1.0, num_lanes=1, lanes={0: [("packing", None, 1.0)]})
    many = TimelineRow(kind="rank", at=1.0, s=1.0, num_lanes=90, folded=[("packing", None, 90.0)])
    [row] = compact([encode_line(few), encode_line(many)], most=1, size=10_000)
    found = msgspec.json.decode(row, type=TimelineRow)
    assert (found.num_lanes, found.lanes, found.folded) == (90, {}, [("packing", None, 91.0)])


def test_samples_are_the_latest_with_long_texts_cut(recorded: RunFolder) -> None:
    long = sample(99, prompt="p" * 9_000, text="t" * 9_000, tokens=[1] * 5_000, logprobs=[0.0] * 5_000)
    recorded.trajectories.write_bytes(b"".join(sample(i) for i in range(99)) + long)
    rows = rows_of(Records(recorded).samples())
    assert [row["trajectory"] for row in rows] == [*range(50, 100)]
    assert (len(rows[-1]["prompt"]), len(rows[-1]["text"])) == (MAX_CHARACTERS, MAX_CHARACTERS)
    assert rows[-1]["prompt"].endswith("p…")
    assert (rows[-1]["num_tokens"], len(rows[-1]["tokens"])) == (5_000, 1_000)
    assert "prompt_tokens" not in rows[-1]


def test_an_episode_has_its_first_turns_with_long_texts_and_calls_cut(recorded: RunFolder) -> None:
    calls = [["look_up" * 50, "x" * 300]] * 20
    parts = [{"role": "policy", "text": "t" * 900, "end": i, "calls": calls} for i in range(500)]
    huge = [{"role": "environment", "text": "e" * 90_000, "end": i} for i in range(80)]
    few = [{"role": "policy", "text": "t", "end": 1}]
    lines = [*(sample(i, parts=p) for i, p in enumerate((parts, huge, few))), sample(4), sample(5, parts=2 * huge)]
    recorded.trajectories.write_bytes(b"".join(lines))
    answer = Records(recorded).samples()
    many, long, short, none, unread = rows_of(answer)
    assert (many["num_parts"], short["num_parts"], none["num_parts"]) == (500, 1, 0)
    assert unread["parts"] == []  # more than MAX_PARTS_BYTES
    assert MAX_TRANSCRIPT <= sum(len(part["text"]) for part in many["parts"]) < MAX_TRANSCRIPT + MAX_CHARACTERS
    assert [len(part["text"]) for part in long["parts"]] == [MAX_CHARACTERS] * 5
    assert short["parts"] == few
    assert len(answer) < 2**18


def test_a_look_reads_only_what_was_added(recorded: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(timeline(rows=2_000, lanes=3, folded=False))
    recorded.timeline.write_bytes(b"".join(map(encode_line, rows)))
    records = Records(recorded)
    records.timeline()
    seen: list[bytes] = []
    digest = records._timeline._kind_of
    records._timeline._kind_of = lambda line: (seen.append(line), digest(line))[1]  # type: ignore[func-returns-value]
    with recorded.timeline.open("ab") as file:
        file.write(encode_line(rows[0]))
    for _ in range(3):
        records.timeline(2_000)
    assert seen == [encode_line(rows[0])]


# -- the step being formed ---------------------------------------------------------------------------------------------


def test_the_groups_are_those_of_the_step_being_formed() -> None:
    core = started(groups_per_step=2, max_staleness=1, steps=4)
    before = forming(core.state)
    assert [row.group for row in before] == sorted(row.group for row in before)
    assert {row.phase for row in before} == {"generating"}
    assert all(0 <= row.slack <= 1 for row in before)
    core.answer(0)
    row = next(row for row in forming(core.state) if row.group == 0)
    assert (row.phase, row.unfinished, row.graded) == ("committed", 0, core.state.settings.group_size)
    core.answer(1)
    assert core.state.formation.step == 1
    assert not {0, 1} & {row.group for row in forming(core.state)}


def test_every_untrained_group_is_shown_until_it_is_committed_to_an_earlier_step(job: Watched) -> None:
    state = job.state
    shown = {row.group for row in forming(state)}
    step = state.formation.step
    assert shown == {
        g.id for g in state.ledger.groups.values() if g.phase is not GroupPhase.COMMITTED or g.step == step
    }


def test_at_most_so_many_groups_are_shown() -> None:
    core = started(groups_per_step=400, max_staleness=0, steps=2, slots=1_000, kv=10**6)
    assert len(core.state.ledger.groups) == 400
    assert [row.group for row in forming(core.state)] == [*range(MAX_GROUPS)]


async def test_the_groups_at_the_end_are_in_the_folder(recorded: RunFolder) -> None:
    core = started(groups_per_step=2, max_staleness=1, steps=4)
    saved = msgspec.json.decode(recorded.status.read_bytes(), type=SavedStatus)
    groups = tuple(forming(core.state))
    recorded.status.write_bytes(msgspec.json.encode(SavedStatus(saved.at, saved.url, saved.snapshot, groups)))
    async with of_folder(recorded) as server:
        assert (await get(f"{server.url}/data/groups"))[1] == [*msgspec.to_builtins(groups)]


def test_a_folder_that_is_no_run_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run folder: it has no config"):
        folder_server(tmp_path, host="127.0.0.1", port=0)
    assert os.listdir(tmp_path) == []


def test_the_rows_of_the_recorded_run_are_rows(recorded: RunFolder) -> None:
    assert len(list(read_timeline(recorded.timeline))) > 100


async def test_any_number_of_pages_has_the_status_made_once_a_second(
    recorded: RunFolder, middle: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0

    def snapshot() -> Snapshot:
        nonlocal made
        made += 1
        return middle

    monkeypatch.setattr(page_server, "SHARED_S", 60.0)
    async with StatusServer(snapshot, host="127.0.0.1", port=0, requests=Desk(), token=TOKEN) as server:
        for _ in range(5):
            assert (await get(f"{server.url}/data/status"))[1]["run_id"] == middle.run_id
        assert made == 1
        monkeypatch.setattr(page_server, "SHARED_S", -1.0)
        await get(f"{server.url}/data/status")
        assert made == 2
