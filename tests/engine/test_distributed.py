"""The distributed transfer: real sender processes, embedded engines on real sockets, gloo between them.

Failures of either process in mid-bucket are in tests/sglang/test_transfers.py, on both kinds of servers.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from dora.core.strategies import Pause
from dora.embedded.server import ServeOptions, running
from dora.engine.errors import PushFailed
from dora.engine.names import UNCONFIRMED
from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.distributed import Distributed
from dora.engine.sglang.orders import Listening, Scored, Send, Sent
from dora.engine.sglang.push import Disk, push
from dora.engine.sglang.sender import plan_buckets
from dora.engine.sglang.senders import Senders
from dora.engine.sglang.target import PushTarget, ServerShape
from dora.errors import RemoteError
from tests.embedded.conftest import Reference, decoder_of
from tests.engine import pushing

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [3, 9, 27, 17, 51, 25]
PUSH_S = 60.0
SMALL_BUCKETS = 4096  # several for the tiny model
Give = Callable[..., Awaitable[None]]
Require = Callable[[str], Awaitable[None]]


senders, client = pushing.senders, pushing.client


@asynccontextmanager
async def engine(folder: Path, **changes: Any) -> AsyncIterator[str]:
    options = ServeOptions(model_path=folder, slots=4, kv_tokens=2048, skip_tokenizer_init=True, **changes)
    async with running(options, decoder_of(folder, slots=4, kv_tokens=2048), None) as (running_engine, url, _):
        yield url
        assert not running_engine.groups  # even after failed pushes


@dataclass(frozen=True)
class Recorded(PushTarget):
    """A server that records the order of its updates and the label that it reports after each."""

    calls: list[tuple[str, str]] = field(default_factory=list)

    async def _note(self, name: str) -> None:
        self.calls.append((name, await self.weight_version()))

    async def begin_update(self) -> None:
        await super().begin_update()
        await self._note("begin")

    async def end_update(self) -> None:
        await super().end_update()
        await self._note("end")

    async def update_weights(self, folder: str, label: str, *, timeout_s: float) -> None:
        await super().update_weights(folder, label, timeout_s=timeout_s)
        await self._note("disk")

    async def resume(self) -> None:
        await super().resume()
        await self._note("resume")

    async def set_label(self, label: str) -> None:
        await super().set_label(label)
        await self._note("label")

    async def receive(self, group: str, **bucket: Any) -> None:
        await super().receive(group, **bucket)
        await self._note("bucket")

    async def leave_group(self, group: str) -> None:
        await super().leave_group(group)
        await self._note("leave")


@pytest.fixture
def give(senders: Senders, model_b: Path) -> Give:
    """Push model b, or the weights of another folder, as version 1 of a run."""
    transfer = Distributed(senders, otherwise=Disk(), dtype="float32", use_nccl=False, bucket_bytes=SMALL_BUCKETS)

    async def to(server: PushTarget, folder: Path = model_b) -> None:
        await push(server, folder=folder, label="run/1", timeout_s=PUSH_S, transfer=transfer)

    return to


@pytest.fixture
def require_b(client: EngineClient, reference_b: Reference) -> Require:
    """Assert that the server at a URL answers with model b."""

    async def require(url: str) -> None:
        served = await client.prompt_logprobs(url, PROMPT, timeout_s=10)
        assert served == pytest.approx(reference_b.logprobs(PROMPT), abs=1e-4)

    return require


async def test_a_version_moves_and_its_label_comes_once_it_is_verified(
    client: EngineClient, give: Give, require_b: Require, model_a: Path
) -> None:
    async with engine(model_a, weight_version="start") as url:
        server = Recorded(client, url)
        await give(server)
        await require_b(url)
    buckets = len(server.calls) - 4
    assert buckets > 3
    names = ["label", *["bucket"] * buckets, "leave", "resume"]
    assert server.calls == [*[(name, UNCONFIRMED) for name in names], ("label", "run/1")]


async def test_a_version_for_live_requests_has_its_label_before_they_continue(
    client: EngineClient, senders: Senders, require_b: Require, model_a: Path, model_b: Path
) -> None:
    transfer = Distributed(senders, otherwise=Disk(), dtype="float32", use_nccl=False)
    async with engine(model_a, weight_version="start") as url:
        server = Recorded(client, url)
        await push(server, folder=model_b, label="run/1", timeout_s=PUSH_S, transfer=transfer, live="in_place")
        await require_b(url)
    assert server.calls == [
        *[("label", UNCONFIRMED), ("bucket", UNCONFIRMED), ("leave", UNCONFIRMED)],
        *[("label", "run/1"), ("resume", "run/1"), ("label", "run/1")],
    ]


async def test_a_server_with_an_update_gate_gets_its_buckets_between_begin_and_end(
    client: EngineClient, give: Give, model_a: Path
) -> None:
    async with engine(model_a, dialect="0.5.23") as url:
        server = Recorded(client, url)
        await give(server)
    names = [name for name, _ in server.calls]
    assert names == ["label", "begin", *["bucket"] * (len(names) - 6), "end", "leave", "resume", "label"]


async def test_the_gate_is_closed_after_a_failure_so_that_the_next_push_can_open_it(
    client: EngineClient, give: Give, require_b: Require, model_a: Path
) -> None:
    class FailsOnce(Recorded):
        async def receive(self, group: str, **bucket: Any) -> None:
            if not self.calls.count(("failed", "")):
                self.calls.append(("failed", ""))
                raise RemoteError("connection lost")
            await super().receive(group, **bucket)

    async with engine(model_a, dialect="0.5.23") as url:
        server = FailsOnce(client, url)
        with pytest.raises(PushFailed, match="connection lost; the sender") as failed:
            await give(server)
        assert (failed.value.stage, failed.value.doubtful) == ("update", True)
        await give(server)
        await require_b(url)


async def test_a_server_that_cannot_join_a_group_reads_the_folder(
    client: EngineClient, give: Give, require_b: Require, model_a: Path
) -> None:
    class DataParallel(Recorded):
        async def shape(self) -> ServerShape:
            return ServerShape("0.5.20", "cpu", num_ranks=1, can_join=False, has_update_gate=False)

    async with engine(model_a) as url:
        server = DataParallel(client, url)
        await give(server)
        await require_b(url)
    assert server.calls == [("label", UNCONFIRMED), ("disk", "run/1"), ("resume", "run/1")]


@pytest.mark.parametrize("live", [None, "in_place"])
async def test_weights_that_lack_a_bucket_are_found_by_their_log_probs_and_leave_no_label(
    client: EngineClient, senders: Senders, live: Pause | None, model_a: Path, model_b: Path
) -> None:
    class Forgets(PushTarget):
        """Takes every bucket, and keeps what it had in place of one tensor."""

        async def receive(self, group: str, *, names: Any, **bucket: Any) -> None:
            kept = ["unknown" if name == "model.layers.1.mlp.up_proj.weight" else name for name in names]
            await super().receive(group, names=kept, **bucket)

        async def weights_checksum(self, *, timeout_s: float) -> str | None:
            return None

    async with engine(model_a) as url:
        transfer = Distributed(senders, otherwise=Disk(), dtype="float32", use_nccl=False, bucket_bytes=SMALL_BUCKETS)
        with pytest.raises(PushFailed, match=r"the log-probs differ by up to .* from those under") as failed:
            await push(
                Forgets(client, url), folder=model_b, label="run/1", timeout_s=PUSH_S, transfer=transfer, live=live
            )
        assert (failed.value.stage, failed.value.doubtful) == ("verify", True)
        assert await client.weight_version(url) == UNCONFIRMED


async def test_nan_log_probs_are_not_equal(client: EngineClient, give: Give, model_a: Path) -> None:
    class Nan(PushTarget):
        async def weights_checksum(self, *, timeout_s: float) -> str | None:
            return None

        async def prompt_logprobs(self, token_ids: Sequence[int], *, timeout_s: float) -> list[float]:
            right = await super().prompt_logprobs(token_ids, timeout_s=timeout_s)
            return [*right[:-1], math.nan]

    async with engine(model_a) as url:
        with pytest.raises(PushFailed, match="the log-probs differ"):
            await give(Nan(client, url))


async def test_later_servers_of_a_version_are_held_to_the_checksum_of_the_first(
    client: EngineClient, give: Give, model_a: Path
) -> None:
    class Torn(PushTarget):
        async def weights_checksum(self, *, timeout_s: float) -> str | None:
            checksum = await super().weights_checksum(timeout_s=timeout_s)
            assert checksum is not None
            return checksum[::-1]

        async def prompt_logprobs(self, token_ids: Any, *, timeout_s: float) -> list[float]:
            raise AssertionError("the checksum decides")

    async with engine(model_a) as first, engine(model_a) as second:
        await give(PushTarget(client, first))
        with pytest.raises(PushFailed, match=r"but \w+ on the first server") as failed:
            await give(Torn(client, second))
        assert failed.value.stage == "verify"
        await give(PushTarget(client, second))


async def test_a_folder_without_weights_is_refused_in_the_sender_s_words(
    client: EngineClient, give: Give, model_a: Path, tmp_path: Path
) -> None:
    shutil.copy(model_a / "config.json", tmp_path)
    async with engine(model_a) as url:
        with pytest.raises(PushFailed, match=r"the sender failed: ValueError: .* holds no safetensors files"):
            await give(PushTarget(client, url), tmp_path)


# --- senders


async def test_a_sender_is_used_again_after_success_and_replaced_after_a_failure(senders: Senders) -> None:
    async with senders.lend() as first:
        pass
    async with senders.lend() as again:
        assert again.pid == first.pid
    with pytest.raises(RemoteError, match="no idea"):
        async with senders.lend():
            raise RemoteError("no idea")
    assert not psutil.pid_exists(first.pid)
    async with senders.lend() as other:
        assert other.pid != first.pid


async def test_one_that_died_while_idle_is_not_lent(senders: Senders) -> None:
    async with senders.lend() as sender:
        pass
    await sender.kill()
    async with senders.lend() as other:
        assert other.pid != sender.pid


async def test_a_rendezvous_that_no_rank_joins_times_out(
    senders: Senders,
    model_a: Path,
) -> None:
    order = Send(
        folder=str(model_a),
        group="alone",
        address="127.0.0.1",
        world_size=2,
        backend="gloo",
        bucket_bytes=SMALL_BUCKETS,
        timeout_s=1.0,
    )
    async with senders.lend() as sender:
        listening = await sender.ask(order, Listening, timeout_s=PUSH_S)
        listeners = [one.laddr for one in psutil.Process(sender.pid).net_connections() if one.status == "LISTEN"]
        assert ("127.0.0.1", listening.port) in listeners
        assert {address.ip for address in listeners} == {"127.0.0.1"}
        with pytest.raises(RemoteError, match="the sender failed: "):
            await sender.receive(Sent, timeout_s=PUSH_S)


async def test_a_sender_that_does_not_reply_in_time_is_an_error(senders: Senders) -> None:
    async with senders.lend() as sender:
        with pytest.raises(RemoteError, match=r"the sender sent no 'Scored' within 0\.05 s"):
            await sender.receive(Scored, timeout_s=0.05)


# --- buckets


@pytest.mark.parametrize(
    ("sizes", "buckets"),
    [([], []), ([1], [[1]]), ([4, 4, 4], [[4, 4], [4]]), ([9, 1, 1], [[9], [1, 1]]), ([0, 8, 0], [[0, 8, 0]])],
)
async def test_a_bucket_is_bounded_unless_one_tensor_is_larger_and_the_order_is_kept(
    sizes: list[int], buckets: list[list[int]]
) -> None:
    tensors = [(str(i), torch.zeros(size, dtype=torch.uint8)) for i, size in enumerate(sizes)]
    planned = plan_buckets(tensors, bucket_bytes=8)
    assert [[tensor.nbytes for _, tensor in bucket] for bucket in planned] == buckets
    assert [name for bucket in planned for name, _ in bucket] == [name for name, _ in tensors]
