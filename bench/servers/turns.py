"""The far side of bench/episodes.py: a server that gives every request the same turn, in a process of its own.

It answers as servers/streams.py does. The chunks of a turn follow each other at a fixed interval; the first requests
are spread over `spread_s` more, so that turns do not come in bursts.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import NamedTuple

import msgspec
import uvloop

from servers.streams import END, HEAD, Case, Connection, Sender, framed, meta_info


class Pace(NamedTuple):
    """What is sent, and when."""

    turn: list[int]  # its last token ends it
    per_chunk: int
    every_s: float  # between the chunks of a turn
    first: int = 0  # so many first requests are spread
    spread_s: float = 0.0


def rendered_turn(pace: Pace) -> list[bytes]:
    """The chunks of a turn as SGLang sends them, in HTTP's framing."""
    triples = [[-0.5 - i / 997, token, None] for i, token in enumerate(pace.turn)]
    total, chunks = len(triples), []
    for end in range(pace.per_chunk, total + 1, pace.per_chunk):
        shown, last = triples[end - pace.per_chunk : end], end == total
        meta = meta_info(shown, end, last=last)
        if last:
            meta["finish_reason"] = {"type": "stop", "matched": pace.turn[-1]}
        event = {"output_ids": [token for _, token, _ in shown], "meta_info": meta}
        chunks.append(framed(b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"))
    chunks[-1] += framed(b"data: [DONE]\n\n") + END
    return chunks


class TurnSender(Sender):
    """Sends each request its turn."""

    def __init__(self, pace: Pace) -> None:
        super().__init__(Case(0, "incremental", pace.per_chunk, pace.per_chunk))
        self.pace = pace
        self.chunks = rendered_turn(pace)
        self.num_requests = 0

    def open(self, stream: asyncio.WriteTransport) -> None:
        stream.write(HEAD)
        pace, loop = self.pace, asyncio.get_running_loop()
        late_s = pace.spread_s * self.num_requests / pace.first if self.num_requests < pace.first else 0.0
        self.num_requests += 1
        for number, chunk in enumerate(self.chunks, start=1):
            loop.call_later(late_s + number * pace.every_s, stream.write, chunk)


async def serve(pace: Pace) -> None:
    sender = TurnSender(pace)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(sender), "127.0.0.1", 0, backlog=16_384)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(msgspec.json.decode(sys.argv[1], type=Pace)))
