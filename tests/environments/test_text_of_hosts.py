"""Text of hosts that would control a terminal, in every field of every reply: what is shown is harmless."""

from __future__ import annotations

import json
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from dora.config.schema import EnvironmentConfig
from dora.environments.api import Reset, Turn
from dora.environments.failures import FailureLimits
from dora.environments.pool import EnvironmentPool
from dora.environments.replies import _KINDS, EnvironmentFailed, Ready
from dora.errors import ConfigError, RunFailed
from dora.log import show_warnings
from tests.escapes import HOSTILE, require_harmless, show
from tests.made import plain, poisoned

#: Replies as it is told to, by its command, a row or a turn; a text is its last words.
HOST = """
import json, os, struct, sys
while header := sys.stdin.buffer.read(4):
    request = json.loads(sys.stdin.buffer.read(struct.unpack(">I", header)[0]))
    match request["type"]:
        case "hello": reply = json.loads(sys.argv[1])
        case "start": reply = request["row"]
        case "step": reply = json.loads(request["turn"]["content"])
        case _: reply = {"type": "closed"}
    if "last words" in reply:
        sys.stderr.write(reply["last words"])
        sys.stderr.flush()
        os._exit(1)
    body = json.dumps({"id": request["id"], **reply}).encode()
    sys.stdout.buffer.write(struct.pack(">I", len(body)) + body)
    sys.stdout.buffer.flush()
"""
MESSAGE = {"role": "user", "content": "x", "tool_call_id": "x"}
LAST_WORDS = {"last words": HOSTILE.replace("\n", " ")}


def reply(kind: str) -> Any:
    made = plain(_KINDS[kind], text="x") | {"type": kind}
    return made | {"messages": [MESSAGE]} if "messages" in made else made


RESET, END = reply("reset"), reply("end")


def pool_of(hello: Any, *, rows: int = 1) -> EnvironmentPool:
    command = (sys.executable, "-S", "-c", HOST, json.dumps(hello))
    return EnvironmentPool(EnvironmentConfig(name="x", command=command), limits=FailureLimits(budget=1, row=rows))


@pytest.mark.parametrize("kind", [*_KINDS, "last words"])
async def test_a_reply_is_shown_harmlessly(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    show_warnings()
    bad_ones = [LAST_WORDS] if kind == "last words" else [*poisoned(reply(kind), HOSTILE)]
    starts = [] if kind in ("observation", "end") else bad_ones
    numbers = count()
    async with pool_of({"type": "ready"}) as pool:
        pool.log_into(tmp_path)
        for bad, is_start in [*((bad, True) for bad in starts), *((bad, False) for bad in bad_ones)]:
            number = next(numbers)
            outcome: Any = await pool.start(number, bad if is_start else RESET, source="s", name=f"row {number}")
            if isinstance(outcome, Reset) and not is_start:
                outcome = await pool.step(number, Turn(json.dumps(bad)))
            if isinstance(outcome, EnvironmentFailed):
                assert outcome.reason.isprintable()
                again = await pool.start(number, RESET, source="s", name=f"row {number}")
                assert isinstance(again, EnvironmentFailed)
                assert again.reason.isprintable()
            await pool.close(number)
            number = next(numbers)  # a good episode: hosts are not lost in a row
            await pool.start(number, RESET, source="s", name=f"row {number}")
            await pool.step(number, Turn(json.dumps(END)))
    shown = capfd.readouterr()
    assert "warning: row_set_aside" in shown.err
    require_harmless(shown.out + shown.err)


async def test_the_reply_to_a_greeting_is_shown_harmlessly(capfd: pytest.CaptureFixture[str]) -> None:
    show_warnings()
    ready = plain(Ready, text="x")
    for bad in [LAST_WORDS, *poisoned(ready | {"type": "refused"}, HOSTILE), *poisoned(ready, HOSTILE)]:
        try:
            async with pool_of(bad):
                continue
        except (ConfigError, RunFailed) as err:
            show(err)
        shown = capfd.readouterr()
        assert shown.err.startswith("dora: ")
        require_harmless(shown.out + shown.err)
