"""Text of trainer ranks that would control a terminal, in every field of every message: what is shown is harmless."""

from __future__ import annotations

import asyncio
import time
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import zmq

from dora.cli import output
from dora.controller.lineage import Lineage
from dora.controller.trainer_link import TrainerLink
from dora.errors import DoraError, RemoteError
from dora.log import show_warnings
from dora.transport.codec import Buffer, decode, encode
from dora.transport.controller_end import ControllerEnd
from dora.transport.curve import guard_controller
from dora.transport.messages import (
    Ack,
    ControllerData,
    ControllerFrame,
    Hello,
    Message,
    MicroBatch,
    RankReady,
    Refused,
    ToController,
    ToTrainer,
    TrainerData,
    TrainerFailed,
    TrainerFrame,
    TrainerLogprobs,
    Welcome,
    empty_micro_batch,
)
from dora.transport.trainer_end import TrainerEnd
from tests.controller.test_trainer_link import CHAIN, CONFIGURE, FakeRanks
from tests.escapes import HOSTILE, require_harmless, show
from tests.made import made, poisoned
from tests.transport.peers import TOKEN, WAIT_S, controller, hello, raw_peer

ARRAYS: dict[Any, Message] = {
    TrainerLogprobs: TrainerLogprobs(rank=0, trajectory=0, logprobs=np.zeros(1, np.float32)),
    MicroBatch: empty_micro_batch(step=0, index=0, last=False, group_size=2),
}


def sample(kind: Any) -> Any:
    return ARRAYS[kind] if kind in ARRAYS else made(kind, text=CHAIN, number=0)


def variants(message: Message) -> list[list[Buffer]]:
    """What is sent for a message, each time with hostile text in another place."""
    header, *others = encode(message)
    found = [*poisoned(msgspec.msgpack.decode(header), HOSTILE)]
    return [[msgspec.msgpack.encode(bad), *others] for bad in found]


def of_rank(number: int, message: Any) -> ControllerData:
    return ControllerData(epoch=0, incarnation=0, id=number, message=message)


async def _refusal(peer: zmq.Socket[bytes]) -> str | None:
    """The reason why a rank is refused, None if it is welcome."""
    while await asyncio.to_thread(peer.poll, 1_000 * WAIT_S):
        match decode(peer.recv_multipart(), TrainerFrame):
            case Refused(reason=reason):
                return reason
            case Welcome():
                return None
    raise AssertionError("no answer")


def _linked(end: ControllerEnd) -> TrainerLink:
    async def ignore(_: object) -> None:
        pass

    return TrainerLink(
        end=end, num_ranks=1, configure=lambda rank: CONFIGURE, start_timeout_s=WAIT_S,
        ranks=FakeRanks(),
        now=time.monotonic, emit=ignore, on_ready=lambda _, of: None, on_step=lambda _: None, durable=ignore,
        tell=output.tell,
        lineage=Lineage(base=CHAIN, settings=b"", trained=dict.fromkeys(range(-1, 2), CHAIN)),
    )  # fmt: skip


@pytest.mark.parametrize("kind", [Ack, *get_args(ToController)], ids=lambda kind: kind.__name__)
async def test_a_message_of_a_rank_is_shown_harmlessly(kind: Any, capfd: pytest.CaptureFixture[str]) -> None:
    show_warnings()
    for bad in variants(sample(kind) if kind is Ack else of_rank(2, sample(kind))):
        async with controller() as (end, address):
            with raw_peer(address) as peer:
                for frames in (encode(hello()), encode(of_rank(1, RankReady(rank=0, next_step=0))), bad):
                    peer.send_multipart(frames)
                peer.send_multipart(encode(of_rank(3, TrainerFailed(rank=0, reason="the end", is_final=True))))
                peer.send_multipart(encode(of_rank(2, TrainerFailed(rank=0, reason="the end", is_final=True))))
                async with asyncio.timeout(WAIT_S):
                    with pytest.raises(DoraError) as raised:
                        await _linked(end).receive_messages()
        show(raised.value)
        shown = capfd.readouterr()
        assert shown.err.startswith(("dora: ", "warning: "))
        require_harmless(shown.out + shown.err)


async def test_a_greeting_of_a_rank_is_shown_harmlessly(capfd: pytest.CaptureFixture[str]) -> None:
    show_warnings()
    for bad in [*variants(hello()), *variants(hello(protocol=1)), *variants(hello(rank=1))]:
        async with controller() as (end, address):
            with raw_peer(address) as peer, raw_peer(address) as second:
                peer.send_multipart(bad)
                reason = await _refusal(peer)
                if reason is None:
                    second.send_multipart(encode(hello()))
                    reason = await _refusal(second)
                else:
                    with pytest.raises(RemoteError) as raised:
                        await end.wait_ready(0.0)
                    show(raised.value)
        assert reason is not None
        show(RemoteError(reason))
        shown = capfd.readouterr()
        assert shown.err.startswith("warning: trainer_refused")
        require_harmless(shown.out + shown.err)


@pytest.mark.parametrize("kind", [*get_args(TrainerFrame)[:3], *get_args(ToTrainer)], ids=lambda kind: kind.__name__)
async def test_a_message_of_a_controller_is_shown_harmlessly(kind: Any, capfd: pytest.CaptureFixture[str]) -> None:
    show_warnings()
    message = sample(kind)
    if kind in get_args(ToTrainer):
        message = TrainerData(epoch=0, incarnation=0, id=1, message=message)
    for bad in variants(message):
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.setsockopt(zmq.LINGER, 0)
            guard_controller(router, TOKEN)
            address = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
            error = asyncio.create_task(asyncio.to_thread(_error_of_a_rank, address))
            assert await asyncio.to_thread(router.poll, 1_000 * WAIT_S)
            name, *frames = router.recv_multipart()
            assert isinstance(decode(frames, ControllerFrame), Hello)
            for sent in (encode(Welcome(epoch=0, incarnation=0, last_id=0)), bad, encode(Refused(reason="the end"))):
                router.send_multipart([name, *sent])
            show(await error)
        shown = capfd.readouterr()
        assert shown.err.startswith("dora: ")
        require_harmless(shown.out + shown.err)


def _error_of_a_rank(address: str) -> RemoteError:
    end = TrainerEnd(address=address, token=TOKEN, rank=0, world_size=1)
    try:
        end.connect(WAIT_S)
        for _ in range(3):
            end.receive(WAIT_S)
    except RemoteError as err:
        return err
    finally:
        end.close()
    raise AssertionError("the link did not end")
