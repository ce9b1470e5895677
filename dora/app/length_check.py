"""The lengths of `dora check --measure --sample`: those of answers to the first prompts of the run, by its servers.

Every prompt has a whole group of answers, sampled as in the run, each to its end, because a plan depends on the longest
ones. Invariant: the wait ends once nothing has moved for STALL_S: no token has come, and no answer has been graded.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from dora.app.inputs import Inputs
from dora.app.sample_check import first_prompts
from dora.app.speed_check import MeasuredServer
from dora.config.schema import Config
from dora.engine.api import GenerateRequest, InferenceEngine
from dora.errors import RemoteError, first_of
from dora.sim.workload import LengthModel
from dora.tasks.pool import Graded, GraderPool
from dora.tasks.prompts import Prompt
from dora.tasks.rewards import GradeRequest

#: Longest time without a token of any answer, and without a graded one: graders may need longer than the servers.
STALL_S: Final = 300.0


class SampledAnswer(NamedTuple):
    """The length of one answer, and its reward; 0 if it could not be graded, as in a run."""

    num_tokens: int
    reward: float


async def sample_lengths(
    config: Config,
    inputs: Inputs,
    grader: GraderPool,
    *,
    engine: InferenceEngine,
    servers: Sequence[MeasuredServer],
    num_prompts: int,
    show: Callable[[str], None],
) -> LengthModel:
    """Return the lengths and rewards of `num_prompts` groups of answers, divided among the servers.

    RemoteError if a server fails or is silent. `show` receives a line about the progress.
    """
    prompts = await asyncio.to_thread(first_prompts, inputs, num_prompts)
    sampling = _Sampling(config, inputs, grader, engine, show, total=len(prompts) * config.rollout.group_size)
    answers = await sampling.answer(prompts, servers)
    return LengthModel(
        regime="recorded",
        cap=config.rollout.max_new_tokens,
        prompt_tokens=max(len(prompt.tokens) for prompt in prompts),
        prompts=tuple(len(prompt.tokens) for prompt in prompts),
        answers=tuple(tuple(answer.num_tokens for answer in group) for group in answers),
        rewards=tuple(tuple(answer.reward for answer in group) for group in answers),
    )


class _Sampling:
    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        grader: GraderPool,
        engine: InferenceEngine,
        show: Callable[[str], None],
        *,
        total: int,
    ) -> None:
        self._config, self._inputs, self._grader, self._engine, self._show = config, inputs, grader, engine, show
        self._label = f"lengths-{secrets.token_hex(4)}"
        self._total = total
        self._ended = 0
        self._limit = asyncio.timeout(None)

    async def answer(self, prompts: Sequence[Prompt], servers: Sequence[MeasuredServer]) -> list[list[SampledAnswer]]:
        """Return the answers by prompt; a server has as many at once as it has slots, all of a prompt's."""
        slots = [(server.url, asyncio.Semaphore(server.slots)) for server in servers]
        size = self._config.rollout.group_size
        self._progress()
        try:
            async with self._limit, asyncio.TaskGroup() as tasks:
                self._wait_again()
                running = [
                    [tasks.create_task(self._answer(prompt, *server, number=sibling)) for sibling in range(size)]
                    for prompt, server in zip(prompts, itertools.cycle(slots), strict=False)
                ]
        except TimeoutError:
            raise RemoteError(f"--sample: no token came and no answer was graded for {STALL_S:g} s") from None
        except ExceptionGroup as group:
            raise first_of(group) from group
        return [[task.result() for task in group] for group in running]

    async def _answer(self, prompt: Prompt, url: str, slots: asyncio.Semaphore, *, number: int) -> SampledAnswer:
        rollout, tokenizer = self._config.rollout, self._inputs.tokenizer
        tokens: list[int] = []

        def collect(new_tokens: Sequence[int], _: Sequence[float]) -> None:
            tokens.extend(new_tokens)
            self._wait_again()

        async with slots:
            request = GenerateRequest(
                id=f"{self._label}-{prompt.position:08d}-{number:04d}",
                tokens=prompt.tokens,
                max_new_tokens=rollout.max_new_tokens,
                temperature=rollout.temperature,
                stop_tokens=tokenizer.eos_ids,
                seed=prompt.position * rollout.group_size + number,
                label=self._label,
            )
            ended = await self._engine.generate(url, request, collect)
        outcome = await self._grader.grade(
            GradeRequest(
                prompt=prompt.text,
                response=tokenizer.decode(tokens),
                answer=prompt.answer,
                metadata=prompt.metadata,
                num_tokens=len(tokens),
                max_tokens=rollout.max_new_tokens,
                finish="stop" if ended.finish_reason == "stop" else "length",
                source=prompt.label,
            )
        )
        self._wait_again()
        self._ended += 1
        self._progress()
        return SampledAnswer(max(1, len(tokens)), outcome.reward if isinstance(outcome, Graded) else 0.0)

    def _wait_again(self) -> None:
        self._limit.reschedule(asyncio.get_running_loop().time() + STALL_S)

    def _progress(self) -> None:
        self._show(f"sampled {self._ended} of {self._total} answers")
