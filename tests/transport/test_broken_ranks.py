"""Ranks that hold the token and break the protocol are cut off, with one line on each end and bounded memory."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
import zmq
from structlog.testing import capture_logs

from dora.errors import ProtocolError, RemoteError
from dora.transport import controller_end
from dora.transport.codec import decode, encode
from dora.transport.controller_end import READ_BURST, RankLost
from dora.transport.curve import CURVE_BYTES, MAX_TO_CONTROLLER_BYTES, guard_controller, guard_trainer
from dora.transport.link import MAX_IGNORED, MAX_UNACKED, Link
from dora.transport.messages import (
    PROTOCOL_VERSION,
    Ack,
    ControllerData,
    RankReady,
    Refused,
    Stop,
    TrainerFailed,
    TrainerFrame,
    VersionWritten,
    empty_micro_batch,
)
from tests.transport.peers import WAIT_S, controller, hello, rank, raw_peer, report


def data(number: int) -> list[bytes]:
    return [bytes(part) for part in encode(ControllerData(epoch=0, incarnation=0, id=number, message=report(number)))]


async def refusal(raw) -> str:
    """The reason with which the controller refuses `raw`."""
    while await asyncio.to_thread(raw.poll, WAIT_S * 1000):
        frame = decode(raw.recv_multipart(), TrainerFrame)
        if isinstance(frame, Refused):
            return frame.reason
    raise AssertionError("no refusal")


@pytest.mark.parametrize(
    ("messages", "num_received", "reason"),
    [
        (
            [data(number) for number in range(1, MAX_UNACKED + 2)],
            MAX_UNACKED,
            "message 65 arrived when only 0 were",
        ),
        ([data(2**62)], 0, f"message {2**62} arrived when only 0 were consumed"),
        ([data(3)] * (MAX_IGNORED + 1), 0, f"{MAX_IGNORED + 1} messages arrived out of order, the last of them 3"),
        ([data(1)] * (MAX_IGNORED + 2), 1, f"{MAX_IGNORED + 1} messages arrived out of order, the last of them 1"),
        ([encode(Ack(epoch=0, incarnation=0, last_id=5))], 0, "message 5 was acknowledged, but only 0 were sent"),
        ([[b"junk"]], 0, "a message that violates the protocol"),
        ([[*data(1), b"more"]], 0, "more array bytes than the header describes"),
    ],
    ids=["beyond the window", "a number far ahead", "gaps", "duplicates", "acknowledgement", "junk", "frames"],
)
async def test_a_rank_that_breaks_the_protocol_is_cut_off_with_one_line(messages, num_received, reason):
    with capture_logs() as logged:
        async with controller() as (end, address):
            with raw_peer(address) as bad:
                bad.send_multipart(encode(hello()))
                await end.wait_ready(WAIT_S)
                for message in [*messages, [b"and on it goes"], data(1)]:
                    bad.send_multipart(message)
                assert reason in await refusal(bad)
                for number in range(num_received):
                    assert (await end.receive())[1] == report(number + 1)
                with pytest.raises(RankLost, match=f"rank 0: .*{reason}"):
                    await end.receive()
                bad.send_multipart(encode(hello()))
                with raw_peer(address) as late:
                    late.send_multipart(encode(hello()))
                    assert "rank 0 is taken by host h, pid 1" in await refusal(late)
            assert end._incoming.empty()
    assert len(logged) == 1


async def test_a_rank_that_reads_nothing_is_cut_off():
    """A rank that asks for redelivery again and again."""
    async with controller() as (end, address):
        with raw_peer(address) as bad:
            bad.setsockopt(controller_end.zmq.RCVHWM, 1)
            bad.send_multipart(encode(hello()))
            await end.wait_ready(WAIT_S)
            batch = empty_micro_batch(step=0, index=0, last=False, group_size=2)
            batch = msgspec.structs.replace(batch, tokens=np.zeros(50_000, np.int32))
            for _ in range(MAX_UNACKED):
                await end.send(0, batch)
            for _ in range(100):
                bad.send_multipart(encode(hello()))
            async with asyncio.timeout(WAIT_S):
                with pytest.raises(RankLost, match="rank 0: it reads nothing"):
                    await end.receive()


async def test_a_flood_does_not_starve_the_event_loop():
    """The controller answers every message, which must not keep the reader running."""
    async with controller() as (end, address):
        with raw_peer(address) as flooding, capture_logs() as logged:
            for _ in range(5_000):
                flooding.send(b"junk")
            flooding.send_multipart(encode(hello()))
            handled, most = 0, 0
            async with asyncio.timeout(WAIT_S):
                while not end._complete.is_set():
                    await asyncio.sleep(0)
                    most, handled = max(most, end._refusals.count - handled), end._refusals.count
        assert handled == 5_000
        assert 0 < most <= READ_BURST
        assert len(logged) == 1


async def test_a_message_too_long_for_the_controller_is_an_error_at_its_sender():
    async with controller() as (end, address), rank(address) as trainer:
        await end.wait_ready(WAIT_S)
        shortest = ControllerData(epoch=0, incarnation=0, id=1, message=TrainerFailed(rank=0, reason=""))
        overhead = sum(map(len, encode(shortest))) + 4
        longest = TrainerFailed(rank=0, reason="x" * (MAX_TO_CONTROLLER_BYTES - overhead))
        files = {f"model-{number:05}.safetensors": "f" * 64 for number in range(12_000)}
        published = VersionWritten(version=1, num_bytes=1, files=files, chain="0" * 32)
        with pytest.raises(
            ProtocolError,
            match=r"VersionWritten has a frame of 1,080,\d\d\d bytes; the controller accepts at most 1,048,576",
        ):
            trainer.send(published)
        trainer.send(longest)
        assert await end.receive() == (0, longest)


async def test_a_micro_batch_too_long_for_a_rank_is_an_error_at_its_sender(monkeypatch: pytest.MonkeyPatch):
    """Sent, it would make the rank close the connection, and report an unreachable controller a minute later."""
    monkeypatch.setattr(controller_end, "MAX_TO_TRAINER_BYTES", 100_000)
    batch = empty_micro_batch(step=0, index=0, last=True, group_size=2)
    async with controller() as (end, address), rank(address) as trainer:
        await end.wait_ready(WAIT_S)
        with pytest.raises(
            ProtocolError, match="MicroBatch has a frame of 100,004 bytes; trainer rank 0 accepts at most 100,000"
        ):
            await end.send(0, msgspec.structs.replace(batch, tokens=np.zeros(25_001, np.int32)))
        await end.send(0, batch)
        assert (await asyncio.to_thread(trainer.receive, WAIT_S)).step == 0


def test_a_frame_beyond_the_limit_closes_the_connection_even_of_a_holder_of_the_token():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        for one in (router, dealer):
            one.setsockopt(zmq.LINGER, 0)
        guard_controller(router, "token")
        guard_trainer(dealer, "token")
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        dealer.connect(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
        dealer.send(bytes(MAX_TO_CONTROLLER_BYTES))
        assert router.poll(1_000 * WAIT_S)
        assert len(router.recv_multipart()[1]) == MAX_TO_CONTROLLER_BYTES
        assert not monitor.poll(0)
        dealer.send(bytes(MAX_TO_CONTROLLER_BYTES + 2 * CURVE_BYTES))
        assert monitor.poll(1_000 * WAIT_S)
        dealer.disable_monitor()
        monitor.close()


async def test_a_huge_world_size_is_reported_in_one_line():
    async with controller(world_size=None) as (end, address):
        with raw_peer(address) as first:
            first.send_multipart(encode(hello(world_size=2**40)))
            assert await asyncio.to_thread(first.poll, WAIT_S * 1000)
            with pytest.raises(RemoteError, match=r"^trainer: ranks 1, 2, .*, \.\.\. of world size") as raised:
                await end.wait_ready(0.05)
            assert len(str(raised.value)) < 200


async def test_text_from_a_peer_does_not_fill_the_log():
    async with controller() as (_, address):
        with raw_peer(address) as bad, capture_logs() as logged:
            bad.send_multipart(
                encode(msgspec.structs.replace(hello(protocol=PROTOCOL_VERSION + 1), host="h" * 100_000))
            )
            assert "has protocol" in await refusal(bad)
            bad.send(msgspec.msgpack.encode({"type": "Ack", "k" * 100_000: 1}))
            assert len(await refusal(bad)) < 400
    assert max(len(line["reason"]) for line in logged) < 400


def test_duplicates_of_many_reconnections_do_not_count_as_a_broken_rank():
    link = Link()
    for _ in range(10):
        for _ in range(MAX_UNACKED):
            assert not link.take(2)
        link.redelivery(0)
    assert link.take(1)
    assert link.gaps == 10 * MAX_UNACKED


async def test_a_full_window_of_a_rank_is_received():
    async with controller() as (end, address), rank(address) as trainer:
        await end.wait_ready(WAIT_S)
        for number in range(MAX_UNACKED):
            trainer.send(report(number))
        await end.send(0, Stop(reason="x"))
        for number in range(MAX_UNACKED):
            assert await end.receive() == (0, report(number))
        trainer.send(RankReady(rank=0, next_step=1))
        assert await end.receive() == (0, RankReady(rank=0, next_step=1))
