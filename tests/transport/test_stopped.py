"""A controller that is stopped (Ctrl-Z, a debugger, a frozen container) is alive, and its ranks go on with it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from dora.errors import RemoteError
from dora.transport import trainer_end
from dora.transport.link import MAX_UNACKED
from tests.transport.peers import WAIT_S, rank, report
from tests.transport.test_strangers import answer, victim


async def test_a_rank_with_a_lease_waits_for_a_controller_that_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank has none, as on another host, and gives up."""
    for name, value in {
        "UNREACHABLE_LIMIT_S": 2.0,
        "SEND_TIMEOUT_S": 2.0,
        "POLL_MS": 50,
        "STOPPED_LIMIT_S": WAIT_S,
    }.items():
        monkeypatch.setattr(trainer_end, name, value)
    for name, value in {"HEARTBEAT_MS": 100, "HEARTBEAT_TIMEOUT_MS": 300}.items():
        monkeypatch.setattr(trainer_end, name, value)
    async with (
        victim(tmp_path, ranks=2) as target,
        rank(target.address, number=0, world_size=2, has_lease=True) as local,
        rank(target.address, number=1, world_size=2) as remote,
    ):
        assert await answer(local, 0) == "0"
        os.kill(target.pid, signal.SIGSTOP)
        for index in range(MAX_UNACKED):
            local.send(report(index))
        sending = asyncio.create_task(asyncio.to_thread(local.send, report(MAX_UNACKED)))  # waits for the window
        with pytest.raises(RemoteError, match="was unreachable for 2 s"):
            await asyncio.to_thread(remote.receive, WAIT_S)
        with pytest.raises(RemoteError, match=r"no message from the controller at .* for 2 s"):
            await asyncio.to_thread(local.receive, 2.0)
        os.kill(target.pid, signal.SIGCONT)
        await sending
        for index in range(MAX_UNACKED + 1):
            message = await asyncio.to_thread(local.receive, WAIT_S)
            assert message.reason == str(index)  # type: ignore[union-attr]
