"""An agent that asks twice, for jobs under faults: warm, and with the same requests if it gets the same replies.

It gives no reward, so that its episodes are graded as those of other jobs, and has no client that would ask again.
"""

from __future__ import annotations

import json
import sys
import threading
import urllib.request
from typing import Any

TIMEOUT_S = 300.0


def ask(order: dict[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the model's message."""
    headers = {"Authorization": f"Bearer {order['api_key']}"}
    body = json.dumps({"messages": messages}).encode()
    request = urllib.request.Request(f"{order['base_url']}/chat/completions", data=body, headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
        message: dict[str, Any] = json.loads(reply.read())["choices"][0]["message"]
    return message


def play(order: dict[str, Any]) -> None:
    """Play one episode."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"k{order['row']['seed'] % 32}"}]
    try:
        messages += [ask(order, messages), {"role": "user", "content": f"k{(order['row']['seed'] + 1) % 32}"}]
        ask(order, messages)
        said: dict[str, Any] = {"reward": None}
    except OSError as err:
        said = {"error": repr(err)}
    sys.stdout.write(json.dumps({"episode": order["episode"], **said}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    for line in sys.stdin:
        threading.Thread(target=play, args=(json.loads(line),), daemon=True).start()
