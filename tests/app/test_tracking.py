"""The processes of trackers beside a run: started again after they end, and limited at its end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from dora.app import tracking as tracked
from dora.config.schema import TrackingConfig
from dora.errors import RemoteError
from dora.journal.run_folder import RunFolder
from dora.node.supervise import Node, tail
from dora.trackers.follow import num_rows, read_position
from dora.trackers.kinds import title
from tests.e2e.runs import until
from tests.trackers import records

ROWS = [{"kind": "step", "at": 1.0 * step, "step": step, "reward_mean": 0.1 * step} for step in range(6)]
BAD = "tests/trackers/bad.py"


@asynccontextmanager
async def running(
    folder: RunFolder, *trackers: str, end_timeout_s: float = 60.0
) -> AsyncIterator[tuple[Node, list[str]]]:
    told: list[str] = []
    config = TrackingConfig(trackers=trackers)
    lease = folder.lease(0)
    async with (
        Node(logs=folder.logs, lease=lease) as node,
        tracked.tracking(config, folder, node, lease=lease, tell=told.append, end_timeout_s=end_timeout_s),
    ):
        yield node, told


async def seen(holds: Callable[[], object], *, what: str) -> None:
    await asyncio.to_thread(until, holds, what=what)


def logged(folder: RunFolder, name: str) -> int:
    return read_position(folder.tracker(title(name))).rows


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setattr(tracked, "PAUSES_S", (0.1,) * 100)
    return records.make_folder(tmp_path, ROWS)


async def test_a_killed_tracker_is_started_again_and_goes_on_where_its_record_ends(folder: RunFolder) -> None:
    async with running(folder, "tensorboard") as (node, told):
        await seen(lambda: logged(folder, "tensorboard") == len(ROWS), what="all rows")
        first = node.children["tracker-tensorboard"].pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        records.append(folder, [{**ROWS[0], "step": 6}, {**ROWS[0], "step": 7}])
        await seen(lambda: logged(folder, "tensorboard") == len(ROWS) + 2, what="the new rows")
        assert node.children["tracker-tensorboard"].pid != first
    assert told == []
    wanted = records.expected(folder)
    assert records.from_tensorboard(folder.tracker("tensorboard"), wanted) == records.in_float32(wanted)


async def test_a_tracker_that_does_not_end_after_a_kill_does_not_fail_the_run(folder: RunFolder) -> None:
    async def does_not_end(*, timeout_s: float) -> None:
        raise RemoteError("tracker-tensorboard: process 4711 does not end after SIGKILL")

    async with running(folder, "tensorboard") as (node, told):
        node.children["tracker-tensorboard"].finish = does_not_end  # type: ignore[method-assign]
    assert len(told) == 1  # its record is incomplete


async def test_a_tracker_that_recovers_during_the_run_is_complete_at_its_end(folder: RunFolder) -> None:
    name = f"{BAD}:Raising"
    async with running(folder, name) as (node, told):
        log = node.children["tracker-Raising"].log
        await seen(lambda: any("ConnectionError" in line for line in tail(log)), what="its failure")
        (folder.tracking / "healed").touch()
        await seen(lambda: logged(folder, name) == len(ROWS), what="all rows")
    assert told == []


async def test_a_tracker_that_hangs_is_killed_at_the_end_and_the_user_is_told(folder: RunFolder) -> None:
    async with running(folder, f"{BAD}:Hanging", end_timeout_s=0.5) as (node, told):
        await seen(lambda: list(folder.tracker("Hanging").glob("events.*")), what="its file")
        child = node.children["tracker-Hanging"]
    assert child.pid is None
    finish = f"dora track {folder.root}"
    assert told == [f"Hanging has 0 of {num_rows(folder)} rows of this run; finish with {finish}"]


async def test_a_process_has_only_the_variables_of_its_tracker(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("DORA_TOKEN", "secret")
    async with running(folder, "tensorboard") as (node, _):
        await seen(lambda: logged(folder, "tensorboard"), what="a row")
        found = psutil.Process(node.children["tracker-tensorboard"].pid).environ()
    assert {"PATH", "DORA_LEASE"} <= found.keys()
    assert not {"WANDB_API_KEY", "DORA_TOKEN"} & found.keys()
