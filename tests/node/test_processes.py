"""A process that follows orders: whatever these are, at most one runs, and its state is that of the last order."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from dora.errors import ConfigError
from dora.node import supervise
from dora.node.plan import SERVE_KEY, ProcessPlan
from dora.node.processes import OrderedProcess
from dora.node.supervise import Node
from dora.transport.node_messages import ProcessState
from tests.node.peers import WAIT_S

#: A server whose address names its process, and which says its key.
CODE = f"import os, threading; print(os.environ['{SERVE_KEY}']); "
CODE += "print(f'ready http://127.0.0.1:{os.getpid()}', flush=True); threading.Event().wait(300)"


class Followed:
    """An ordered process, and all its states."""

    def __init__(self, node: Node, *, code: str = CODE, api_key: str | None = None) -> None:
        self.code = code
        self.error: Exception | None = None  # of its plan
        self.states: list[ProcessState | None] = []
        self._changed = asyncio.Event()
        self.process = OrderedProcess(
            self._plan, node=node, is_well=self._is_well, api_key=api_key, on_change=self._on_change
        )

    async def _plan(self) -> ProcessPlan:
        if self.error is not None:
            raise self.error
        argv = (sys.executable, "-c", self.code)
        return ProcessPlan(
            name="engine-0", argv=argv, env={**os.environ, "PYTHONUNBUFFERED": "1"}, ready_timeout_s=WAIT_S
        )

    @staticmethod
    async def _is_well(url: str) -> bool:
        return True

    def _on_change(self) -> None:
        self.states.append(self.process.state)
        self._changed.set()

    async def until(self, is_so: Callable[[ProcessState | None], bool]) -> ProcessState | None:
        async with asyncio.timeout(WAIT_S):
            while not is_so(self.process.state):
                self._changed.clear()
                await self._changed.wait()
        return self.process.state

    async def up(self, start: int) -> ProcessState:
        state = await self.until(lambda state: state is not None and (state.start, state.phase) == (start, "up"))
        assert state is not None
        return state

    async def ended(self) -> ProcessState:
        state = await self.until(lambda state: state is not None and state.phase == "ended")
        assert state is not None
        return state


def pid_of(state: ProcessState) -> int:
    return int(state.url.rpartition(":")[2])


def children(code: str) -> list[psutil.Process]:
    """Return the children of this process that run `code`; other tests have others."""
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if code in child.cmdline()]


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with Node(logs=tmp_path, lease=tmp_path / "lease") as node:
        yield node


async def test_a_process_starts_is_up_and_ends(node: Node) -> None:
    followed = Followed(node)
    followed.process.follow(2)
    state = await followed.up(2)
    assert psutil.pid_exists(pid_of(state))
    followed.process.follow(2)  # repeated
    await followed.process.close()
    assert [state.phase if state is not None else None for state in followed.states] == ["starting", "up", None]
    assert not psutil.pid_exists(pid_of(state))


async def test_of_quick_orders_the_last_one_counts_and_one_process_runs(node: Node) -> None:
    followed = Followed(node)
    for start in (1, None, 2, 3, None, 4):
        followed.process.follow(start)
        await asyncio.sleep(0)  # each one begins
    state = await followed.up(4)
    assert [child.pid for child in children(CODE)] == [pid_of(state)]


async def test_an_order_that_comes_while_a_process_is_ended_is_followed_after_it(node: Node) -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + CODE
    followed = Followed(node, code=stubborn)
    followed.process.follow(1)
    first = await followed.up(1)
    followed.code = CODE
    followed.process.follow(2)
    await asyncio.sleep(0)
    followed.process.follow(3)
    second = await followed.up(3)
    assert not psutil.pid_exists(pid_of(first))
    assert [child.pid for child in children(CODE)] == [pid_of(second)]


async def test_each_start_has_a_key_of_its_own_unless_one_is_configured(node: Node, tmp_path: Path) -> None:
    followed = Followed(node)
    followed.process.follow(1)
    first = (await followed.up(1)).key
    followed.process.follow(2)
    second = (await followed.up(2)).key
    assert first != second
    await followed.process.close()
    configured = Followed(node, api_key="configured")
    configured.process.follow(1)
    assert (await configured.up(1)).key == "configured"
    told = (tmp_path / "engine-0.log").read_text()
    assert all(key in told for key in (first, second, "configured"))


async def test_an_end_by_itself_is_told_with_the_last_words_and_can_be_followed_by_a_start(node: Node) -> None:
    followed = Followed(node, code="print('ready http://h:1', flush=True); print('bye')")
    followed.process.follow(1)
    state = await followed.ended()
    assert state.reason.startswith("engine-0 ended with exit code 0; ")
    assert state.reason.endswith("ready http://h:1 | bye")
    assert not state.is_final
    followed.code = CODE
    followed.process.follow(2)
    await followed.up(2)


async def test_a_plan_that_cannot_be_made_is_final(node: Node) -> None:
    followed = Followed(node)
    followed.error = ConfigError("engine.gpus: too few")
    followed.process.follow(7)
    assert await followed.ended() == ProcessState(start=7, phase="ended", reason="engine.gpus: too few", is_final=True)


async def test_a_start_that_the_operating_system_refuses_has_ended_and_may_be_tried_again(node: Node) -> None:
    followed = Followed(node)
    followed.error = OSError(errno.ENOSPC, "No space left on device", "epoch")
    followed.process.follow(7)
    reason = "[Errno 28] No space left on device: 'epoch'"
    assert await followed.ended() == ProcessState(start=7, phase="ended", reason=reason)
    followed.error = None
    followed.process.follow(8)
    await followed.up(8)


async def test_a_process_that_takes_long_to_end_after_it_was_killed_is_gone_in_the_end(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = Followed(node, code="import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + CODE)
    followed.process.follow(1)
    pid = pid_of(await followed.up(1))
    monkeypatch.setattr(supervise, "KILL_TIMEOUT_S", 0.0)
    followed.process.follow(None)
    assert (await followed.ended()).reason == f"engine-0: process {pid} does not end after SIGKILL"
    await followed.until(lambda state: state is None)
    assert not psutil.pid_exists(pid)
