"""The samples of `dora check`: what the policy answers to one prompt of each source, and how the reward scores it."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from dora.app.inputs import Inputs
from dora.config.schema import Config
from dora.engine.api import GenerateRequest, InferenceEngine
from dora.tasks.pool import Graded, GraderPool, GradingFailed
from dora.tasks.prompts import Prompt
from dora.tasks.rewards import GradeRequest
from dora.tasks.tokenizer import Tokenizer

#: How long all answers together may take; what an answer has by then is shown.
SAMPLE_S: Final = 120.0
#: Number of prompts of a source that are tried until one is not over the limit.
TRIED: Final = 100
#: Characters of a text that are shown, of its beginning and of its end.
SHOWN: Final = (160, 240)
_ENDINGS: Final = {"stop": "stop (an end token)", "length": "length (rollout.max_new_tokens are used up)"}

Lines = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class SourceSamples:
    """The answers of all sources, as lines, and whether a reward failed on one of them."""

    lines: Lines
    has_failed: bool


async def sample_sources(
    config: Config, inputs: Inputs, pool: GraderPool, engine: InferenceEngine, url: str, *, limit_s: float = SAMPLE_S
) -> SourceSamples:
    """Return one answer per source, sampled as in the run by the server at `url`.

    RemoteError if the server fails.
    """
    prompts = [await asyncio.to_thread(_prompt_of, inputs, index) for index in range(len(config.task.sources))]
    deadline = asyncio.get_running_loop().time() + limit_s

    async def sample(index: int, prompt: Prompt | None) -> SourceSamples:
        if prompt is None:
            text = f"task.sources.{index}: not sampled, because none of its first prompts can be used"
            return SourceSamples([("sample", text)], has_failed=False)
        return await _sample(config, prompt, inputs.tokenizer, pool, engine, url, deadline=deadline)

    found = await asyncio.gather(*itertools.starmap(sample, enumerate(prompts)))
    return SourceSamples([line for one in found for line in one.lines], any(one.has_failed for one in found))


def first_prompts(inputs: Inputs, count: int) -> list[Prompt]:
    """Return the first `count` prompts of the stream; fewer if the source has fewer."""
    found: list[Prompt] = []
    for position in itertools.count():
        prompt = inputs.stream.at(position)
        if prompt is None or len(found) == count:
            return found
        if not prompt.skipped:
            found.append(prompt)
    raise AssertionError("unreachable: positions do not end")


def _prompt_of(inputs: Inputs, source: int) -> Prompt | None:
    """Return the first prompt of a source that is not over the limit; None if the first ones are."""
    for draw in range(TRIED):
        prompt = inputs.stream.at(inputs.stream.position_of(source, draw=draw))
        if prompt is None or not prompt.skipped:
            return prompt
    return None


async def _sample(
    config: Config,
    prompt: Prompt,
    tokenizer: Tokenizer,
    pool: GraderPool,
    engine: InferenceEngine,
    url: str,
    *,
    deadline: float,
) -> SourceSamples:
    tokens: list[int] = []

    def collect(new_tokens: Sequence[int], _: Sequence[float]) -> None:
        tokens.extend(new_tokens)

    request = GenerateRequest(
        id=f"sample-{os.getpid():08d}-{prompt.source_index:04d}",
        tokens=prompt.tokens,
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        stop_tokens=tokenizer.eos_ids,
        seed=prompt.source_index,
        label="check",
    )
    ended = "unfinished"
    with suppress(TimeoutError):
        async with asyncio.timeout_at(deadline):
            ended = (await engine.generate(url, request, collect)).finish_reason
    response = tokenizer.decode(tokens)
    score, has_failed = "not graded", False
    if ended in ("stop", "length"):
        graded = GradeRequest(
            prompt=prompt.text,
            response=response,
            answer=prompt.answer,
            metadata=prompt.metadata,
            num_tokens=len(tokens),
            max_tokens=config.rollout.max_new_tokens,
            finish="stop" if ended == "stop" else "length",
            source=prompt.label,
        )
        outcome = await pool.grade(graded)
        score, has_failed = _score(outcome), isinstance(outcome, GradingFailed)
    source = f"task.sources.{prompt.source_index} ({prompt.source})"
    ending = _ENDINGS.get(ended, "unfinished: the time for samples is over")
    lines = [
        ("sample", f"{source}: {score}; {len(tokens)} tokens, {ending}"),
        ("  prompt", shown(prompt.text)),
        ("  response", shown(response)),
    ]
    if prompt.answer:
        lines.append(("  reference", shown(prompt.answer)))
    return SourceSamples(lines, has_failed)


def _score(outcome: Graded | GradingFailed) -> str:
    if isinstance(outcome, GradingFailed):
        return f"NOT GRADED ({outcome.reason})"
    terms = ", ".join(f"{name} {value:g}" for name, value in outcome.terms)
    return f"reward {outcome.reward:g}" + (f" ({terms})" if len(outcome.terms) > 1 else "")


def shown(text: str) -> str:
    """Return a text in quotes, with escapes for all that is not printable; the middle of a long text is left out."""
    first, last = SHOWN
    if (cut := len(text) - first - last) <= 0:
        return repr(text)
    return f"{text[:first]!r} ... {cut:,} characters ... {text[-last:]!r}"
