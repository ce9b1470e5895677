"""Programs that drive themselves as environments: their requests, their ends, and what is left of them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dora.config.schema import EnvironmentConfig
from dora.controller.episodes import append
from dora.environments import agent as agents
from dora.environments.agent import Agent, AgentFailed
from dora.environments.api import End, Observation, Reset, Turn
from dora.environments.episode import Episode
from dora.environments.pool import EnvironmentPool
from dora.environments.renderer import open_renderer
from dora.tasks.tokenizer import Tokenizer

SCRIPT = str(Path(__file__).with_name("calling_agent.py"))
ROW = {"prompt": "2+2"}


@pytest.fixture(autouse=True)
async def shared(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[dict[str, Any]]:
    """What a host has of its own."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(agents, "_shared", found)
    monkeypatch.setenv("DORA_TOKEN", "secret")
    yield found
    if (worker := found.get("warm")) is not None and worker._process.returncode is None:
        worker._process.kill()
        await worker._reading
    if "server" in found:
        await found["server"].stop()


def program(what: str, **options: Any) -> Agent:
    return Agent([sys.executable, SCRIPT, what], **options)


async def test_an_episode_is_what_the_program_asks_and_ends_with_its_last_line() -> None:
    agent = program("twice")
    reset = await agent.reset(ROW)
    assert [*reset.messages] == [{"role": "user", "content": "2+2"}]
    seen = await agent.step(Turn("four", reasoning="easy"))
    assert isinstance(seen, Observation)
    assert seen.rewrites
    recorded = {"role": "assistant", "content": "four", "reasoning_content": "easy"}
    assert [*seen.messages] == [*reset.messages, recorded, {"role": "user", "content": "and then?"}]
    assert await agent.step(Turn("five")) == End(reward=4.0)
    await agent.close()


async def test_long_instructions_and_long_turns_of_an_agent_are_continued_as_they_were(qwen3: Tokenizer) -> None:
    config = EnvironmentConfig(
        name="dora.environments.agent:Agent",
        options={"command": [sys.executable, SCRIPT, "twice"]},
        episode_timeout_s=60.0,
        hosts=1,
    )
    row = ROW | {"before": [{"role": "system", "content": "rule. " * 1_500}]}
    episode = Episode(open_renderer(qwen3, settings={"name": "qwen3"}), (), max_tokens=50_000, own_prompt=True)
    async with EnvironmentPool(config) as pool:
        reset = await pool.start(1, row, source="s", name="r")
        assert isinstance(reset, Reset), reset
        episode.begin(reset.messages, tools=reset.tools)
        turn = [*qwen3.encode("word " * 1_800, special_tokens=False), qwen3.token_id("<|im_end|>")]
        episode.append(turn, [0.0] * len(turn))
        before = episode.context()
        seen = await pool.step(1, episode.end_turn("stop"))
        assert isinstance(seen, Observation), seen
        append(episode, seen)
    assert [*episode.fork_causes] == []
    assert episode.context()[: len(before)] == before


async def test_the_reward_is_what_the_session_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "GRACE_S", 0.1)
    agent = program("rewarding")
    await agent.reset(ROW)
    assert await agent.step(Turn("4")) == End(reward=0.25)
    await agent.close()
    assert_nothing_runs()


@pytest.mark.parametrize(
    ("what", "says"), [("early", "the agent ended before its first request"), ("failing", "ended with exit code 3")]
)
async def test_a_program_that_fails_fails_its_episode(what: str, says: str) -> None:
    agent = program(what)

    async def play() -> None:
        await agent.reset(ROW)
        await agent.step(Turn("4"))

    with pytest.raises(AgentFailed, match=says):
        await play()
    await agent.close()


async def test_a_program_that_cannot_be_started_is_named() -> None:
    agent = Agent(["/no/such/program"])
    with pytest.raises(AgentFailed, match=r"^/no/such/program cannot be started: No such file or directory$"):
        await agent.reset(ROW)
    await agent.close()


async def test_a_program_and_what_it_started_end_with_its_episode(tmp_path: Path) -> None:
    agent = program("children")
    await agent.reset(ROW | {"pid": str(tmp_path / "pid")})
    await agent.step(Turn("4"))
    child = psutil.Process(int((tmp_path / "pid").read_text()))
    await agent.close()
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert_nothing_runs()


async def test_what_a_program_leaves_behind_neither_holds_up_its_episode_nor_outlives_it(tmp_path: Path) -> None:
    agent = program("leaving")
    await agent.reset(ROW | {"pid": str(tmp_path / "pid")})
    async with asyncio.timeout(10):
        assert await agent.step(Turn("four")) == End(reward=4.0)
    child = psutil.Process(int((tmp_path / "pid").read_text()))
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    await agent.close()


async def test_a_silent_program_can_be_left() -> None:
    agent = program("silent")
    await agent.reset(ROW)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await agent.step(Turn("4"))
    await agent.close()
    assert_nothing_runs()


async def test_a_warm_program_serves_many_episodes_and_is_replaced_when_it_ends(shared: dict[str, Any]) -> None:
    found = [program("warm", warm=True) for _ in range(5)]
    await asyncio.gather(*(agent.reset({"prompt": str(n)}) for n, agent in enumerate(found)))
    ends = await asyncio.gather(*(agent.step(Turn("x" * n)) for n, agent in enumerate(found)))
    assert ends == [End(reward=float(n)) for n in range(5)]
    worker = shared["warm"]
    failing, ending, later = program("warm", warm=True), program("warm", warm=True), program("warm", warm=True)
    await failing.reset(ROW | {"error": "no\nway"})
    with pytest.raises(AgentFailed, match="no"):
        await failing.step(Turn("4"))
    with pytest.raises(AgentFailed, match="ended with exit code 4"):
        await ending.reset(ROW | {"end": True})
    await later.reset(ROW)
    assert shared["warm"] is not worker
    assert await later.step(Turn("4")) == End(reward=1.0)
    for agent in (*found, failing, ending, later):
        await agent.close()


async def test_a_warm_program_may_print_a_number_that_is_too_large() -> None:
    for row, reward in ((ROW | {"reward": 10**400}, None), (ROW, 1.0)):
        agent = program("warm", warm=True)
        await agent.reset(row)
        async with asyncio.timeout(20):
            assert await agent.step(Turn("4")) == End(reward)
        await agent.close()


async def test_a_warm_program_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    command = tmp_path / "program"
    early, later = (Agent([str(command), SCRIPT, "warm"], warm=True) for _ in range(2))
    with pytest.raises(AgentFailed, match=r"cannot be started: No such file or directory$"):
        await early.reset(ROW)
    command.symlink_to(sys.executable)
    await later.reset(ROW)
    assert await later.step(Turn("4")) == End(reward=1.0)
    for agent in (early, later):
        await agent.close()


@pytest.mark.parametrize("command", ["agent.py", [], [1], None])
def test_a_command_is_a_list_of_texts(command: Any) -> None:
    with pytest.raises(ValueError, match=r"^command must be a list of texts"):
        Agent(command)


def assert_nothing_runs() -> None:
    running = [p for p in psutil.Process(os.getpid()).children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    assert not [p.cmdline() for p in running if SCRIPT in p.cmdline()]


def test_rows_are_given_as_they_are() -> None:
    row = {"prompt": "{other}", "other": "x"}
    assert agents._filled(["a", "{prompt}", "{missing}", "{}"], row) == ["a", "{other}", "{missing}", "{}"]
    assert json.loads(json.dumps(row)) == row
