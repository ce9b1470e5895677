"""The push against a scripted server: after any failure it still serves, or the failure is marked as doubtful."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dora.core.strategies import Pause
from dora.engine.errors import PushFailed, RequestRefused
from dora.engine.names import UNCONFIRMED
from dora.engine.paths import map_path
from dora.engine.sglang import push as push_module
from dora.engine.sglang.protocol import UNREAD
from dora.engine.sglang.push import Disk, push
from dora.engine.sglang.target import PushTarget
from dora.errors import RemoteError

UNNAME = f"set_label {UNCONFIRMED}"
CALLS = [
    *("is_empty", "flush_cache 1", "pause in_place", "weight_version 1"),
    *(UNNAME, "update_weights", "flush_cache 2", "resume", "weight_version 2"),
]
STAGES = ["drain", "drain", "pause", "pause", "update", "update", "flush after update", "continue", "read back"]
AFTER_UPDATE = {"update", "flush after update", "read back", "continue"}


@dataclass
class Server:
    """A server that can fail before or after it has acted, or hang."""

    fails: str = ""  # name in CALLS
    how: str = "before"  # before, after, hang
    label: str = "run/1"
    weights: str = "run/1"  # what it really holds
    is_paused: bool = False
    num_resident: int = 0
    calls: list[str] = field(default_factory=list)
    never: asyncio.Event = field(default_factory=asyncio.Event)

    async def _call(self, name: str, **acts: object) -> None:
        self.calls.append(name)
        if name == self.fails and self.how != "after":
            if self.how == "hang":
                await self.never.wait()
            raise RemoteError("connection lost")
        for attribute, value in acts.items():
            setattr(self, attribute, value)
        if name == self.fails:
            raise RemoteError("connection lost")

    async def is_empty(self) -> bool:
        await self._call("is_empty")
        return self.num_resident == 0

    async def pause(self, mode: Pause) -> None:
        await self._call(f"pause {mode}", is_paused=True)

    async def resume(self) -> None:
        await self._call("resume", is_paused=False)

    async def flush_cache(self) -> bool:
        earlier = sum(call.startswith("flush_cache") for call in self.calls)
        await self._call(f"flush_cache {earlier + 1}")
        return self.num_resident == 0

    async def update_weights(self, folder: str, label: str, *, timeout_s: float) -> None:
        await self._call("update_weights", weights=label, label=label)

    async def set_label(self, label: str) -> None:
        await self._call(f"set_label {label}", label=label)

    async def weight_version(self) -> str:
        earlier = sum(call.startswith("weight_version") for call in self.calls)
        await self._call(f"weight_version {earlier + 1}")
        return self.label


async def push_to(server: Server, *, timeout_s: float = 30.0, live: Pause | None = None) -> None:
    await push(server, folder=Path("/store/v000002"), label="run/2", timeout_s=timeout_s, live=live)


async def test_a_push_goes_through_its_stages_in_order_and_leaves_the_server_serving() -> None:
    server = Server()
    await push_to(server)
    assert server.calls == CALLS
    assert (server.weights, server.is_paused) == ("run/2", False)


@pytest.mark.parametrize("how", ["before", "after", "hang"])
@pytest.mark.parametrize(("call", "stage"), list(zip(CALLS, STAGES, strict=True)))
async def test_a_failure_at_any_stage_leaves_the_server_serving_or_is_doubtful(call: str, stage: str, how: str) -> None:
    server = Server(fails=call, how=how)
    with pytest.raises(PushFailed) as failed:
        await push_to(server, timeout_s=0.05 if how == "hang" else 30.0)
    assert failed.value.stage == stage
    assert failed.value.doubtful is (stage in AFTER_UPDATE)
    assert failed.value.doubtful or (server.weights == "run/1" and not server.is_paused)
    assert server.label in (server.weights, UNCONFIRMED)
    assert str(failed.value).startswith(f"weight push failed at '{stage}': ")


async def test_a_server_that_stays_paused_after_a_failure_is_doubtful() -> None:
    class StaysPaused(Server):
        async def resume(self) -> None:
            raise RemoteError("no answer to /continue_generation")

    server = StaysPaused(fails="pause in_place", how="after")
    with pytest.raises(PushFailed, match="connection lost; then it could not be resumed: no answer") as failed:
        await push_to(server)
    assert (failed.value.stage, failed.value.doubtful, server.is_paused) == ("pause", True, True)


async def test_a_cancelled_push_does_not_leave_the_server_paused() -> None:
    server = Server(fails="update_weights", how="hang")
    pushing = asyncio.create_task(push_to(server))
    async with asyncio.timeout(10):
        while "update_weights" not in server.calls:  # noqa: ASYNC110 - one pass of the loop per await of the push
            await asyncio.sleep(0)
    pushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pushing
    assert server.calls[-1] == "resume"
    assert not server.is_paused


async def test_an_update_that_is_accepted_and_ignored_is_found_by_reading_back() -> None:
    class Ignores(Server):
        async def update_weights(self, folder: str, label: str, *, timeout_s: float) -> None:
            await self._call("update_weights")

    with pytest.raises(PushFailed, match="reports version 'unconfirmed', expected 'run/2'") as failed:
        await push_to(Ignores())
    assert (failed.value.stage, failed.value.doubtful) == ("read back", True)


async def test_weights_that_are_found_wrong_once_the_server_serves_again_are_doubtful() -> None:
    class Wrong(Disk):
        async def verify(self, server: PushTarget, folder: Path, label: str, *, timeout_s: float) -> None:
            assert not server.is_paused  # it could not answer
            raise RemoteError("its log-probs differ")

    server = Server()
    with pytest.raises(PushFailed, match="its log-probs differ") as failed:
        await push(server, folder=Path("/store/v000002"), label="run/2", timeout_s=30, transfer=Wrong())
    assert (failed.value.stage, failed.value.doubtful, server.is_paused) == ("verify", True, False)


@pytest.mark.parametrize(("before", "after"), [("theirs", "theirs"), ("run/1", UNCONFIRMED)])
@pytest.mark.parametrize("reason", [f"{UNREAD}: no such folder", "Failed to update weights: out of memory"])
async def test_a_folder_that_a_server_cannot_read_leaves_the_label_that_others_gave_it(
    before: str, after: str, reason: str
) -> None:
    class Refuses(Server):
        async def update_weights(self, folder: str, label: str, *, timeout_s: float) -> None:
            raise RequestRefused(reason, status=400, retryable=False)

    server = Refuses(label=before)
    with pytest.raises(PushFailed, match=reason):
        await push_to(server)
    assert server.label == (after if UNREAD in reason else UNCONFIRMED)


async def test_a_request_that_arrives_during_the_push_makes_it_doubtful() -> None:
    class SlipsIn(Server):
        async def update_weights(self, folder: str, label: str, *, timeout_s: float) -> None:
            await self._call("update_weights", label=label, num_resident=1)

    with pytest.raises(PushFailed, match="arrived during the push") as failed:
        await push_to(SlipsIn())
    assert (failed.value.stage, failed.value.doubtful) == ("flush after update", True)


async def test_a_server_is_never_paused_while_it_holds_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_module, "DRAIN_TIMEOUT_S", 0.05)
    server = Server(num_resident=1)
    with pytest.raises(PushFailed, match=r"still holds requests after 0.05 s") as failed:
        await push_to(server)
    assert (failed.value.stage, failed.value.doubtful) == ("drain", False)
    assert set(server.calls) == {"is_empty"}


async def test_a_push_waits_for_the_last_request_to_leave() -> None:
    class Draining(Server):
        async def is_empty(self) -> bool:
            self.num_resident = max(0, self.num_resident - 1)
            return await super().is_empty()

    server = Draining(num_resident=3)
    await push_to(server)
    assert server.calls == ["is_empty"] * 2 + CALLS


async def test_a_push_waits_while_the_server_counts_no_request_and_still_holds_one() -> None:
    """SGLang counts at every 15th step of decoding only."""

    class CountsLate(Server):
        async def is_empty(self) -> bool:
            await super().is_empty()
            return True

        async def flush_cache(self) -> bool:
            granted = await super().flush_cache()
            self.num_resident = max(0, self.num_resident - 1)
            return granted

    server = CountsLate(num_resident=1)
    await push_to(server)
    assert server.calls[:4] == ["is_empty", "flush_cache 1", "is_empty", "flush_cache 2"]
    assert (server.weights, server.is_paused) == ("run/2", False)


@pytest.mark.parametrize(
    ("folder", "seen"),
    [
        ("/runs/a/v000001", "/mnt/runs/a/v000001"),
        ("/runs/a/live/v000001", "/fast/v000001"),
        ("/runs-old/v000001", "/runs-old/v000001"),
        ("/runs", "/mnt/runs"),
    ],
)
def test_the_longest_prefix_in_whole_components_is_mapped(folder: str, seen: str) -> None:
    assert map_path(Path(folder), {"/runs": "/mnt/runs", "/runs/a/live": "/fast"}) == seen


LIVE_CALLS = {
    "in_place": ["pause in_place", "weight_version 1", UNNAME, "update_weights", "resume", "weight_version 2"],
    "retract": [
        *("pause retract", "weight_version 1"),
        *(UNNAME, "update_weights", "flush_cache 1", "resume", "weight_version 2"),
    ],
}


@pytest.mark.parametrize("live", ["in_place", "retract"])
async def test_a_live_push_reaches_a_server_among_its_requests_and_drains_nothing(live: Pause) -> None:
    server = Server(num_resident=3)  # which also refuses to flush, as SGLang before 0.5.21 does
    await push_to(server, live=live)
    assert server.calls == LIVE_CALLS[live]
    assert (server.weights, server.is_paused) == ("run/2", False)


@pytest.mark.parametrize("live", ["in_place", "retract"])
async def test_a_live_push_that_fails_resumes_the_server_and_is_doubtful(live: Pause) -> None:
    server = Server(num_resident=3, fails="update_weights", how="after")
    with pytest.raises(PushFailed) as failed:
        await push_to(server, live=live)
    assert (failed.value.stage, failed.value.doubtful, server.is_paused) == ("update", True, False)
