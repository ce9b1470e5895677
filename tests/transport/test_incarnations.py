"""Ranks that were replaced, and go on: nothing that they send is taken."""

from __future__ import annotations

import asyncio

import pytest

from dora.errors import RemoteError
from dora.transport.codec import decode, encode
from dora.transport.messages import ControllerData, Refused, SaveCheckpoint, TrainerFrame
from tests.transport.peers import WAIT_S, controller, hello, rank, raw_peer, report


async def test_ranks_of_another_incarnation_take_the_place_of_those_before():
    async with controller() as (end, address):
        async with rank(address) as first:
            await end.wait_ready(WAIT_S)
            await end.send(0, SaveCheckpoint())
            end.renew(1)
            assert isinstance(await asyncio.to_thread(first.receive, WAIT_S), SaveCheckpoint)
            with pytest.raises(RemoteError, match="this start of the ranks was replaced"):
                await asyncio.to_thread(first.receive, WAIT_S)
        async with rank(address, incarnation=1) as second:
            await end.wait_ready(WAIT_S)
            await asyncio.to_thread(second.send, report(7))
            assert (await end.receive())[1].index == 7
            await end.send(0, SaveCheckpoint())
            assert isinstance(await asyncio.to_thread(second.receive, WAIT_S), SaveCheckpoint)
            assert end.link(0).last_received == 1


async def test_a_rank_that_was_replaced_is_refused_and_what_it_sends_is_dropped_and_counted():
    async with controller() as (end, address):
        with raw_peer(address) as raw:
            raw.send_multipart(encode(hello()))
            await end.wait_ready(WAIT_S)
            end.renew(1)
            raw.send_multipart(encode(ControllerData(epoch=0, incarnation=0, id=1, message=report(0))))
            raw.send_multipart(encode(hello()))
            async with asyncio.timeout(WAIT_S):
                while not (
                    isinstance(frame := decode(await _read(raw), TrainerFrame), Refused) and "start 0" in frame.reason
                ):
                    pass
        assert end.num_dropped == 1
        async with rank(address, incarnation=1) as present:
            await end.wait_ready(WAIT_S)
            await asyncio.to_thread(present.send, report(5))
            assert (await end.receive())[1].index == 5


async def test_frames_of_another_incarnation_are_dropped_even_from_an_admitted_rank():
    async with controller() as (end, address):
        with raw_peer(address) as raw:
            raw.send_multipart(encode(hello()))
            await end.wait_ready(WAIT_S)
            raw.send_multipart(encode(ControllerData(epoch=0, incarnation=1, id=1, message=report(1))))
            raw.send_multipart(encode(ControllerData(epoch=0, incarnation=0, id=1, message=report(2))))
            assert (await end.receive())[1].index == 2
            assert end.num_dropped == 1


async def _read(raw) -> list[bytes]:
    return await asyncio.to_thread(raw.recv_multipart)
