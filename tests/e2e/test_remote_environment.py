"""The job with a tool, its hosts on another machine: over connections that are cut, and over a restart there."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dora.core.commands import CallEnvironment
from dora.core.events import CallFinished
from tests.e2e.runs import Run, assert_audit_clean, events_of, orders_of, settings, until
from tests.e2e.test_tools_job import JOB
from tests.environments.cutting import CuttingRelay
from tests.environments.remote import Served, program, served

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]


@contextmanager
def relay_to(port: int) -> Iterator[CuttingRelay]:
    """A relay that cuts, in a thread of its own."""
    found: list[tuple[CuttingRelay, Callable[[], object]]] = []
    ready = threading.Event()

    async def run() -> None:
        # No executor: its locks may be broken by the fork with which this thread's neighbor starts the run.
        end, loop = asyncio.Event(), asyncio.get_running_loop()
        async with CuttingRelay(port, seed=1) as relay:
            found.append((relay, lambda: loop.call_soon_threadsafe(end.set)))
            ready.set()
            await end.wait()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert ready.wait(60)
    [(relay, stop)] = found
    try:
        yield relay
    finally:
        stop()
        thread.join(60)


def job(folder: Path, port: int, server: Served, **changes: object) -> list[str]:
    line = program("connect", f"127.0.0.1:{port}", "--token-file", server.token)
    values = {"run__folder": folder / "runs", "status__port": 0, "run__steps": 3, "rollout__groups_per_step": 6}
    return [JOB, *settings(**{**values, "environment__command": json.dumps(line), **changes})]


def test_a_run_over_connections_that_are_cut_is_as_any_other(tmp_path: Path) -> None:
    with served(tmp_path) as server, relay_to(server.port) as relay:
        with Run(*job(tmp_path, relay.port, server)) as run:
            assert run.end(timeout_s=500) == 0, run.told()
            folder = run.folder
        assert relay.num_cut >= 5
        assert server.log.read_text().count(" starts") <= 2  # one to check the prompt, one for the run
    finished = events_of(folder, CallFinished)
    assert len(finished) == len(orders_of(folder, CallEnvironment))
    assert not [event.failed for event in finished if event.failed]
    assert_audit_clean(folder)


def test_after_a_restart_on_the_other_machine_the_run_goes_on_with_replays(tmp_path: Path) -> None:
    with served(tmp_path) as server, Run(*job(tmp_path, server.port, server, run__steps=4)) as run:
        run.until_trained(1)
        server.process.kill()
        server.process.wait()
        with served(tmp_path, port=server.port):
            assert run.end(timeout_s=500) == 0, run.told()
        folder = run.folder
        logged = until(lambda: (folder.root / "log.jsonl").read_text(), what="the log")
    assert "does not know it any more" in logged
    assert not [event.failed for event in events_of(folder, CallFinished) if event.failed]
    assert_audit_clean(folder)
