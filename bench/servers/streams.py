"""The far side of bench/streams.py: a server of answers rendered before the start, in a process of its own.

uvloop and raw sockets, so that clients do not wait for it. It begins when all streams are open and writes round robin,
a chunk to each. A client says on a connection of its own when it has taken an eighth of a round; no more than half a
round is under way, so that each chunk is a read of its own, as it is where a server decodes step after step. A case
with a pace needs no credit: groups of SLOTS streams get a chunk each, evenly out of step, as instances of a fleet.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import msgspec
import uvloop

from dora.controller.published import Published
from dora.core.ids import FIRST_VERSION

RUN_ID = "bench"
LABEL = Published(RUN_ID, files={FIRST_VERSION: {}}).label(FIRST_VERSION)  #: of a version 0 that is an empty folder
PROMPT_TOKENS = 24
GROUP_SIZE = 8
SLOTS = 256
CREDIT = b"CREDIT / HTTP/1.1\r\n\r\n"
EIGHTHS = 4  # of a round that may be under way
HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Sat, 21 Nov 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
END = b"0\r\n\r\n"
LOAD = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_total_num_tokens", "max_running_requests")
#: What a weight push asks a server.
CONTROL: dict[bytes, Any] = {
    b"/model_info": {"weight_version": LABEL},
    b"/update_weights_from_disk": {"success": True},
    b"/v1/loads": {"loads": [dict.fromkeys(LOAD, 0)]},
}


class Case(NamedTuple):
    """What is streamed."""

    streams: int
    form: str  # incremental, cumulative
    per_chunk: int
    tokens: int  # of each answer
    every_s: float = 0.0  # between the chunks of a stream; 0: as fast as they are taken

    def __str__(self) -> str:
        what = f"{self.streams:,} streams, {self.form}, {self.per_chunk} tokens a chunk"
        return f"{what}, {self.tokens:,} an answer"


def rendered(case: Case) -> list[bytes]:
    """The chunks of one answer as SGLang 0.5.20 sends them (tokenizer skipped, metrics on), in HTTP's framing."""
    triples = [[-0.001 - i * 7919 % 62_831 / 9_973, 1000 + i * 104_729 % 150_000, None] for i in range(case.tokens)]
    chunks = []
    for end in range(case.per_chunk, case.tokens + 1, case.per_chunk):
        shown = triples[0 if case.form == "cumulative" else end - case.per_chunk : end]
        event = {
            "output_ids": [token for _, token, _ in shown],
            "meta_info": meta_info(shown, end, last=end == case.tokens),
        }
        chunks.append(framed(b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"))
    chunks[-1] += framed(b"data: [DONE]\n\n") + END
    return chunks


def meta_info(shown: list[list[Any]], total: int, *, last: bool) -> dict[str, Any]:
    meta = {
        "id": "c1062880-+000000000123-000001",
        "finish_reason": {"type": "length", "length": total} if last else None,
        "prompt_tokens": PROMPT_TOKENS,
        "weight_version": LABEL,
        "num_retractions": 0,
        "forward_entry_time": 1795177841.4314222,
        "prefill_finished_time": 1795177841.4370954,
        "queue_time": 0.0003204345703125,
        "input_token_logprobs": [],
        "output_token_logprobs": shown,
        "output_token_logprobs_length": total,
        "reasoning_tokens": 0,
        "completion_tokens": total,
        "cached_tokens": 0,
        "cached_tokens_details": None,
        "dp_rank": None,
    }
    return meta | {"weight_versions": [{"version": LABEL, "start": 0, "end": total}]} if last else meta


def framed(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


class Sender:
    """All open streams of the server, and how far they have come."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.chunks = rendered(case)
        self.streams: list[asyncio.WriteTransport] = []
        self.order: Iterator[tuple[bytes, asyncio.WriteTransport]] = iter(())
        self.under_way = 0  # chunks sent and not yet credited

    def open(self, stream: asyncio.WriteTransport) -> None:
        stream.write(HEAD)
        self.streams.append(stream)
        if len(self.streams) == self.case.streams:
            if self.case.every_s:
                self.begin_paced()
            else:
                self.order = ((chunk, stream) for chunk in self.chunks for stream in self.streams)
                self.credit(0)

    def credit(self, eighths: int) -> None:
        """The client has taken so many more eighths of a round."""
        self.under_way -= eighths * (self.case.streams // 8)
        while self.under_way < EIGHTHS * (self.case.streams // 8):
            chunk, stream = next(self.order, (b"", None))
            if stream is None:
                return
            stream.write(chunk)
            self.under_way += 1

    def begin_paced(self) -> None:
        loop = asyncio.get_running_loop()
        groups = [self.streams[i : i + SLOTS] for i in range(0, self.case.streams, SLOTS)]
        for number, group in enumerate(groups):
            begin = loop.time() + 1.0 + self.case.every_s * number / len(groups)  # once the client has its heads
            for step, chunk in enumerate(self.chunks):
                loop.call_at(begin + step * self.case.every_s, self.send_all, chunk, group)

    def send_all(self, chunk: bytes, group: list[asyncio.WriteTransport]) -> None:
        for stream in group:
            stream.write(chunk)


class Connection(asyncio.Protocol):
    """One request to the server, or the client's credit."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self.received = bytearray()
        self.is_credit = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        if self.is_credit:
            self.sender.credit(len(data))
            return
        self.received += data
        head, found, body = self.received.partition(b"\r\n\r\n")
        lengths = [int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if found and len(body) >= sum(lengths):
            self.answer(bytes(head).split()[1])

    def answer(self, path: bytes) -> None:
        if self.received.startswith(CREDIT):
            self.is_credit = True
        elif path == b"/generate":
            self.sender.open(self.transport)
        else:
            body = json.dumps(CONTROL.get(path, {})).encode()
            self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        self.received.clear()


async def serve(case: Case) -> None:
    sender = Sender(case)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(sender), "127.0.0.1", 0, backlog=16_384)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(msgspec.json.decode(sys.argv[1], type=Case)))
