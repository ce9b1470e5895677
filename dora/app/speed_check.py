"""Measures the servers of a configuration: decoding at several batch sizes and contexts, prefill, and pushes.

All servers are measured at the same time, each with the same load, because a run uses them so: servers that share
cores, a link or a disk are slower together than alone. Requests are as long as they are asked to be, and have random
prompts, of which no prefix cache knows any. Invariant: every wait for servers has a name and a limit.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, TypeVar

import numpy as np

from dora.app.trial_push import Held, time_pushes
from dora.config.schema import Config
from dora.engine.api import GenerateRequest, InferenceEngine
from dora.errors import ConfigError, RemoteError, first_of
from dora.sim.fitting import (
    Arrivals,
    DecodeFit,
    DecodePoint,
    PushFit,
    fit_decode,
    fit_prefill,
    fit_pushes,
    steady_step,
)

#: Tokens of a short prompt.
SHORT: Final = 16
#: How long a batch should decode, and the least number of tokens that it makes; its first ones are not measured.
DECODE_S: Final = 2.0
MIN_STEPS: Final = 32
#: Repetitions of all decoding measurements, as far as `BUDGET_S` allows, and of each prefill.
REPEATS: Final = 3
PREFILLS: Final = 9
#: KV tokens of each request that stay free, so that no server evicts one.
SPARE: Final = 16
#: Time after which nothing is repeated.
BUDGET_S: Final = 300.0
#: Limit of each wait for servers.
WAIT_S: Final = 300.0
#: Time in which servers must have ended the requests of the checks before, and the pause between two looks.
IDLE_S: Final = 20.0
LOOK_S: Final = 0.1

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class MeasuredServer:
    """A server that is to be measured, and what it can hold."""

    held: Held
    slots: int
    kv_tokens: int

    @property
    def url(self) -> str:
        return self.held.url


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpeeds:
    """What was measured: means over the servers, medians over the repetitions, in seconds."""

    num_servers: int
    beside_trainer: bool  #: whether a trainer worked on the same cores
    slots: int  #: the least of any server
    kv_tokens: int  #: the least of any server
    points: tuple[DecodePoint, ...]
    decode: DecodeFit
    prefill_s_per_token: float
    answer_s: float  #: of a request, besides prefill and decoding
    slowest: float  #: step time of the slowest server over the mean of all
    crowding: float  #: step time of a full batch on all servers at the same time, over that of one server alone
    pushes: PushFit
    pushed_together: int  #: largest number of pushes at the same time
    weight_bytes: int


async def measure_speeds(
    config: Config,
    *,
    model: Path,
    vocab_size: int,
    engine: InferenceEngine,
    servers: Sequence[MeasuredServer],
    show: Callable[[str], None],
    beside_trainer: bool = False,
) -> ServerSpeeds:
    """Measure idle servers; ConfigError if one is busy or holds other weights than `model`, RemoteError if one fails or
    takes too long.

    `show` receives a line about the progress. `beside_trainer`: whether a trainer works meanwhile.
    """
    if foreign := [server.held.problem for server in servers if not server.held.is_model]:
        raise ConfigError(*foreign)
    measuring = _Measuring(config, engine, servers, vocab_size, show)
    await measuring.require_idle()
    await measuring.warm_up()
    prefills = await measuring.prefills()
    points = await measuring.decoding()
    crowding = await measuring.crowding()
    await measuring.require_idle()
    show("pushes")
    pushes, num_bytes = await time_pushes(config, model=model, engine=engine, servers=[one.held for one in servers])
    decode = fit_decode(points)
    prefill_s, rest_s = fit_prefill(prefills)
    return ServerSpeeds(
        num_servers=len(servers),
        beside_trainer=beside_trainer,
        slots=measuring.slots,
        kv_tokens=measuring.kv_tokens,
        points=tuple(points),
        decode=decode,
        prefill_s_per_token=prefill_s,
        answer_s=max(0.0, rest_s - decode.step_s(batch=1, context=SHORT)),
        slowest=measuring.slowest,
        crowding=crowding,
        pushes=fit_pushes(pushes, num_bytes=num_bytes),
        pushed_together=max(push.together for push in pushes),
        weight_bytes=num_bytes,
    )


def batches(slots: int) -> list[int]:
    """Return 1, 2, 4, ... and `slots`."""
    return [*(1 << power for power in range((slots - 1).bit_length())), slots]


class _Measuring:
    """The measurements of one check."""

    def __init__(
        self,
        config: Config,
        engine: InferenceEngine,
        servers: Sequence[MeasuredServer],
        vocab_size: int,
        show: Callable[[str], None],
    ) -> None:
        self.slots = min(server.slots for server in servers)
        self.kv_tokens = min(server.kv_tokens for server in servers)
        self.slowest = 1.0
        self._engine, self._servers, self._show = engine, servers, show
        self._temperature = config.rollout.temperature
        self._longest = config.longest_request
        self._vocab_size = vocab_size
        self._random = np.random.default_rng()  # other prompts each time: a server may have those of an earlier check
        self._label = f"measure-{secrets.token_hex(4)}"
        self._number = 0
        self._ends_at = time.monotonic() + BUDGET_S
        self._step_s = DECODE_S / MIN_STEPS  # of the last batch

    @property
    def _prompts(self) -> list[int]:
        """Tokens of a short and of a long prompt, both of which leave room for an answer."""
        short = min(SHORT, max(1, self._longest // 4))
        return [short, max(short + 1, self._longest // 2)]

    async def require_idle(self) -> None:
        """ConfigError if a server runs requests."""
        busy: dict[str, int] = {}
        try:
            async with asyncio.timeout(IDLE_S):
                while busy := await self._busy():  # noqa: ASYNC110 - it can only be polled
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            raise ConfigError(
                *(
                    f"{self._field(url)}: {url} is busy ({count} tokens in KV): others use it; measure idle servers"
                    for url, count in busy.items()
                )
            ) from None

    async def _busy(self) -> dict[str, int]:
        """Return the KV tokens in use by URL, where there are any."""
        used = {server.url: (await self._engine.kv_use(server.url)).used_tokens for server in self._servers}
        return {url: count for url, count in used.items() if count}

    def _field(self, url: str) -> str:
        return next(server.held.field for server in self._servers if server.url == url)

    async def warm_up(self) -> None:
        """Run a few steps of the largest batch, which allocates memory, and estimate the time of a step."""
        self._show("warming up")
        for prompt in self._prompts:
            await self._batch(self._largest(prompt), prompt=prompt, new_tokens=MIN_STEPS)
        await self._decode(1, prompt=self._prompts[0])
        self.slowest = 1.0

    # --- prefill

    async def prefills(self) -> list[tuple[int, float]]:
        """Return the length of two prompts, and the median time until a request for one token has ended."""
        found = []
        for prompt in self._prompts:
            self._show(f"prefill of {prompt} tokens")
            calls = (self._prefills_of(server.url, prompt) for server in self._servers)
            times = await self._together(f"prefill of {prompt} tokens", *calls)
            found.append((prompt, median(second for one in times for second in one)))
        return found

    async def _prefills_of(self, url: str, prompt: int) -> list[float]:
        times = []
        for _ in range(PREFILLS):
            began = time.monotonic()
            await self._generate(url, prompt=prompt, new_tokens=1)
            times.append(time.monotonic() - began)
        return times

    # --- decoding

    async def decoding(self) -> list[DecodePoint]:
        """Return the median of each batch and context; all are measured once before any is repeated."""
        cases = [(prompt, batch) for prompt in self._prompts for batch in batches(self._largest(prompt))]
        found: dict[tuple[int, int], list[DecodePoint]] = {case: [] for case in cases}
        for repeat in range(REPEATS):
            for number, (prompt, batch) in enumerate(cases):
                if repeat and time.monotonic() > self._ends_at:
                    break
                self._show(f"decoding, {repeat + 1} of {REPEATS}: {number + 1} of {len(cases)}, batch {batch}")
                if (point := await self._decode(batch, prompt=prompt)) is not None:
                    found[prompt, batch].append(point)
        if not any(found.values()):
            raise RemoteError(
                f"{self._servers[0].url}: no decoding step could be measured: answers of {self._longest} tokens are "
                "too short to run at the same time; raise rollout.max_new_tokens for this check"
            )
        return [
            DecodePoint(batch, fmean(one.context for one in points), median(one.step_s for one in points))
            for (_, batch), points in found.items()
            if points
        ]

    async def crowding(self) -> float:
        """Return how many times as long a step takes while all servers decode as while only the first one does."""
        servers = self._servers
        if len(servers) == 1:
            return 1.0
        self._show("decoding on one server alone")
        prompt = self._prompts[0]
        batch = self._largest(prompt)
        together = await self._decode(batch, prompt=prompt)
        try:
            self._servers = servers[:1]
            alone = await self._decode(batch, prompt=prompt)
        finally:
            self._servers = servers
        return together.step_s / alone.step_s if together is not None and alone is not None else 1.0

    async def _decode(self, batch: int, *, prompt: int) -> DecodePoint | None:
        """Decode a batch on every server, for so many steps as are needed.

        None if the servers have no room for so many that all requests run at the same time.
        """
        most = self._most(batch, prompt)
        new_tokens = min(most, max(MIN_STEPS, math.ceil(DECODE_S / self._step_s)))
        while True:
            arrivals = await self._batch(batch, prompt=prompt, new_tokens=new_tokens)
            steps = [steady_step(one) for one in arrivals]
            if None not in steps:
                break
            if new_tokens == most:
                return None
            new_tokens = min(most, 4 * new_tokens)
        seconds = [one[0] for one in steps if one is not None]
        self._step_s = 1 / fmean(1 / second for second in seconds)
        self.slowest = max(self.slowest, max(seconds) / self._step_s)
        return DecodePoint(batch, prompt + fmean(one[1] for one in steps if one is not None), self._step_s)

    def _largest(self, prompt: int) -> int:
        """Return the largest batch of which no request is evicted."""
        need = prompt + min(MIN_STEPS, self._longest - prompt) + SPARE
        return max(1, min(self.slots, self.kv_tokens // need))

    def _most(self, batch: int, prompt: int) -> int:
        """Return the largest number of new tokens for which the servers have room."""
        return max(1, min(self._longest - prompt, self.kv_tokens // batch - prompt - SPARE))

    async def _batch(self, batch: int, *, prompt: int, new_tokens: int) -> list[list[Arrivals]]:
        """Decode one batch on every server; return when the tokens of its requests arrived, by server."""
        new_tokens = min(new_tokens, self._most(batch, prompt))
        what = f"decoding of a batch of {batch} with {prompt} + {new_tokens} tokens each"
        urls = [server.url for server in self._servers for _ in range(batch)]
        found = await self._together(what, *(self._generate(url, prompt=prompt, new_tokens=new_tokens) for url in urls))
        return [found[first : first + batch] for first in range(0, len(found), batch)]

    # --- requests

    async def _generate(self, url: str, *, prompt: int, new_tokens: int) -> Arrivals:
        """Run one request to its token budget."""
        self._number += 1
        arrivals = Arrivals([], [])

        def collect(tokens: Sequence[int], _: Sequence[float]) -> None:
            arrivals.times.append(time.monotonic())
            arrivals.totals.append(len(tokens) + (arrivals.totals[-1] if arrivals.totals else 0))

        request = GenerateRequest(
            id=f"{self._label}-{self._number:08d}",
            tokens=self._random.integers(self._vocab_size, size=prompt).tolist(),
            max_new_tokens=new_tokens,
            temperature=self._temperature,
            stop_tokens=(),
            seed=self._number,
            label=self._label,
            ignore_end=True,
        )
        await self._engine.generate(url, request, collect)
        return arrivals

    async def _together(self, what: str, *calls: Coroutine[Any, Any, Result]) -> list[Result]:
        """Return the results of all calls; RemoteError if they do not end in time, or if one fails."""
        try:
            async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
                started = [tasks.create_task(call, name=what) for call in calls]
        except TimeoutError:
            raise RemoteError(f"the {what} did not end within {WAIT_S:g} s") from None
        except ExceptionGroup as group:
            raise first_of(group) from group
        return [task.result() for task in started]
