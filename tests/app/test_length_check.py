"""Sampling lengths for a plan: prompts and graders of a configuration, and servers that answer as these tests say."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dora.app import length_check
from dora.app.check import ToMeasure, check
from dora.app.inputs import open_inputs
from dora.app.length_check import sample_lengths
from dora.app.speed_check import MeasuredServer
from dora.app.speed_file import sampled
from dora.app.trial_push import Held
from dora.config.load import load
from dora.config.schema import Config
from dora.engine.api import GenerateRequest, GenerateResult, OnTokens
from dora.engine.errors import ServerGone
from dora.errors import ConfigError, RemoteError
from dora.sim.workload import LengthModel
from dora.tasks.pool import GraderPool

SLOTS = 3
URLS = ("http://one", "http://two")


class Servers:
    """An engine on which the n-th request of a server gets n tokens, all requests in their slots at the same time."""

    def __init__(self) -> None:
        self.asked: dict[str, list[GenerateRequest]] = {url: [] for url in URLS}
        self.running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    async def generate(self, url: str, request: GenerateRequest, on_tokens: OnTokens) -> GenerateResult:
        self.asked[url].append(request)
        num_tokens = len(self.asked[url])
        self.running[url] += 1
        self.most[url] = max(self.most[url], self.running[url])
        for _ in range(num_tokens):
            await asyncio.sleep(0)
            on_tokens([5], [0.0])
        self.running[url] -= 1
        return GenerateResult("stop", (), num_tokens, 0)


class Gone(Servers):
    async def generate(self, url: str, request: GenerateRequest, on_tokens: OnTokens) -> GenerateResult:
        raise ServerGone(f"{url}: gone")


class Silent(Servers):
    async def generate(self, url: str, request: GenerateRequest, on_tokens: OnTokens) -> GenerateResult:
        on_tokens([5], [0.0])
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


def config_of(*changes: str) -> Config:
    return load(None, ["rollout.group_size=4", "rollout.max_new_tokens=10", *changes], environ={})


async def lengths_of(config: Config, servers: Any, *, num_prompts: int = 4) -> tuple[LengthModel, list[str]]:
    told: list[str] = []
    pool = GraderPool(config.task.rewards, graders=1, timeout_s=10.0, memory_mb=2048, field="task.rewards")
    async with pool:
        measured = [MeasuredServer(Held(url, "engine.urls", "v", is_model=True), SLOTS, 1000) for url in URLS]
        found = await sample_lengths(
            config,
            open_inputs(config),
            pool,
            engine=servers,
            servers=measured,
            num_prompts=num_prompts,
            show=told.append,
        )
    return found, told


async def test_each_server_answers_whole_groups_within_its_slots() -> None:
    config, servers = config_of("rollout.temperature=0.7"), Servers()
    found, told = await lengths_of(config, servers)
    assert [len(group) for group in found.answers] == [4] * 4
    for first, url in enumerate(URLS):  # every other prompt
        asked, theirs = servers.asked[url], found.answers[first::2]
        assert sorted(length for group in theirs for length in group) == list(range(1, 9))
        assert servers.most[url] == SLOTS
        assert [len(tokens) for tokens in dict.fromkeys(tuple(one.tokens) for one in asked)] == [
            *found.prompts[first::2]
        ]
        assert {(one.temperature, one.max_new_tokens, one.ignore_end) for one in asked} == {(0.7, 10, False)}
    assert len({one.id for asked in servers.asked.values() for one in asked}) == 16
    assert len({one.seed for asked in servers.asked.values() for one in asked}) == 16
    assert (found.regime, found.cap, found.prompt_tokens) == ("recorded", 10, max(found.prompts))
    assert {reward for group in found.rewards for reward in group} == {0.0}  # no sum has such an answer
    assert (told[0], told[-1]) == ("sampled 0 of 16 answers", "sampled 16 of 16 answers")
    assert sampled(found) == (
        "answers: 16 to 4 prompts, 4 tokens on average, 8 at most; 0% used up rollout.max_new_tokens"
    )


async def test_a_server_that_is_lost_or_silent_ends_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServerGone, match="gone"):
        await lengths_of(config_of(), Gone())
    monkeypatch.setattr(length_check, "STALL_S", 0.05)
    with pytest.raises(RemoteError, match=r"--sample: no token came and no answer was graded for 0.05 s"):
        await lengths_of(config_of(), Silent())


async def test_graders_may_take_longer_than_the_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen answers of 0.15 s each, on one grader, long after the last token."""
    (tmp_path / "slow.py").write_text("import time\n\ndef score(response):\n    time.sleep(0.15)\n    return 1.0\n")
    monkeypatch.setattr(length_check, "STALL_S", 1.5)
    config = config_of(f'task.rewards=[{{kind="function", name="{tmp_path}/slow.py:score"}}]', "eval.sets=[]")
    found, _ = await lengths_of(config, Servers())
    assert [sum(group) for group in found.rewards] == [4.0] * 4


async def test_episodes_are_not_sampled_as_single_answers() -> None:
    config = config_of('environment.name="mine:Env"')
    with pytest.raises(ConfigError, match=r"--sample: would sample single answers, but the run plays whole episodes"):
        await check(config, lambda topic, text: None, measure=ToMeasure(str, num_prompts=2))
