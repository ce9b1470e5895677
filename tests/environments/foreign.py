"""A host without DORA: `python foreign.py FAULT`. It speaks the protocol, but for one fault."""

import json
import os
import struct
import sys

FAULT = sys.argv[1]


def send(reply: dict) -> None:
    body = json.dumps(reply).encode()
    sys.stdout.buffer.write(struct.pack(">I", len(body)) + body)
    sys.stdout.buffer.flush()


def answer(request: dict) -> None:
    id, end = request["id"], {"type": "end", "reward": 1}
    match request["type"], FAULT:
        case "hello", "old":
            send({"id": id, "type": "refused", "reason": "this host speaks protocol 0"})
        case "hello", "hello garbage":
            send({"id": id, "type": "what"})
        case "hello", _:
            send({"id": id, "type": "ready"})
        case "start", "reset with a bad message":
            send({"id": id, "type": "reset", "messages": ["hello"]})
        case "start", _:
            send({"id": id, "type": "reset", "messages": [{"role": "user", "content": "hello"}]})
        case "step", "ends twice":
            send({"id": id, **end})
            send({"id": id, **end})
        case "step", "answers another":
            send({"id": id + 1_000, **end})
        case "step", "garbage":
            sys.stdout.buffer.write(b"\0\0\0\4{]}x")
            sys.stdout.buffer.flush()
        case "step", "endless frame":
            sys.stdout.buffer.write(b"\xff\xff\xff\xff")
            sys.stdout.buffer.flush()
        case "step", "closes its pipe":
            os.close(1)
        case "step", "wrong type":
            send({"id": id, "type": "reset", "messages": [{"role": "user", "content": "hello"}]})
        case "step", "unknown cause":
            send({"id": id, "type": "failed", "cause": "mood", "reason": "no"})
        case "step", "one loss" | "losses":
            loss = 1 if FAULT == "one loss" else 0
            send({"id": id, "type": "failed", "cause": "host", "reason": "a server was lost", "loss": loss})
        case "step", "infinite":
            sys.stdout.buffer.write(struct.pack(">I", 40) + b'{"id":%2d,"type":"end","reward":  1e999 }' % id)
            sys.stdout.buffer.flush()
        case "step", _:
            send({"id": id, **end})
        case "close", _:
            send({"id": id, "type": "closed"})


while header := sys.stdin.buffer.read(4):
    answer(json.loads(sys.stdin.buffer.read(struct.unpack(">I", header)[0])))
