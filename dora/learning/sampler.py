"""Samples real answers within this process: the embedded engine's batcher and decoder, and the rewards of a task.

There is no HTTP and no clock. Requests are submitted before the batcher starts, so that their batches are always the
same. Invariant: an answer is a function of the weights, of its prompt and seed, and of the requests beside it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from torch import Tensor

from dora.config.schema import Config
from dora.embedded.batcher import Batcher
from dora.embedded.decoder import CausalDecoder
from dora.embedded.generation import Generation, SamplingParams
from dora.errors import RunFailed
from dora.tasks.prompts import Prompt
from dora.tasks.rewards import GradeRequest, RewardFailed, build_scorer, total
from dora.tasks.tokenizer import Tokenizer

#: Requests that decode together; more of them cost less per token, but answers of very different lengths leave early.
SLOTS: Final = 128
#: Longest time without a token.
WAIT_S: Final = 600.0
#: Time limit of a reward that asks a server.
HTTP_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class RealAnswer:
    """An answer that was sampled and graded."""

    prompt: Prompt
    tokens: list[int]
    logprobs: list[float]
    reward: float  #: nan: none could be given
    truncated: bool


class AnswerRequest(NamedTuple):
    """An answer to sample, or to continue after `tokens`."""

    prompt: Prompt
    seed: int
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()  #: of `tokens`
    held_out: int | None = None  #: the held-out set that it is of; None: it is for training


class Sampler:
    """A policy that answers prompts."""

    def __init__(self, config: Config, *, model: Path, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._max_new_tokens = config.rollout.max_new_tokens
        kv_tokens = SLOTS * (config.task.max_prompt_tokens + self._max_new_tokens)
        self._decoder = CausalDecoder(model, slots=SLOTS, kv_tokens=kv_tokens, device="cpu", dtype="float32", threads=1)
        self._batcher = Batcher(self._decoder, slots=SLOTS, kv_tokens=kv_tokens)
        self._runner = asyncio.Runner()
        self._score = build_scorer(config.task.rewards, field="task.rewards", http_timeout_s=HTTP_S)
        self._held_out = [
            build_scorer(one.rewards, field=f"eval.sets.{index}.rewards", http_timeout_s=HTTP_S)
            if one.rewards
            else self._score
            for index, one in enumerate(config.eval.sets)
        ]
        self._fails_truncated = config.objective.truncated == "fail"
        self.failure = ""  #: why the last answer without a reward has none

    def close(self) -> None:
        """End the decoder's thread."""
        self._batcher.close()
        self._runner.close()

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Sample under these weights from now on."""
        self._decoder.put(weights.items())

    def answer(self, requests: Sequence[AnswerRequest], *, temperature: float) -> list[RealAnswer]:
        """Return one answer for each request."""
        generations = [
            Generation(
                rid=str(number),
                prompt_ids=[*request.prompt.tokens, *request.tokens],
                sampling=SamplingParams(
                    max_new_tokens=self._max_new_tokens - len(request.tokens),
                    temperature=temperature,
                    seed=request.seed % 2**63,
                    stop_ids=frozenset(self._tokenizer.eos_ids),
                ),
            )
            for number, request in enumerate(requests)
        ]
        self._decoder.flush()
        self._runner.run(self._generate(generations))
        return [self._graded(request, one) for request, one in zip(requests, generations, strict=True)]

    async def _generate(self, generations: Sequence[Generation]) -> None:
        """Run the batcher until all are complete."""
        for generation in generations:
            self._batcher.submit(generation)
        running = asyncio.create_task(self._batcher.run(), name="batcher")
        made = -1  # a stopped process goes on: only a second wait without a token is too long
        while not await self._batcher.emptied(timeout_s=WAIT_S):
            before, made = made, sum(len(generation.output_ids) for generation in generations)
            if made == before:
                raise RunFailed(f"no token was sampled for {WAIT_S:g} s")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    def _graded(self, request: AnswerRequest, done: Generation) -> RealAnswer:
        prompt, tokens = request.prompt, [*request.tokens, *done.output_ids]
        assert done.finish_reason is not None
        truncated = done.finish_reason["type"] == "length"
        graded = GradeRequest(
            prompt=prompt.text,
            response=self._tokenizer.decode(tokens),
            answer=prompt.answer,
            metadata=prompt.metadata,
            num_tokens=len(tokens),
            max_tokens=self._max_new_tokens,
            finish="length" if truncated else "stop",
            source=prompt.label,
        )
        return RealAnswer(
            prompt=prompt,
            tokens=tokens,
            logprobs=[*request.logprobs, *done.output_logprobs],
            reward=self._reward(graded, held_out=request.held_out),
            truncated=truncated,
        )

    def _reward(self, graded: GradeRequest, *, held_out: int | None) -> float:
        """Return the reward; nan if none can be given, as in a run."""
        if held_out is None and self._fails_truncated and graded.finish == "length":
            self.failure = "truncated: tokens"
            return math.nan
        try:
            return total((self._score if held_out is None else self._held_out[held_out])(graded))
        except RewardFailed as err:
            self.failure = str(err)
            return math.nan
