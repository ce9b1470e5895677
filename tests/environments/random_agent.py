"""A warm program whose episodes do anything that an agent may: `random_agent.py FILE`.

It asks with messages or with token ids, streams or not, edits what was said, goes back, asks the same again, asks twice
at a time, breaks its connection and asks again, and repeats requests as OpenAI's client does. It fails an episode
if a repetition has another reply. FILE gets a line of JSON for each episode: its reward, which no other has, and the
number of each turn with its token ids, as it was told. It shares no code with what it calls.
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import sys
import threading
from typing import Any
from urllib.parse import urlsplit

LOCK = threading.Lock()
NUMBERS = itertools.count(1)
#: `<|im_start|>user k0<|im_end|> <|im_start|>assistant` of the shipped policy with tools, without its spaces.
ASK = [97, 106, 95, 108, 98, 95, 97, 107, 95]


class Wire:
    """The session of one episode."""

    def __init__(self, base_url: str, key: str) -> None:
        self.address = urlsplit(base_url)
        self.key = key
        self.path = self.address.path.removesuffix("/v1")
        self.told: dict[int, list[int]] = {}  # by the number of the turn

    def send(self, path: str, body: bytes, *, retry: int = 0) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self.address.hostname or "", self.address.port, timeout=120)
        headers = {"Authorization": f"Bearer {self.key}", "x-stainless-retry-count": str(retry)}
        connection.request("POST", self.path + path, body=body, headers=headers)
        return connection

    def post(self, path: str, body: bytes, *, retry: int = 0) -> bytes:
        connection = self.send(path, body, retry=retry)
        reply = connection.getresponse()
        data = reply.read()
        connection.close()
        if reply.status != 200:
            raise RuntimeError(f"{reply.status}: {data[:200]!r}")
        return data

    def note(self, path: str, data: bytes) -> list[int]:
        """Remember what a reply says, and return its token ids."""
        if data.startswith((b"data:", b":")):
            events = [json.loads(line[5:]) for line in data.splitlines() if line.startswith(b"data: {")]
            number, ids = events[-1]["id"], events[-1]["choices"][0]["token_ids"]
        else:
            reply = json.loads(data)
            number = reply["request_id"] if "generate" in path else reply["id"]
            ids = reply["choices"][0]["token_ids"]
        with LOCK:
            self.told[int(number.rpartition("-")[2])] = ids
        return list(ids)


def play(wire: Wire, rng: random.Random, *, with_tokens: bool) -> None:
    """Ask a few times."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "k0"}]
    tokens = [*ASK]
    for turn in range(rng.randint(1, 4)):
        if with_tokens:
            path = rng.choice(["/inference/v1/generate", "/v1/completions"])
            body = json.dumps({"token_ids" if "generate" in path else "prompt": tokens}).encode()
        else:
            path = "/v1/chat/completions"
            settings = {"stream": rng.random() < 0.3, "return_token_ids": True, "temperature": rng.random()}
            body = json.dumps({"messages": messages, "padding": rng.random(), **settings}).encode()
        data = ask(wire, path, body, rng)
        ids = wire.note(path, data)
        if turn and rng.random() < 0.2:
            parallel(wire, path, body, rng)
        if with_tokens:
            keep = rng.randrange(len(ASK), len(tokens) + 1) if rng.random() < 0.3 else len(tokens)
            tokens = [*tokens[:keep], *(ids if keep == len(tokens) else []), 95, *ASK]
        else:
            said = text_of(data)
            if rng.random() < 0.2:
                messages = messages[: rng.randrange(1, len(messages) + 1, 2)]  # goes back
            if rng.random() < 0.2:
                said = said.strip() + rng.choice(["", " ", "!"])  # an edit, or none
            messages = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": f"k{turn}"}]


def ask(wire: Wire, path: str, body: bytes, rng: random.Random) -> bytes:
    """Return the reply to a request, perhaps after a broken connection, and perhaps after it was repeated."""
    if rng.random() < 0.2:
        wire.send(path, body).close()
        threading.Event().wait(rng.random() / 20)
    data = wire.post(path, body, retry=1 if rng.random() < 0.1 else 0)
    for retry in range(1, rng.randint(1, 3)):
        if wire.post(path, body, retry=retry) != data:
            raise RuntimeError("a repeated request has another reply")
    return data


def parallel(wire: Wire, path: str, body: bytes, rng: random.Random) -> None:
    """Ask twice at a time: other samples of the same conversation."""
    bodies = [body[:-1] + b', "user": "%d"}' % number for number in range(2)]
    asking = [threading.Thread(target=lambda one=one: wire.note(path, wire.post(path, one))) for one in bodies]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()


def text_of(data: bytes) -> str:
    if data.startswith((b"data:", b":")):
        events = [json.loads(line[5:]) for line in data.splitlines() if line.startswith(b"data: {")]
        return "".join(one["choices"][0]["delta"].get("content") or "" for one in events)
    return json.loads(data)["choices"][0]["message"]["content"] or ""


def serve(order: dict[str, Any], file: str) -> None:
    wire = Wire(order["base_url"], order["api_key"])
    said: dict[str, Any] = {"reward": next(NUMBERS) / 2**20}
    try:
        play(wire, random.Random(order["api_key"]), with_tokens=order["row"]["seed"] % 2 == 0)
    except Exception as err:  # noqa: BLE001 it is the outcome of the episode
        said = {"error": repr(err)}
    with LOCK:
        with open(file, "a") as log:
            log.write(json.dumps({**said, "told": sorted(wire.told.items())}) + "\n")
        sys.stdout.write(json.dumps({"episode": order["episode"], **said}) + "\n")
        sys.stdout.flush()


def main() -> None:
    for line in sys.stdin:
        threading.Thread(target=serve, args=(json.loads(line), sys.argv[1])).start()


if __name__ == "__main__":
    main()
