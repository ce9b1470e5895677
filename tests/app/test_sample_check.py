"""The samples of `dora check`: one answer per source, from a server that answers as these tests say."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from dora.app.inputs import open_inputs
from dora.app.sample_check import SHOWN, sample_sources, shown
from dora.config.load import load
from dora.engine.api import FinishReason, GenerateRequest, GenerateResult, OnTokens
from dora.errors import one_line
from dora.tasks.pool import GraderPool
from tests.escapes import HOSTILE, require_harmless


class Answers:
    """An engine that gives every request the same answer; `finish` None: it never ends."""

    def __init__(self, tokens: list[int], finish: FinishReason | None) -> None:
        self.tokens = tokens
        self.finish = finish
        self.asked: list[GenerateRequest] = []

    async def generate(self, url: str, request: GenerateRequest, on_tokens: OnTokens) -> GenerateResult:
        self.asked.append(request)
        on_tokens(self.tokens, [0.0] * len(self.tokens))
        if self.finish is None:
            await asyncio.Event().wait()
            raise AssertionError("unreachable")
        return GenerateResult(self.finish, (), len(self.tokens), 0)


async def sampled(*changes: str, text: str, finish: FinishReason | None) -> tuple[list[tuple[str, str]], Answers]:
    config = load(None, ["rollout.temperature=0.7", "rollout.max_new_tokens=100", *changes], environ={})
    inputs = open_inputs(config)
    engine: Any = Answers(inputs.tokenizer.encode(text, special_tokens=False), finish)
    pool = GraderPool(config.task.rewards, graders=1, timeout_s=10.0, memory_mb=2048, field="task.rewards")
    async with pool:
        limit_s = 0.0 if not finish else 60.0
        samples = await sample_sources(config, inputs, pool, engine, "http://server", limit_s=limit_s)
    assert samples.has_failed == any("NOT GRADED (" in text for topic, text in samples.lines if topic == "sample")
    return samples.lines, engine


def rows(path: Path, **row: str) -> str:
    path.write_text(json.dumps(row) + "\n")
    return f'{{kind="jsonl", path="{path}", label="{path.stem}"}}'


async def test_each_source_gets_an_answer_sampled_and_scored_as_in_the_run(tmp_path: Path) -> None:
    rare = rows(tmp_path / "rare.jsonl", prompt="a1=", answer="01").replace("}", ", weight=1e-6}")
    sources = f"task.sources=[{rows(tmp_path / 'often.jsonl', prompt='b2=', answer='02')}, {rare}]"
    rewards = 'task.rewards=[{kind="exact"}, {kind="length", weight=0.5, sources=["often"]}]'
    lines, engine = await sampled(sources, rewards, "eval.sets=[]", text="02", finish="stop")
    assert lines == [
        ("sample", "task.sources.0 (often.jsonl): reward 0.99 (exact 1, length -0.01); 2 tokens, stop (an end token)"),
        ("  prompt", "'b2='"),
        ("  response", "'02'"),
        ("  reference", "'02'"),
        ("sample", "task.sources.1 (rare.jsonl): reward 0; 2 tokens, stop (an end token)"),
        ("  prompt", "'a1='"),
        ("  response", "'02'"),
        ("  reference", "'01'"),
    ]
    assert [(asked.temperature, asked.max_new_tokens) for asked in engine.asked] == [(0.7, 100)] * 2


async def test_a_reward_that_fails_and_an_answer_that_is_cut_are_told(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "moody.py").write_text(
        "def score(response, finish):\n    raise ValueError(f'{finish} \\x1b[31m {response}')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    reward = 'task.rewards=[{kind="function", name="moody:score"}]'
    [(topic, text), *_], _ = await sampled(reward, text="02", finish="length")
    assert topic == "sample"
    assert "NOT GRADED (error: task.rewards.0 (function moody:score): ValueError: length" in text
    assert text.endswith("2 tokens, length (rollout.max_new_tokens are used up)")
    require_harmless(one_line(text) + "\n")


async def test_a_source_that_is_called_as_a_failure_is_none(tmp_path: Path) -> None:
    (tmp_path / "NOT GRADED.jsonl").write_text('{"prompt": "a1=", "answer": "01"}\n')
    source = f'task.sources=[{{kind="jsonl", path="{tmp_path}/NOT GRADED.jsonl"}}]'
    [(_, text), *_], _ = await sampled(
        source, 'task.rewards=[{kind="exact"}]', "eval.sets=[]", text="01", finish="stop"
    )
    assert "(NOT GRADED.jsonl): reward 1" in text


async def test_an_answer_that_does_not_end_is_shown_as_far_as_it_is() -> None:
    (sample, _, response, _), _ = await sampled(text="0", finish=None)
    assert sample[1].endswith("not graded; 1 tokens, unfinished: the time for samples is over")
    assert response == ("  response", "'0'")


async def test_texts_of_rows_are_shown_harmlessly_and_long_ones_without_their_middle(tmp_path: Path) -> None:
    source = f"task.sources=[{rows(tmp_path / 'rows.jsonl', prompt='a1=', answer=HOSTILE)}]"
    lines, _ = await sampled(source, 'task.rewards=[{kind="exact"}]', "eval.sets=[]", text="02", finish="stop")
    require_harmless("".join(f"{one_line(text)}\n" for _, text in lines))
    first, last = SHOWN
    assert shown("a" * first + "b" * 1_234 + "c" * last) == f"'{'a' * first}' ... 1,234 characters ... '{'c' * last}'"
    assert shown("a" * first + "c" * last) == f"'{'a' * first}{'c' * last}'"
