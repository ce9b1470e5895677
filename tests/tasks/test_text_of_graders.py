"""Text of graders that would control a terminal: what is shown of it is harmless."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora.config.schema import RewardConfig
from dora.errors import DoraError, ProtocolError
from dora.tasks.pool import GraderPool, GradingFailed, outcome_of, read_reply
from dora.tasks.rewards import GradeRequest
from tests.escapes import HOSTILE, require_harmless, show
from tests.made import poisoned

REWARDS = f"""
import os, sys
TEXT = {HOSTILE!r}
class Own(Exception):
    def __str__(self): return TEXT
    __repr__ = __str__
Own.__name__ = Own.__qualname__ = TEXT.replace(chr(0), "")
def grade(*, prompt, response, answer, metadata):
    match response:
        case "raise": raise ValueError(TEXT)
        case "own": raise Own
        case "return": return TEXT
        case "leave": sys.exit(TEXT)
        case "die": sys.stderr.write(TEXT.replace(chr(10), " ")); sys.stderr.flush(); os._exit(3)
"""


def pool_of(path: Path) -> GraderPool:
    rewards = [RewardConfig(kind="function", name=f"{path}:grade")]
    return GraderPool(rewards, graders=1, timeout_s=20, memory_mb=1_024, field="task.rewards")


async def test_why_a_grading_failed_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    async with pool_of(tmp_path / "mine.py") as pool:
        for response in ("raise", "own", "return", "leave", "die"):
            outcome = await pool.grade(GradeRequest("p", response, "a", {}, num_tokens=1, max_tokens=9))
            assert isinstance(outcome, GradingFailed)
            assert outcome.reason.isprintable()


async def test_half_a_character_in_an_error_is_told_and_costs_no_process(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def grade(response): raise ValueError('no ' + chr(0xD83D))")
    async with pool_of(tmp_path / "mine.py") as pool:
        outcome = await pool.grade(GradeRequest("p", "a"))
        assert isinstance(outcome, GradingFailed)
        assert outcome.reason.endswith("ValueError: no ? (mine.py:1)")
        assert pool._graders[0].process.is_running


@pytest.mark.parametrize("end", ["raise ValueError(TEXT)", "raise Own", "sys.exit(TEXT)", "print(TEXT); os._exit(3)"])
async def test_a_reward_that_cannot_be_made_is_shown_harmlessly(
    end: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(f"{REWARDS}\n{end}\n")
    with pytest.raises(DoraError) as raised:
        await pool_of(tmp_path / "mine.py").__aenter__()
    show(raised.value)
    shown = capfd.readouterr()
    assert shown.err.startswith("dora: ")
    require_harmless(shown.out + shown.err)


LENGTH = b"\xff" * 4
HUGE = {
    "an array": b"\xdd" + LENGTH,
    "a map": b"\xdf" + LENGTH,
    "a text": b"\x81\xa5error\xdb" + LENGTH,
    "an array in a map": b"\x81\xa5terms\xdd" + LENGTH,
    "arrays in arrays": b"\x81\xa5terms" + (b"\xdd" + LENGTH) * 200_000,
    "nested arrays": b"\x81\xa5terms" + b"\x91" * 1_000_000,
    "nested maps": b"\x81\xa1a" * 300_000,
}


@pytest.mark.parametrize("body", HUGE.values(), ids=HUGE)
def test_a_reply_that_claims_to_be_huge_or_nested_is_refused_and_reserves_no_memory(body: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="not a map in msgpack"):
            read_reply(body)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_any_reply_gives_an_outcome_or_an_error_in_one_line() -> None:
    replies: list[Any] = [{"error": "x"}, {"reward": 1.0, "terms": [["x", 1.0]]}, {"reward": "x"}, ["x"]]
    for bad in [bad for good in replies for bad in poisoned(good, HOSTILE)]:
        outcome: object
        try:
            outcome = outcome_of(read_reply(msgspec.msgpack.encode(bad)))
        except DoraError as err:
            outcome = err
        assert str(getattr(outcome, "reason", outcome)).isprintable()
