"""Both ends over real sockets: the READY barrier, refusals, order, acknowledgement, redelivery."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import numpy as np
import pytest
import zmq

from dora.errors import ConfigError, RemoteError
from dora.transport import controller_end, trainer_end
from dora.transport.codec import encode
from dora.transport.controller_end import RankLost
from dora.transport.link import MAX_UNACKED
from dora.transport.messages import (
    PROTOCOL_VERSION,
    ControllerData,
    RankReady,
    Stop,
    empty_micro_batch,
)
from dora.transport.trainer_end import TrainerEnd
from tests.e2e.runs import until
from tests.transport.peers import TOKEN, WAIT_S, Proxy, controller, hello, rank, raw_peer, report


async def test_a_micro_batch_arrives_with_its_arrays():
    async with controller() as (end, address), rank(address) as trainer:
        assert await end.wait_ready(WAIT_S) == 1
        batch = msgspec.structs.replace(
            empty_micro_batch(step=3, index=1, last=False, group_size=4),
            tokens=np.arange(100_000, dtype=np.int32),
            group_rewards=np.array([[1.0, np.nan]], np.float32),
        )
        await end.send(0, batch)
        received = await asyncio.to_thread(trainer.receive, WAIT_S)
        np.testing.assert_array_equal(received.tokens, batch.tokens)
        np.testing.assert_array_equal(received.group_rewards, batch.group_rewards)
        trainer.send(RankReady(rank=0, next_step=3))
        assert await end.receive() == (0, RankReady(rank=0, next_step=3))


async def test_nothing_is_sent_before_the_last_rank_has_joined():
    async with controller(world_size=None) as (end, address), rank(address, world_size=2) as first:
        with pytest.raises(RemoteError, match="ranks 1 of world size 2"):
            await end.wait_ready(0.05)
        with pytest.raises(AssertionError, match="READY barrier"):
            await end.send(0, Stop(reason="too early"))
        async with rank(address, number=1, world_size=2) as late:
            assert await end.wait_ready(WAIT_S) == 2
            for number, trainer in enumerate((first, late)):
                await end.send(number, Stop(reason=str(number)))
                assert await asyncio.to_thread(trainer.receive, WAIT_S) == Stop(reason=str(number))


async def test_a_rank_may_start_before_the_controller():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
        port = probe.bind_to_random_port("tcp://127.0.0.1")
    address = f"tcp://127.0.0.1:{port}"
    trainer = TrainerEnd(address=address, token=TOKEN, rank=0, world_size=1)
    joining = asyncio.create_task(asyncio.to_thread(trainer.connect, WAIT_S))
    async with controller(address=address) as (end, _):
        assert await end.wait_ready(WAIT_S) == 1
        await joining
        await asyncio.to_thread(trainer.close)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"world_size": 3}, "world size is 3, but that of this run is 2"),
        ({"number": 2}, "rank 2 does not exist"),
        ({"number": 0}, "rank 0 is taken by host"),
    ],
)
async def test_a_wrong_rank_is_refused_with_the_reason_on_both_ends(wrong, reason):
    async with controller(world_size=2) as (end, address), rank(address, world_size=2):
        with pytest.raises(RemoteError, match=reason):
            async with rank(address, **{"number": 1, "world_size": 2, **wrong}):
                pass
        with pytest.raises(RemoteError, match=reason):
            await end.wait_ready(0.05)


async def test_another_protocol_version_is_refused(monkeypatch):
    monkeypatch.setattr(trainer_end, "PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
    async with controller() as (_, address):
        with pytest.raises(RemoteError, match=f"has protocol {PROTOCOL_VERSION + 1}"):
            async with rank(address):
                pass


async def test_no_answer_is_a_clear_error():
    trainer = TrainerEnd(address="tcp://127.0.0.1:9", token=TOKEN, rank=0, world_size=1)
    with pytest.raises(RemoteError, match=r"no answer from the controller at tcp://127\.0\.0\.1:9"):
        await asyncio.to_thread(trainer.connect, 0.05)
    await asyncio.to_thread(trainer.close)


async def test_a_port_in_use_is_a_config_error():
    async with controller() as (_, address):
        with pytest.raises(ConfigError, match="cannot listen on"):
            async with controller(address=address):
                pass


async def test_sending_waits_at_a_full_window_until_the_rank_consumes():
    async with controller() as (end, address), rank(address) as trainer:
        await end.wait_ready(WAIT_S)
        for index in range(MAX_UNACKED):
            await end.send(0, empty_micro_batch(step=0, index=index, last=False, group_size=2))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await end.send(0, Stop(reason="beyond the bound"))
        assert (await asyncio.to_thread(trainer.receive, WAIT_S)).index == 0
        async with asyncio.timeout(WAIT_S):
            await end.send(0, Stop(reason="fits again"))


async def test_a_rank_acknowledges_many_messages_at_once_without_waiting_to_be_idle(monkeypatch):
    monkeypatch.setattr(trainer_end, "POLL_MS", 1_000_000)
    async with controller() as (end, address), rank(address) as trainer:
        await end.wait_ready(WAIT_S)
        for index in range(MAX_UNACKED):
            await end.send(0, empty_micro_batch(step=0, index=index, last=False, group_size=2))
        for _ in range(trainer_end.ACK_EVERY):
            await asyncio.to_thread(trainer.receive, WAIT_S)
        async with asyncio.timeout(WAIT_S):
            await end.send(0, Stop(reason="fits again"))
        assert end.link(0).num_unacked == MAX_UNACKED - trainer_end.ACK_EVERY + 1


@pytest.mark.deep
async def test_an_acknowledgement_is_sent_with_the_next_message(monkeypatch):
    monkeypatch.setattr(trainer_end, "POLL_MS", 1_000_000)
    async with controller() as (end, address), rank(address) as trainer:
        await end.wait_ready(WAIT_S)
        for index in range(MAX_UNACKED):
            await end.send(0, empty_micro_batch(step=0, index=index, last=False, group_size=2))
        await asyncio.to_thread(trainer.receive, WAIT_S)
        trainer.send(report(0))
        async with asyncio.timeout(WAIT_S):
            await end.send(0, Stop(reason="fits again"))


async def test_a_rank_that_consumes_nothing_is_lost_after_a_time_limit(monkeypatch):
    monkeypatch.setattr(controller_end, "SEND_TIMEOUT_S", 0.05)
    async with controller() as (end, address), rank(address):
        await end.wait_ready(WAIT_S)
        for _ in range(MAX_UNACKED):
            await end.send(0, Stop(reason="x"))
        with pytest.raises(RankLost, match="consumed none of"):
            await end.send(0, Stop(reason="x"))


async def test_after_lost_connections_every_message_arrives_once_and_in_order():
    """The relay drops traffic and cuts connections, three times, while both ends keep sending."""
    count = 120
    async with controller() as (end, address), Proxy(address) as proxy, rank(proxy.address) as trainer:
        await end.wait_ready(WAIT_S)

        async def feed() -> None:
            for index in range(count):
                await end.send(0, empty_micro_batch(step=0, index=index, last=False, group_size=2))

        async def collect() -> list[int]:
            seen = []
            for _ in range(count):
                message = (await end.receive())[1]
                seen.append(message.index)
                if message.index in (20, 60, 100):
                    proxy.swallowing = True
                    await proxy.swallowed.wait()
                    proxy.cut()
                    await proxy.connected.wait()
            return seen

        def work() -> list[int]:
            seen = []
            for _ in range(count):
                seen.append(trainer.receive(WAIT_S).index)
                trainer.send(report(seen[-1]))
            return seen

        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            tasks.create_task(feed())
            working = tasks.create_task(asyncio.to_thread(work))
            collecting = tasks.create_task(collect())
        assert working.result() == list(range(count))
        assert collecting.result() == list(range(count))
        assert proxy.connections == 4


async def test_a_duplicate_is_counted_and_ignored():
    async with controller() as (end, address):
        with raw_peer(address) as raw:
            raw.send_multipart(encode(hello()))
            await end.wait_ready(WAIT_S)
            for number in (1, 1, 3, 2):
                raw.send_multipart(encode(ControllerData(epoch=0, incarnation=0, id=number, message=report(number))))
            assert [(await end.receive())[1].index for _ in range(2)] == [1, 2]
            assert (end.link(0).duplicates, end.link(0).gaps) == (1, 1)


async def test_a_rank_gives_up_when_another_controller_answers():
    async with controller(epoch=1) as (first, address), Proxy(address) as proxy, rank(proxy.address) as trainer:
        await first.wait_ready(WAIT_S)
        async with controller(epoch=2) as (_, second_address):
            proxy._target = int(second_address.rsplit(":", 1)[1])
            proxy.cut()
            with pytest.raises(RemoteError, match="was restarted"):
                await asyncio.to_thread(trainer.receive, WAIT_S)
            with pytest.raises(RemoteError, match="was restarted"):
                trainer.send(report(0))


async def test_a_rank_does_not_outlive_an_unreachable_controller(monkeypatch):
    monkeypatch.setattr(trainer_end, "UNREACHABLE_LIMIT_S", 0.2)
    monkeypatch.setattr(trainer_end, "POLL_MS", 50)
    async with controller() as (end, address):
        trainer = TrainerEnd(address=address, token=TOKEN, rank=0, world_size=1)
        await asyncio.to_thread(trainer.connect, WAIT_S)
        await end.wait_ready(WAIT_S)
    with pytest.raises(RemoteError, match="was unreachable for"):
        await asyncio.to_thread(trainer.receive, WAIT_S)
    await asyncio.to_thread(trainer.close)


async def test_a_rank_closes_while_its_thread_is_just_ending_after_a_fault():
    """The thread has closed its end of the socket that wakes it, where a send would never return."""
    has_closed, let_go = threading.Event(), threading.Event()

    class Lingering(TrainerEnd):
        def _serve(self) -> None:
            super()._serve()
            has_closed.set()
            let_go.wait(WAIT_S)

    async with controller() as (_, address):
        trainer = Lingering(address=address, token=TOKEN, rank=7, world_size=1)
        with pytest.raises(RemoteError, match="refused rank 7"):
            await asyncio.to_thread(trainer.connect, WAIT_S)
        assert await asyncio.to_thread(has_closed.wait, WAIT_S)
        await asyncio.to_thread(until, lambda: is_alone(trainer), what="ZeroMQ has closed that end, too")
        closing = threading.Thread(target=trainer.close, daemon=True)
        closing.start()
        await asyncio.to_thread(until, lambda: trainer._closing, what="it has seen that the thread is alive")
        let_go.set()
        await asyncio.to_thread(closing.join, WAIT_S)
        assert not closing.is_alive()


def is_alone(trainer: TrainerEnd) -> bool:
    try:
        trainer._wake.send(b"", zmq.DONTWAIT)
    except zmq.Again:
        return True
    return False
