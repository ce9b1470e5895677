"""A warm program for `dora.environments.agent:Agent`: each line of stdin is an episode, in a thread of its own.

The reward of an episode is the number of replies that its client got.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any

Order = dict[str, Any]
_LOCK = threading.Lock()


def serve(play: Callable[[Order], int]) -> None:
    """Play every episode that is ordered, until stdin ends. `play` returns the number of replies."""
    for line in sys.stdin:
        threading.Thread(target=_play, args=(play, json.loads(line)), daemon=True).start()


def _play(play: Callable[[Order], int], order: Order) -> None:
    try:
        done: dict[str, Any] = {"reward": play(order)}
    except Exception as err:  # noqa: BLE001 - whatever an agent raises fails its episode
        done = {"error": f"{type(err).__name__}: {err}"[:500]}
    with _LOCK:
        sys.__stdout__.write(json.dumps({"episode": order["episode"], **done}) + "\n")  # type: ignore[union-attr]
        sys.__stdout__.flush()  # type: ignore[union-attr]
