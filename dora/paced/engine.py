"""An engine without a model: answers have the lengths of a workload's table and take the simulated server's time.

It uses the embedded engine's HTTP protocol and decides only when tokens appear. `sim.instance` is driven by a clock
that runs `time_scale` times faster than the wall clock, so that a late wake-up delays publication but never decoding.
The request id identifies the trajectory and so its answer; probes are answered at once. A turn ends where the table has
a call; the KV of the answer stays, as in a prefix cache, for the request of its next turn. Invariant: `rows` are the
generations whose requests the simulated server holds.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dora.core.commands import Generate
from dora.core.ids import FIRST_VERSION, InstanceId, TrajectoryId
from dora.embedded.generation import ABORTED, ABORTED_WAITING, Generation
from dora.embedded.scheduler import Scheduler
from dora.errors import InvariantViolation
from dora.sim.answers import Answers
from dora.sim.instance import SimulatedInstance
from dora.sim.server import Request, SimulatedServer

#: The id of a request for a trajectory (`dora.engine.names`); the group is the trajectory.
_REQUEST_ID: Final = re.compile(r"[0-9a-f]{8}-\d{4}-([+-]\d{12})-\d{6}")
#: Decoding steps between two publications (SGLang: stream_interval).
STREAM_TOKENS: Final = 64
#: A behavior log-prob as a server writes it: a float32 in decimal.
LOGPROB: Final = -0.6931471824645996


def trajectory_of(rid: str) -> int | None:
    """Return the trajectory of a request; None for a probe or a comparison."""
    found = _REQUEST_ID.fullmatch(rid)
    return int(found[1]) if found else None


@dataclass(kw_only=True)
class PacedModel:
    """The model that the control routes see."""

    context_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    pass_id: int  # first token of an answer that earns the reward
    fail_id: int  # first token of one that does not
    model_type: str = "paced"
    architectures: list[str] = field(default_factory=lambda: ["Paced"])
    cached_tokens: int = 0  # siblings share their prompt in `sim.instance`
    adapters: None = None

    @property
    def eos_id(self) -> int:
        return min(self.eos_token_ids)

    def load(self, folder: Path) -> None:
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"{folder} is not a model folder")

    def put(self, tensors: Iterable[tuple[str, Any]]) -> None:
        for _ in tensors:
            pass

    def checksums(self) -> dict[str, str]:
        return {}

    def flush(self) -> None:
        """No effect: the simulated server holds the cache."""

    def tokens(self, start: int, end: int, *, total: int, capped: bool, passes: bool) -> list[int]:
        """Tokens [start, end) of an answer whose turn ends at `total`. The answer's first token encodes the reward; the
        turn's last token ends the turn, unless capped."""
        made = [self.fail_id] * (end - start)
        if start == 0 and end and passes:
            made[0] = self.pass_id
        if end == total and end > start and not capped:
            made[-1] = self.eos_id
        return made


@dataclass(slots=True)
class _Running:
    """A generation and its request on the simulated server."""

    generation: Generation
    request: Request
    start: int  # tokens of its answer from earlier attempts
    passes: bool


