"""Trajectories from the controller to 1, 2 and 8 trainer ranks, beside bare pyzmq moving the same bytes.

Run: python bench/transport.py [--full]. Every rank is a separate process. Micro-batches of 65,536 tokens (those of
launch/workloads/paper-*.toml, 16 answers) and of 4,096 (those of the default job, 8 answers) go to all ranks in turn
through `ControllerEnd` and `TrainerEnd`: encoded, numbered, kept until acknowledged, decoded, checked. The time is that
from the first send until every rank has reported the last micro-batch. Ceiling: a blocking ROUTER to blocking DEALERs,
with the same frames and keys, and nothing encoded, decoded or acknowledged. The two alternate; figures are medians of
the rounds. The bar applies to the large micro-batches; the small ones show the cost of a message apart from its bytes.
A third measurement, bare pyzmq without keys, shows the cost of encryption.

Sixteen different micro-batches are sent in turn: building them is the controller's work, not the transport's, but a
single one would stay in the processor's cache. Every process first frees one large block, as a process with torch in it
has long done: glibc then keeps freed memory, so that pages are not new each time.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
import zmq
from result import Report, number, parser

from dora.core.ids import StepId
from dora.transport.codec import Buffer, encode
from dora.transport.controller_end import ControllerEnd
from dora.transport.curve import guard_controller, guard_trainer
from dora.transport.link import MAX_UNACKED
from dora.transport.messages import MicroBatch, MicroBatchDone, Stop, TrainerData
from dora.transport.trainer_end import TrainerEnd

WORLDS = (1, 2, 8)
STEP = StepId(0)
GROUP_SIZE = 8
DIFFERENT = 16
TOKEN = "bench"
LARGE_BLOCK_BYTES = 30 << 20  # glibc takes the size of a freed block, up to 32 MB, for what is worth keeping
LIMIT_S = 60.0  # of each wait


class Seconds(NamedTuple):
    """Of one message."""

    ours: float
    bare: float
    clear: float


class Shape(NamedTuple):
    """Micro-batches of one size."""

    tokens: int
    answers: int
    messages: int  # that one round moves over all ranks
    bar: str


SHAPES = (Shape(65_536, 16, 320, "ratio >= 0.7"), Shape(4_096, 8, 2_400, ""))


def micro_batch(tokens: int, answers: int, *, seed: int, last: bool) -> MicroBatch:
    draw = np.random.default_rng(seed)
    return MicroBatch(
        step=STEP,
        index=0,
        last=last,
        tokens=draw.integers(0, 150_000, tokens, dtype=np.int32),
        loss_mask=np.ones(tokens, np.uint8),
        behavior_logprobs=-draw.random(tokens, dtype=np.float32),
        lengths=np.full(answers, tokens // answers, np.int32),
        trajectories=np.arange(answers, dtype=np.int64),
        groups=np.arange(answers, dtype=np.int64) // GROUP_SIZE,
        versions=np.zeros(answers, np.int32),
        rewards=np.ones(answers, np.float32),
        group_rewards=np.ones((answers, GROUP_SIZE), np.float32),
        truncated=np.zeros(answers, np.uint8),
        sources=np.zeros(answers, np.uint8),
    )


# --- the ranks: this file again


def rank_of_ours(address: str, rank: int, world_size: int) -> None:
    """Takes micro-batches until told to stop; reports each last one of a round."""
    end = TrainerEnd(address=address, token=TOKEN, rank=rank, world_size=world_size)
    end.connect(LIMIT_S)
    while not isinstance(message := end.receive(LIMIT_S), Stop):
        assert isinstance(message, MicroBatch)
        if message.last:
            end.send(MicroBatchDone(rank=rank, step=STEP, index=0, num_tokens=len(message.tokens), busy_s=0.0))
    end.close()


def bare_rank(address: str, rank: int, *, encrypted: bool) -> None:
    """The same on a DEALER: the first frame says whether it is the last of a round; an empty one ends it."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.ROUTING_ID, str(rank).encode())
        dealer.setsockopt(zmq.RCVHWM, MAX_UNACKED)
        dealer.setsockopt(zmq.RCVTIMEO, int(LIMIT_S * 1000))
        if encrypted:
            guard_trainer(dealer, TOKEN)
        dealer.connect(address)
        dealer.send(b"hello")
        while mark := dealer.recv_multipart(copy=False)[0].bytes:
            if mark == b"last":
                dealer.send(b"done")


@contextmanager
def ranks(kind: str, address: str, world_size: int) -> Iterator[None]:
    """Processes that end by themselves when told to; killed if this one fails first."""
    command = [sys.executable, __file__, "--rank", kind, address]
    started = [subprocess.Popen([*command, str(rank), str(world_size)]) for rank in range(world_size)]
    try:
        yield
        for process in started:
            process.wait(LIMIT_S)
    finally:
        for process in started:
            process.kill()
            process.wait()


# --- the controller's side


