"""The effects of work commands. Each effect is a callable that takes a command and returns its event.

Invariant: an effect returns exactly one event, also after a failure, and catches only expected errors. A cancelled
effect returns nothing, and the core ignores its attempt.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import structlog

from dora.adapter_files import Proof, read_proof
from dora.controller.batches import build_wave
from dora.controller.evaluations import Evaluations
from dora.controller.fleet import Fleet
from dora.controller.holders import Holders
from dora.controller.lineage import Lineage
from dora.controller.published import Published
from dora.controller.served import Served, ServedAdapters
from dora.controller.trajectories import Trajectories, TrajectoryRecord
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import GroupId, InstanceId, TrajectoryId, VersionId
from dora.core.strategies import Pause
from dora.core.training import Feed
from dora.engine.api import AskedRouting, GenerateRequest, GenerateResult, InferenceEngine, PushStage
from dora.engine.errors import AdapterDisproved, InvalidChoices, RequestRefused, ServerGone
from dora.engine.names import UNCONFIRMED, request_id
from dora.errors import ConfigError, ProtocolError, RemoteError, RunFailed
from dora.journal.rows import answer_bound
from dora.observe.visits import Visits
from dora.tasks.pool import Graded, GraderPool
from dora.tasks.prompts import Prompt, PromptStream
from dora.tasks.rewards import GradeRequest
from dora.tasks.tokenizer import Tokenizer
from dora.transport.messages import MicroBatch
from dora.weights.store import ADAPTER, StoreError

log = structlog.get_logger(__name__)

#: Delay before a failed request is reported, so that the core does not use up `max_attempts` at once.
FAILURE_PAUSE_S = 0.5

Clock = Callable[[], float]
#: The effect of each work command.
Effects = Mapping[type[cmd.Command], Callable[[Any], Awaitable[ev.Event]]]


@dataclass(frozen=True)
class RequestIds:
    """The request ids that one controller uses on the servers."""

    run_id: str
    epoch: int  # of the controller
    unstopped: set[str] = field(default_factory=set, compare=False)  # in flight, and not asked to stop

    def of(self, order: cmd.Generate | cmd.StopRequest) -> str:
        """Return the request id of an attempt."""
        return request_id(self.run_id, epoch=self.epoch, trajectory=order.trajectory, attempt=order.attempt)


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of a run."""

    seed: int  # of the run
    max_new_tokens: int
    temperature: float  # of training
    eos_ids: Sequence[int]
    evaluations: Evaluations  # each held-out set has its own temperature
    has_turns: bool = False  # a stop token ends a turn, which goes to the environment
    max_row_tokens: int | None = None  # bound on all rows together of a forked episode in training

    def request(
        self,
        trajectory: TrajectoryId,
        record: TrajectoryRecord,
        *,
        id: str,
        label: str,
        adapter: str | None = None,
        routing: AskedRouting | None = None,
    ) -> GenerateRequest:
        """Return the request that continues a trajectory from its tokens. `adapter`: None for the server's weights."""
        start = len(record.tokens)
        is_training = trajectory >= 0
        return GenerateRequest(
            id=id,
            tokens=record.context(),
            max_new_tokens=self.turn_bound(trajectory, record) - start,
            temperature=self.temperature if is_training else self.evaluations.locate(trajectory)[0].temperature,
            stop_tokens=self.eos_ids,
            seed=self.seed_of(trajectory, start - record.prompt_end),
            label=label,
            adapter=adapter,
            routing=routing,
        )

    def seed_of(self, trajectory: TrajectoryId, num_tokens: int) -> int:
        """Return the seed of a request that continues a trajectory from `num_tokens` tokens.

        It depends on `num_tokens` because on some servers a resumed request would otherwise repeat its random numbers.
        The samples of a held-out prompt have the same seeds under every version, and in `dora eval`.
        """
        key = trajectory if trajectory >= 0 else self.evaluations.key(trajectory)
        digest = hashlib.blake2b(f"{self.seed} {key} {num_tokens}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def bound(self, trajectory: TrajectoryId, record: TrajectoryRecord) -> int:
        """Return the token budget of an answer."""
        most = self.max_row_tokens if trajectory >= 0 else None
        return answer_bound(
            self.max_new_tokens + record.prompt_end,
            prompt=len(record.prompt.tokens),
            forks=record.forks,
            max_row_tokens=most,
        )

    def turn_bound(self, trajectory: TrajectoryId, record: TrajectoryRecord) -> int:
        """Return the number of tokens of an answer at which its present turn ends."""
        bound = self.bound(trajectory, record)
        return min(bound, record.turn_start + record.turn_tokens) if record.turn_tokens else bound

    def is_over(self, trajectory: TrajectoryId, record: TrajectoryRecord) -> bool:
        """Whether the answer, or its turn, is complete, by a stop token or by the token limit."""
        tokens = record.tokens
        if len(tokens) == record.turn_start:  # the next turn has not begun
            return False
        return tokens[-1] in self.eos_ids or len(tokens) >= self.turn_bound(trajectory, record)


@dataclass(frozen=True)
class StreamAttempt:
    """Effect of Generate: stream one attempt into its record."""

    engine: InferenceEngine
    fleet: Fleet
    trajectories: Trajectories
    published: Published
    served: Served
    sampling: Sampling
    ids: RequestIds
    now: Clock
    on_steps: Callable[[int, int], None]  # tokens, and the steps in which a server with speculative decoding made them

    async def __call__(self, order: cmd.Generate) -> ev.Event:
        trajectory, attempt = order.trajectory, order.attempt
        record = self.trajectories.begin(trajectory, attempt)
        if record.prompt.skipped:
            reason = ev.NoPrompt.NOT_BEGUN if record.prompt.has_not_begun else ev.NoPrompt.TOO_LONG
            return self._failed(order, record, server_gone=False, final=True, reason=reason)
        if self.sampling.has_turns and record.began_at is None:
            record.began_at = self.now()
        start = len(record.tokens)
        if self.sampling.is_over(trajectory, record):
            # An earlier server was lost after the last token and before the final chunk.
            return self._finished(order, record, spans=())
        url = self.fleet.urls.get(order.instance)
        if url is None:
            return self._failed(order, record, server_gone=True, reason=f"instance {order.instance} is down")
        label = self.published.label(order.version)
        adapter = self.served.adapter(order.instance, order.version)
        routing = self.trajectories.asked_routing(record)
        key = self.ids.of(order)
        request = self.sampling.request(trajectory, record, id=key, label=label, adapter=adapter, routing=routing)
        self.ids.unstopped.add(key)
        try:
            async with self.fleet.stream(order.instance):
                if key not in self.ids.unstopped:
                    return ev.GenerationStopped(self.now(), trajectory, attempt, start, ())
                on_tokens = partial(self.trajectories.append, trajectory, attempt)
                result = await self.engine.generate(url, request, on_tokens)
            if result.was_stopped and key in self.ids.unstopped:
                raise ProtocolError(f"{url}: stopped a request without being asked to")
        except InvalidChoices as err:
            raise RunFailed(str(err)) from err
        except ServerGone as err:
            server_gone = not await self._is_as_it_was(order.instance)
            await asyncio.sleep(0.0 if server_gone else FAILURE_PAUSE_S)
            return self._failed(order, record, server_gone=server_gone, reason=str(err))
        except (RequestRefused, ProtocolError) as err:
            is_final = isinstance(err, RequestRefused) and not err.retryable
            await asyncio.sleep(0.0 if is_final else FAILURE_PAUSE_S)
            return self._failed(order, record, server_gone=False, final=is_final, reason=str(err))
        finally:
            self.ids.unstopped.discard(key)
        if result.chosen is not None:
            self.trajectories.choose(
                trajectory,
                attempt,
                result.chosen,
                num_context=len(request.tokens),
                was_reread=result.num_rereads > 0,
            )
        if result.num_steps:
            self.on_steps(result.num_tokens, result.num_steps)
        return self._ended(order, record, result, start=start)

    async def _is_as_it_was(self, instance: InstanceId) -> bool:
        """Whether a server whose stream broke off is healthy and still has weights of this run."""
        label = await self.fleet.inquire(instance)
        return label is not None and self.fleet.is_known(label, instance=instance)

    def _failed(
        self, order: cmd.Generate, record: TrajectoryRecord, *, server_gone: bool, reason: str, final: bool = False
    ) -> ev.Event:
        return ev.GenerationFailed(
            self.now(), order.trajectory, order.attempt, len(record.tokens), server_gone, reason, final
        )

    def _ended(self, order: cmd.Generate, record: TrajectoryRecord, result: GenerateResult, *, start: int) -> ev.Event:
        unconfirmed = sum([b - a for label, a, b in result.spans if label == UNCONFIRMED])
        if unconfirmed:
            reason = f"{unconfirmed} of its tokens were sampled after a push that failed"
            return self._failed(order, record, server_gone=False, reason=reason)
        known = [span for span in result.spans if span[0] != UNCONFIRMED]  # no tokens yet as a push began
        of = partial(self.served.version_of, instance=order.instance, version=order.version)
        spans = tuple([(of(label), start + a, start + b) for label, a, b in known])
        if result.was_stopped and not self.sampling.is_over(order.trajectory, record):
            return ev.GenerationStopped(self.now(), order.trajectory, order.attempt, len(record.tokens), spans)
        return self._finished(order, record, spans=spans)

    def _finished(self, order: cmd.Generate, record: TrajectoryRecord, *, spans: tuple[ev.Span, ...]) -> ev.Event:
        length_capped = record.tokens[-1] not in self.sampling.eos_ids
        if self.sampling.has_turns and len(record.tokens) < self.sampling.bound(order.trajectory, record):
            return ev.CallStarted(self.now(), order.trajectory, order.attempt, len(record.tokens), spans)
        length_capped = length_capped or self.sampling.has_turns  # the budget ends the episode, not only the turn
        record.truncated = "tokens" if length_capped else ""
        return ev.GenerationFinished(
            self.now(), order.trajectory, order.attempt, len(record.tokens), length_capped, spans
        )


@dataclass(frozen=True)
class StopAttempt:
    """Effect of StopRequest: abort a request on its server. The event that follows comes from the request itself."""

    engine: InferenceEngine
    fleet: Fleet
    ids: RequestIds

    async def __call__(self, order: cmd.StopRequest) -> None:
        url = self.fleet.urls.get(order.instance)
        key = self.ids.of(order)
        self.ids.unstopped.discard(key)
        if url is None:
            return
        try:
            await self.engine.stop(url, key)
        except RemoteError as err:  # the request runs to its end
            log.warning("abort_failed", trajectory=order.trajectory, instance=order.instance, reason=str(err))


@dataclass(frozen=True)
class Graders:
    """The grader pools for training and for each held-out set."""

    training: GraderPool | None  # None: only the environment gives rewards
    held_out: Sequence[GraderPool | None]  # by set; the training pool if a set has no rewards of its own
    evaluations: Evaluations

    def of(self, trajectory: TrajectoryId) -> GraderPool | None:
        """Return the pool that grades a trajectory, if any."""
        return self.training if trajectory >= 0 else self.held_out[self.evaluations.set_index(trajectory)]


@dataclass(frozen=True)
class GradeAnswer:
    """Effect of GradeTrajectory: score an answer; a failure has a reason and no reward."""

    trajectories: Trajectories
    tokenizer: Tokenizer
    graders: Graders
    max_new_tokens: int
    fails_truncated: bool  # answers that a budget ended get no reward in training
    now: Clock

    async def __call__(self, order: cmd.GradeTrajectory) -> ev.Event:
        trajectory = order.trajectory
        record = self.trajectories.records[trajectory]
        if self.fails_truncated and record.truncated and trajectory >= 0:
            reason = f"truncated: {record.truncated}"
            return ev.TrajectoryGraded(self.now(), trajectory, order.attempt, None, reason)
        prompt, own = record.prompt, record.prompt_end
        request = GradeRequest(
            prompt=prompt.text or self.tokenizer.decode(record.tokens[:own].tolist(), special_tokens=True),
            response=self.tokenizer.decode(record.tokens[own:].tolist()),
            answer=prompt.answer,
            metadata=prompt.metadata,
            num_tokens=len(record.tokens) - own,
            max_tokens=self.max_new_tokens,
            finish="length" if record.truncated else "stop",
            source=prompt.label,
            turns=self._turns(record) if len(record.observed) > bool(own) else (),
        )
        pool = self.graders.of(trajectory)
        outcome = await pool.grade(request) if pool is not None else Graded(0.0)  # added to the rewards of its turns
        if isinstance(outcome, Graded):
            record.reward, record.terms = sum(record.turn_rewards, outcome.reward), outcome.terms
            record.verdicts = outcome.verdicts
            return ev.TrajectoryGraded(self.now(), trajectory, order.attempt, outcome.reward, judged=outcome.judged)
        return ev.TrajectoryGraded(self.now(), trajectory, order.attempt, None, outcome.reason, judged=outcome.judged)

    def _turns(self, record: TrajectoryRecord) -> list[dict[str, str]]:
        return [
            {"role": role, "text": self.tokenizer.decode(record.tokens[start:end].tolist())}
            for role, start, end in record.parts()
            if start >= record.prompt_end
        ]


@dataclass(frozen=True)
class Push:
    """Effect of PushWeights: load a version into an instance and read it back."""

    engine: InferenceEngine
    fleet: Fleet
    holders: Holders
    published: Published
    live: Pause | None  # how a server with live requests is paused; None: no server with live requests gets a push
    timeout_s: float
    now: Clock
    on_stage: Callable[[InstanceId, PushStage], None] = lambda instance, stage: None

    async def __call__(self, order: cmd.PushWeights) -> ev.Event:
        try:
            url = self.fleet.url(order.instance)
            await self.published.available(order.version)
            folder = await self.holders.folder(order.instance, order.version)
            label = self.published.label(order.version)
            on_stage = partial(self.on_stage, order.instance)
            await self.engine.push(
                url, folder=folder, label=label, timeout_s=self.timeout_s, live=self.live, on_stage=on_stage
            )
        except (RemoteError, StoreError) as err:
            return ev.WeightPushFailed(self.now(), order.instance, order.attempt, str(err))
        return ev.WeightPushFinished(self.now(), order.instance, order.attempt, order.version)


@dataclass(frozen=True)
class LoadAdapter:
    """Effect of PushWeights where versions are adapters: load one beside others, and have it prove itself."""

    engine: InferenceEngine
    fleet: Fleet
    holders: Holders
    published: Published
    served: ServedAdapters
    timeout_s: float
    now: Clock

    async def __call__(self, order: cmd.PushWeights) -> ev.Event:
        name = self.served.name(order.instance, order.attempt, order.version)
        try:
            url = self.fleet.url(order.instance)
            await self.published.available(order.version)
            folder = await self.holders.folder(order.instance, order.version) / ADAPTER
            proof = await _proof(self.holders, order.version)
            await self.engine.load_adapter(url, name=name, folder=folder, proof=proof, timeout_s=self.timeout_s)
        except (RemoteError, StoreError, ConfigError) as err:
            return ev.WeightPushFailed(self.now(), order.instance, order.attempt, str(err))
        self.served.loaded[order.instance, order.version] = name
        return ev.WeightPushFinished(self.now(), order.instance, order.attempt, order.version)


async def _proof(holders: Holders, version: VersionId) -> Proof:
    """Return the proof of a version's adapter; ConfigError or StoreError."""
    return await asyncio.to_thread(read_proof, await holders.own_folder(version) / ADAPTER)


@dataclass(frozen=True)
class UnloadAdapter:
    """Effect of UnloadVersion: have an adapter prove itself once more, unless its load has failed, and unload it."""

    engine: InferenceEngine
    fleet: Fleet
    holders: Holders
    served: ServedAdapters
    timeout_s: float
    now: Clock

    async def __call__(self, order: cmd.UnloadVersion) -> ev.Event:
        name = self.served.name(order.instance, order.load, order.version)
        was_confirmed = self.served.loaded.get((order.instance, order.version)) == name
        try:
            url = self.fleet.url(order.instance)
            proof = await _proof(self.holders, order.version) if was_confirmed else None
            await self.engine.unload_adapter(url, name=name, proof=proof, timeout_s=self.timeout_s)
        except (RemoteError, StoreError, ConfigError) as err:
            disproved = isinstance(err, AdapterDisproved)
            if disproved:
                log.error("adapter_disproved", instance=order.instance, version=order.version, reason=str(err))
                del self.served.loaded[order.instance, order.version]  # the next attempt unloads it as it is
            return ev.VersionUnloadFailed(self.now(), order.instance, order.attempt, str(err), disproved)
        self.served.loaded.pop((order.instance, order.version), None)
        return ev.VersionUnloaded(self.now(), order.instance, order.attempt)


@dataclass(frozen=True)
class Dismiss:
    """Effect of DismissInstance: release an empty instance."""

    fleet: Fleet
    now: Clock

    async def __call__(self, order: cmd.DismissInstance) -> ev.Event:
        await self.fleet.dismiss(order.instance)
        return ev.InstanceRemoved(self.now(), order.instance)


@dataclass(frozen=True)
class Fetch:
    """Effect of FetchPrompts: read prompts in a thread, as some sources compute for a second.

    A skipped prompt has no tokens, and its group fails at its first request.
    """

    stream: PromptStream
    visits: Visits
    trajectories: Trajectories
    now: Clock

    async def __call__(self, order: cmd.FetchPrompts) -> ev.Event:
        prompts, visits = await asyncio.to_thread(self._read, order.first, order.count)
        for prompt in prompts:
            self.trajectories.prompts[GroupId(prompt.position)] = prompt
        lengths = tuple(len(p.tokens) for p in prompts)
        return ev.PromptsArrived(self.now(), order.first, lengths, len(prompts) < order.count, tuple(visits))

    def _read(self, first: int, count: int) -> tuple[list[Prompt], list[ev.Visit]]:
        """Return the prompts and, if rows may be passed over, as many visits."""
        found: list[Prompt] = []
        if self.stream.passes_over:
            visits = self.stream.visit(first, count=count, visits=self.visits)
            return [self.stream.of_visit(first + i, (v.source, v.row)) for i, v in enumerate(visits)], visits
        for position in range(first, first + count):
            prompt = self.stream.at(position)
            if prompt is None:
                break
            found.append(prompt)
        return found, []


class WaveSink(Protocol):
    """The receiver of waves (TrainerLink or RolloutWriter)."""

    def train(self, wave: list[MicroBatch], *, position: int) -> None:
        """Queue a wave, to be sent once the journal is on the disk up to `position`."""


@dataclass(frozen=True)
class SendWave:
    """Effect of TrainMicroBatch: send a wave to the trainer, whose messages lead to the events."""

    feed: Feed
    trajectories: Trajectories
    lineage: Lineage
    trainer: WaveSink
    group_size: int

    def __call__(self, order: cmd.TrainMicroBatch, *, position: int) -> None:
        self.trajectories.forget_recalled(before=order.step)
        groups = {g.id: g for g in self.feed.groups(order.step)}
        wave = build_wave(
            order,
            records=self.trajectories.records,
            groups=groups,
            group_size=self.group_size,
            routing=self.trajectories.routing,
        )
        self.trainer.train(self.lineage.add(wave), position=position)