class PacedEngine(Scheduler):
    def __init__(
        self,
        model: PacedModel,
        *,
        answers: Answers,
        server: SimulatedServer,
        slowness: float,
        push_s: float,
        time_scale: float,
    ) -> None:
        super().__init__(model, slots=server.slots, kv_tokens=server.kv_tokens)
        self._paced = model
        self._answers, self._push_s, self._time_scale = answers, push_s, time_scale
        self._instance = SimulatedInstance(InstanceId(0), server, slowness=slowness)
        self._running: dict[TrajectoryId, _Running] = {}  # a number per attempt: attempts of one answer may overlap
        self._calling: dict[int, Request] = {}  # by trajectory: the KV of these answers may still be here
        self._number = 0
        self._publish_at = 0.0  # in the workload's time, like everything compared with `_now`

    def _now(self) -> float:
        return time.monotonic() * self._time_scale

    # --- the loop

    async def run(self) -> None:
        while True:
            self._wake.clear()
            await self._run_orders()
            self._advance()
            due = math.inf if self.holding else min(self._instance.next_at(), self._publish_at)
            await self._wait_until(due)

    async def _wait_until(self, due: float) -> None:
        """Wait until the workload's time is `due`, or for new work."""
        try:
            async with asyncio.timeout((due - self._now()) / self._time_scale if due < math.inf else None):
                await self._wake.wait()
        except TimeoutError:
            return

    def close(self) -> None:
        """Nothing to release."""

    async def _run_on_thread(self, order: Callable[[], object]) -> object:
        """Loading weights takes as long as a push of the workload."""
        await asyncio.sleep(self._push_s / self._time_scale)
        return order()

    def hold(self, *, retract: bool) -> None:
        self._step_to(self._now())
        self.holding = True
        if retract:
            for number in list(self._running):
                self.waiting.append(self._cut_off(number))

    def flush(self, *, over_queue: bool = False) -> bool:
        """Drop the KV of calling answers; the KV of a prompt is freed with the last sibling that uses it."""
        flushed = super().flush(over_queue=over_queue)
        while flushed and self._calling:
            self._instance.forget(self._calling.popitem()[1].order.trajectory)
        return flushed

    def release(self) -> None:
        self._instance.anchor = max(self._instance.anchor, self._now())  # no step ran during the pause
        super().release()

    # --- one turn

    def _advance(self) -> None:
        now = self._now()
        if not self.holding:
            self._step_to(now)
        self._apply_aborts()
        while self.waiting and not self.holding:
            self._take(self.waiting.popleft())
        if not self.holding:
            self._end(self._instance.settle())
        self.used_tokens = self._instance.used - self._instance.spare()
        self._output_at = time.monotonic()  # a health probe succeeds at once
        self._stepped.set()
        self._publish_finished()
        if now >= self._publish_at:
            self._publish_rows()

    def _step_to(self, now: float) -> None:
        """Complete all decoding steps that ended before `now`, in order."""
        while (at := self._instance.next_at()) <= now:
            self._instance.reach(at)
            self._end(self._instance.settle())
        self._instance.reach(now)

    def _publish_rows(self) -> None:
        for running in self._running.values():
            self._grow(running, self._instance.tokens(running.request))
            running.generation.published = len(running.generation.output_ids)
            running.generation.news.set()
        self._publish_at = self._instance.after(STREAM_TOKENS)

    def _apply_aborts(self) -> None:
        running = {one.generation.rid: number for number, one in self._running.items()} if self._aborting else {}
        for rid in self._aborting:
            if rid in running:
                number = running[rid]
                self._finish(self._cut_off(number), ABORTED)
            elif (generation := self.live.get(rid)) is not None and generation in self.waiting:
                self.waiting.remove(generation)
                self._finish(generation, ABORTED_WAITING)
        self._aborting.clear()

    # --- one request

    def _take(self, generation: Generation) -> None:
        """Give the request to the simulated server; answer a probe at once."""
        trajectory = trajectory_of(generation.rid)
        generation.admitted_at = generation.prefilled_at = time.time()
        generation.cached_tokens = 0
        if trajectory is None:
            self._answer_probe(generation)
            return
        group, sibling = divmod(trajectory, self._answers.group_size)
        answer = self._answers.group(group)
        produced = len(generation.prompt_ids) - answer.prompt_tokens
        if produced < 0:
            raise InvariantViolation(
                f"request {generation.rid} has a prompt of {len(generation.prompt_ids)} tokens, but the workload's has "
                f"{answer.prompt_tokens}: it belongs to another run"
            )
        so_far = produced + len(generation.output_ids)  # `output_ids`: tokens from before a retraction
        request = self._next_turn(trajectory, so_far)
        if request is None:
            self._number += 1
            order = Generate(TrajectoryId(self._number), 0, self._instance.id, FIRST_VERSION, so_far)
            calls = tuple(call for call in answer.calls_of(sibling) if call.at > so_far)
            request = Request(order, group, answer.prompt_tokens, answer.lengths[sibling], so_far, calls=calls)
        passes = answer.rewards[sibling] > 0
        self._running[request.order.trajectory] = _Running(generation, request, produced, passes)
        self.rows.append(generation)
        self.metrics.prefilled(len(generation.prompt_ids), 0)
        if not self._instance.num_running:
            self._publish_at = self._now()
        self._instance.take(request)

    def _next_turn(self, trajectory: int, so_far: int) -> Request | None:
        """Return the next request of an answer that called from this server, if its KV is still here."""
        request = self._calling.pop(trajectory, None)
        if request is None:
            return None
        request.receive_result()
        if request.offset != so_far:  # the answer was continued elsewhere meanwhile
            self._instance.forget(request.order.trajectory)
            return None
        return request.resent(request.order)

    def _answer_probe(self, generation: Generation) -> None:
        count = generation.sampling.max_new_tokens
        generation.output_ids += [self._paced.fail_id] * count
        generation.output_logprobs += [LOGPROB] * count
        self._finish(generation, {"type": "length", "length": count})

    def _end(self, ended: Sequence[Request]) -> None:
        for request in ended:
            running = self._remove(request.order.trajectory)
            self._grow(running, request.stops_at)
            if request.calls and (trajectory := trajectory_of(running.generation.rid)) is not None:
                self._calling[trajectory] = request
            self._finish(running.generation, self._reason(running))

    def _reason(self, running: _Running) -> dict[str, Any]:
        generation = running.generation
        if self._is_capped(running):
            return {"type": "length", "length": generation.sampling.max_new_tokens}
        return {"type": "stop", "matched": self._paced.eos_id}

    def _is_capped(self, running: _Running) -> bool:
        return running.request.stops_at == self._answers.cap

    def _remove(self, number: TrajectoryId) -> _Running:
        running = self._running.pop(number)
        self.rows.remove(running.generation)
        return running

    def _cut_off(self, number: TrajectoryId) -> Generation:
        """Remove a request before its end, with the tokens that it has by now."""
        self._grow(self._running[number], self._instance.remove(number).offset)
        return self._remove(number).generation

    def _grow(self, running: _Running, num_tokens: int) -> None:
        """Extend the answer to `num_tokens`, including tokens of earlier attempts."""
        generation, total = running.generation, running.request.stops_at
        have = running.start + len(generation.output_ids)
        generation.output_ids += self._paced.tokens(
            have, num_tokens, total=total, capped=self._is_capped(running), passes=running.passes
        )
        generation.output_logprobs += [LOGPROB] * (num_tokens - have)
        self.metrics.generated_tokens += num_tokens - have
