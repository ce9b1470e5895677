"""A program that begins each episode in its own way, and fails for some rows before it asks for anything.

It limits the first reply to two tokens, and goes on after it.
"""

from __future__ import annotations

import json
import os
import random
import sys
import urllib.request
from typing import Any


def ask(messages: list[Any], **limit: int) -> Any:
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    body = json.dumps({"messages": messages, **limit}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data=body, headers=headers), timeout=120) as reply:
        return json.loads(reply.read())


def main() -> None:
    row = json.loads(sys.stdin.readline())
    if row["seed"] % 5 == 1:
        sys.exit("no mood")
    keys = [f"k{random.randrange(32)}" for _ in range(random.randint(1, 6))]
    messages = [{"role": "user", "content": " ".join(keys)}]
    first = ask(messages, max_tokens=2)
    used, why = first["usage"]["completion_tokens"], first["choices"][0]["finish_reason"]
    assert used <= 2, used
    assert why in ("stop", "length") if used == 2 else why == "stop", (used, why)
    messages += [first["choices"][0]["message"], {"role": "user", "content": "k1"}]
    second = ask(messages)["choices"][0]["message"]["content"]
    sys.stdout.write(f"{len(second or '') % 2}\n")


if __name__ == "__main__":
    main()
