"""A program that begins each episode in its own way, and fails for some rows before it asks for anything."""

from __future__ import annotations

import json
import os
import random
import sys
import urllib.request


def main() -> None:
    row = json.loads(sys.stdin.readline())
    if row["seed"] % 5 == 1:
        sys.exit("no mood")
    keys = [f"k{random.randrange(32)}" for _ in range(random.randint(1, 6))]
    body = {"messages": [{"role": "user", "content": " ".join(keys)}]}
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers)
    with urllib.request.urlopen(request, timeout=120) as reply:
        said = json.loads(reply.read())["choices"][0]["message"]["content"]
    sys.stdout.write(f"{len(said or '') % 2}\n")


if __name__ == "__main__":
    main()