class Bare:
    """One blocking ROUTER."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], *, encrypted: bool) -> None:
        self._router = context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),  # with it, a send waits where the queue of a rank is full
            (zmq.SNDHWM, MAX_UNACKED),
            (zmq.SNDTIMEO, int(LIMIT_S * 1000)),
            (zmq.RCVTIMEO, int(LIMIT_S * 1000)),
            (zmq.LINGER, 1000),
        ):
            self._router.setsockopt(option, value)
        if encrypted:
            guard_controller(self._router, TOKEN)
        self._router.bind("tcp://127.0.0.1:*")
        self.address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    def wait_ready(self, world_size: int) -> None:
        self._ranks = [self._router.recv_multipart()[0] for _ in range(world_size)]

    def round(self, frames: Sequence[Sequence[Buffer]], count: int) -> float:
        begun = time.perf_counter()
        for i in range(count):
            mark = b"last" if i == count - 1 else b"more"
            for rank in self._ranks:
                self._router.send_multipart([rank, mark, *frames[i % DIFFERENT]], copy=False)
        for _ in self._ranks:
            self._router.recv_multipart()
        return time.perf_counter() - begun

    def close(self) -> None:
        for rank in self._ranks:
            self._router.send_multipart([rank, b""])
        self._router.close()


async def our_round(end: ControllerEnd, batches: Sequence[MicroBatch], *, world_size: int, count: int) -> float:
    """The last of `batches` ends the round."""
    begun = time.perf_counter()
    async with asyncio.timeout(LIMIT_S):
        for i in range(count):
            for rank in range(world_size):
                await end.send(rank, batches[-1 if i == count - 1 else i % DIFFERENT])
        for _ in range(world_size):
            await end.receive()
    return time.perf_counter() - begun


async def measure(report: Report, world_size: int, *, rounds: int, scale: int) -> None:
    end = ControllerEnd(address="tcp://127.0.0.1:*", token=TOKEN, world_size=world_size, now=time.monotonic)
    address = await end.start()
    with zmq.Context() as context, ExitStack() as stack:
        bare, clear = Bare(context, encrypted=True), Bare(context, encrypted=False)
        for kind, where in (("ours", address), ("bare", bare.address), ("clear", clear.address)):
            stack.enter_context(ranks(kind, where, world_size))
        await end.wait_ready(LIMIT_S)
        for ceiling in (bare, clear):
            ceiling.wait_ready(world_size)
        for shape in SHAPES:
            batches = [
                micro_batch(shape.tokens, shape.answers, seed=seed, last=seed == DIFFERENT)
                for seed in range(DIFFERENT + 1)
            ]
            frames = [encode(TrainerData(epoch=0, incarnation=0, id=1, message=batch)) for batch in batches]
            count = shape.messages * scale // world_size
            seconds = []
            for _ in range(rounds + 1):
                taken = bare.round(frames, count), clear.round(frames, count)
                ours_s = await our_round(end, batches, world_size=world_size, count=count)
                seconds.append(Seconds(*(s / count / world_size for s in (ours_s, *taken))))
            show(report, shape, world_size, num_bytes=sum(map(len, frames[0])), seconds=seconds[1:])
        for rank in range(world_size):
            await end.send(rank, Stop(reason="measured"))
        for ceiling in (bare, clear):
            ceiling.close()
    await end.close()


def show(report: Report, shape: Shape, world_size: int, *, num_bytes: int, seconds: Sequence[Seconds]) -> None:
    """`seconds` round by round; the first round, which warms up, is not among them."""
    ours, bare, clear = map(statistics.median, zip(*seconds, strict=True))
    what = f"{world_size} rank{'s' if world_size > 1 else ''}, {shape.tokens:,} tokens"
    report.row(
        f"{what}, {ours * 1e6:.0f} µs each",
        num_bytes / ours / 1e6,
        "MB/s",
        against=f"bare pyzmq, {number(num_bytes / bare / 1e6)} MB/s",
        ratio=statistics.median(one.bare / one.ours for one in seconds),
        bar=shape.bar,
    )
    report.row(
        f"{what}: bare pyzmq",
        num_bytes / bare / 1e6,
        "MB/s",
        against=f"the same without encryption, {number(num_bytes / clear / 1e6)} MB/s",
        ratio=statistics.median(one.clear / one.bare for one in seconds),
    )


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    bytearray(LARGE_BLOCK_BYTES)
    if options.rank:
        kind, address, rank, world_size = options.rank
        if kind == "ours":
            rank_of_ours(address, int(rank), int(world_size))
        else:
            bare_rank(address, int(rank), encrypted=kind == "bare")
        return
    rounds, scale = (9, 4) if options.full else (5, 1)
    report = Report(__doc__, full=options.full, sizes=f"9 bytes a token, {rounds} rounds")
    for world_size in WORLDS:
        asyncio.run(measure(report, world_size, rounds=rounds, scale=scale))
    report.print()


if __name__ == "__main__":
    main()
