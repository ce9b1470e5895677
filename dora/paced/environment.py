"""The environment of a paced run: a host whose calls take the time and return the tokens of the workload's table.

It speaks the protocol of docs/ENVIRONMENTS-PROTOCOL.md. A run numbers its episodes by trajectory, and so the number of
an episode names its answer in the table; episodes that only give a prompt are never stepped. Invariant: the k-th `step`
of an episode is answered with the result of its k-th call, after the time of that call; the step after the last call is
answered with `end`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, BinaryIO, Final

import msgspec

from dora.pipes import HEADER, read_frame, take_pipes, write_frame
from dora.sim.answers import Answers
from dora.sim.tools import Call
from dora.sim.workload import Workload

#: The text of one token, of a prompt and of a result: a digit is a token of the seed's tokenizer.
TOKEN: Final = "7"


class HostRequest(msgspec.Struct):
    """A request, as far as this host reads it."""

    id: int
    type: str
    episode: int = 0
    row: Mapping[str, Any] = {}


def run_environment(workload: Workload, *, seed: int, time_scale: float) -> None:
    """Serve episodes until stdin closes."""
    requests, replies = take_pipes()
    hello = read_frame(requests)
    if hello is not None:
        _send(replies, msgspec.json.decode(hello, type=HostRequest).id, {"type": "ready"})
        asyncio.run(_PacedHost(workload.answers(seed=seed), replies, time_scale=time_scale).serve(requests))


class _PacedHost:
    def __init__(self, answers: Answers, replies: BinaryIO, *, time_scale: float) -> None:
        self._answers = answers
        self._replies = replies
        self._time_scale = time_scale
        self._calls: dict[int, list[Call]] = {}  # calls to come, by episode, in reverse order

    async def serve(self, requests: BinaryIO) -> None:
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), requests)
        with suppress(asyncio.IncompleteReadError):
            while True:
                (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                request = msgspec.json.decode(await reader.readexactly(size), type=HostRequest)
                delay_s, reply = self._answer(request)
                loop.call_later(delay_s / self._time_scale, _send, self._replies, request.id, reply)

    def _answer(self, request: HostRequest) -> tuple[float, dict[str, Any]]:
        """Return a reply, and after how many seconds of the workload's time it is due."""
        if request.type == "start":
            return 0.0, {"type": "reset", "messages": [{"role": "user", "content": request.row["prompt"]}]}
        if request.type == "close":
            self._calls.pop(request.episode, None)
            return 0.0, {"type": "closed"}
        if request.episode not in self._calls:
            group, sibling = divmod(request.episode, self._answers.group_size)
            self._calls[request.episode] = [*reversed(self._answers.group(group).calls_of(sibling))]
        if not self._calls[request.episode]:
            del self._calls[request.episode]
            return 0.0, {"type": "end"}
        call = self._calls[request.episode].pop()
        return call.latency_s, {
            "type": "observation",
            "messages": [{"role": "user", "content": TOKEN * max(1, call.num_tokens)}],
        }


def _send(replies: BinaryIO, id: int, reply: Mapping[str, Any]) -> None:
    write_frame(replies, msgspec.json.encode({"id": id, **reply}))
