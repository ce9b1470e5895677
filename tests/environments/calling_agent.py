"""Programs that call their session, for tests: `calling_agent.py WHAT`. They need no package.

| WHAT | what it does |
|---|---|
| `echo` | asks once; the reward is the length of the answer |
| `twice` | asks, and asks again after the answer |
| `silent` | asks once and never again |
| `early` | ends without asking |
| `failing` | asks, and ends with exit code 3 |
| `rewarding` | gives its session a reward, and waits |
| `children` | starts a process that would outlive it, whose PID is in the file that the row names |
| `leaving` | asks, starts a process that keeps its output open, and ends; its PID is in the file that the row names |
| `warm` | serves every episode as `echo`, but one whose row has `error` or `reward`, and ends at one that has `end` |
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request


def post(url: str, key: str, body: object) -> dict:
    headers = {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.loads(reply.read())


def ask(base_url: str, key: str, messages: list[dict]) -> dict:
    reply = post(f"{base_url}/chat/completions", key, {"messages": messages})
    return reply["choices"][0]["message"]


def main(what: str) -> None:
    if what == "warm":
        return serve()
    row = json.loads(sys.stdin.readline())
    if what == "early":
        return None
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    assert not [name for name in os.environ if name.startswith("DORA_") and name != "DORA_SESSION"]
    messages = [*row.get("before", []), {"role": "user", "content": row["prompt"]}]
    answer = ask(url, key, messages)
    if what == "twice":
        messages += [answer, {"role": "user", "content": "and then?"}]
        ask(url, key, messages)
    if what == "rewarding":
        post(f"{os.environ['DORA_SESSION']}/reward", key, {"reward": 0.25})
    if what in ("children", "leaving"):
        with open(row["pid"], "w") as file:
            file.write(str(subprocess.Popen(["sleep", "600"]).pid))
    if what == "children":
        ask(url, key, messages)
    if what in ("silent", "rewarding"):
        time.sleep(600)
    if what == "failing":
        sys.exit(3)
    sys.stdout.write(f"a line before the last\n{'x' * 100_000}\n{len(answer['content'])}\n")
    return None


def serve() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        if "end" in order["row"]:
            sys.exit(4)
        threading.Thread(target=echo, args=(order,)).start()


def echo(order: dict) -> None:
    answer = ask(order["base_url"], order["api_key"], [{"role": "user", "content": order["row"]["prompt"]}])
    said = {name: order["row"][name] for name in ("error", "reward") if name in order["row"]}
    said = said or {"reward": len(answer["content"])}
    sys.stdout.write(json.dumps({"episode": order["episode"], **said}) + "\n")
    sys.stdout.flush()


main(sys.argv[1])
