"""A workload with the lengths, latencies and rates that the journal of a finished run shows.

The measurements are: lengths and rewards of complete groups, and the calls of their answers; the times of decoding,
prefill and the round trip, fitted to the duration of every undisturbed first request (non-negative least squares over
its tokens, the mean number of residents and the tokens prefilled meanwhile); grading, as a queue for the run's graders;
pushes, or loads of adapters, of which a server may have several at a time; publications and updates; and the trainer's
tokens per second. They include anything that slowed the run down, such as other processes on its cores.

The prompt of an episode is the longest of its group. As siblings share it, it is the group's but for its last token,
which is the result of the first call. What forks repeat is not read again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappush, heapreplace
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Final, NamedTuple

import msgspec
import numpy as np

from dora.config.load import read_toml
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.decode_time import DecodeTime
from dora.core.ids import InstanceId, TrajectoryId
from dora.core.orchestration import named
from dora.core.strategies import Settings, strategy_of
from dora.errors import ConfigError
from dora.journal.reader import Journal
from dora.journal.run_folder import RunFolder
from dora.sim.fitting import nonnegative_fit
from dora.sim.server import SimulatedServer
from dora.sim.tools import Call
from dora.sim.workload import (
    AdapterModel,
    FleetModel,
    GradingModel,
    JobModel,
    LengthModel,
    TrainerModel,
    Workload,
    checked,
)

#: A rate high enough to make a time negligible.
_AT_ONCE: Final = 1e18


class Timed(NamedTuple):
    """One undisturbed request, the first of its answer."""

    tokens: int
    batch: float  #: mean number of residents on its instance, itself included
    read: int  #: tokens that the instance prefilled meanwhile, its own prompt included; a prefill halts the batch
    seconds: float


@dataclass(slots=True)
class _Batch:
    """The requests on an instance, and its work so far."""

    groups: Counter[int] = field(default_factory=Counter)  #: siblings that share a prompt in KV
    integral: float = 0.0  #: number of residents, integrated over time
    read: int = 0  #: tokens prefilled
    at: float = 0.0

    def _reach(self, at: float) -> None:
        self.integral += self.groups.total() * (at - self.at)
        self.at = at

    def join(self, group: int, *, prompt: int, produced: int, at: float) -> tuple[float, int]:
        """Add a request; return the integral and the number of tokens read before."""
        self._reach(at)
        before = self.integral, self.read
        self.read += produced + (0 if self.groups[group] else prompt)
        self.groups[group] += 1
        return before

    def leave(self, group: int, *, at: float) -> None:
        """Remove a request."""
        self._reach(at)
        self.groups[group] -= 1


@dataclass(slots=True)
class RecordedRun:
    """The measurements of a run."""

    settings: Settings
    max_episodes: int
    prompts: dict[int, int] = field(default_factory=dict)
    lengths: dict[TrajectoryId, int] = field(default_factory=dict)
    rewards: dict[TrajectoryId, float] = field(default_factory=dict)
    calls: dict[TrajectoryId, list[Call]] = field(default_factory=dict)
    begun: dict[TrajectoryId, Call] = field(default_factory=dict)  #: the call that gave an answer its own prompt
    servers: dict[InstanceId, ev.InstanceUp] = field(default_factory=dict)
    requests: list[Timed] = field(default_factory=list)
    graders: int = 1
    grading_s: list[float] = field(default_factory=list)  #: time of one grader for one answer, without queueing
    push_s: list[float] = field(default_factory=list)
    publish_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)
    trained: list[float] = field(default_factory=list)  #: time at which each step was trained
    wave_tokens: int = 0  #: tokens of the fullest rank, summed over micro-batches
    wave_s: float = 0.0
    num_bytes: int = 0

    def prompt_of(self, id: TrajectoryId) -> int:
        """Return the tokens of an answer's own prompt."""
        return self.begun[id].num_tokens if id in self.begun else 0

    def length_of(self, id: TrajectoryId) -> int:
        """Return the tokens of an answer, and the last one of its own prompt, also if none was given."""
        return max(self.lengths[id] - max(0, self.prompt_of(id) - 1), int(id in self.begun))

    def calls_of(self, id: TrajectoryId) -> tuple[Call, ...]:
        """Return the calls of an answer, the one that begins it included."""
        before = max(0, self.prompt_of(id) - 1)
        calls = [call._replace(at=call.at - before) for call in self.calls.get(id, ())]
        return (self.begun[id]._replace(num_tokens=1), *calls) if id in self.begun else tuple(calls)


class _Reader:
    """One pass over the journal, which matches each command with the event that answers it."""

    def __init__(self, settings: Settings, *, graders: int) -> None:
        self.record = RecordedRun(settings, settings.max_episodes, graders=graders)
        self._graders: list[float] = []  # a heap of the times since which each that had an answer is free
        self._batches: dict[InstanceId, _Batch] = {}
        self._running: dict[TrajectoryId, tuple[cmd.Generate, float, float, int]] = {}  # order, since, `_Batch.join`
        self._calling: dict[TrajectoryId, tuple[int, float]] = {}  # attempt, since
        self._turns: dict[TrajectoryId, tuple[InstanceId | None, int]] = {}  # who has the KV of how many tokens
        self._turn_rewards: dict[TrajectoryId, list[float]] = {}
        self._grading: dict[TrajectoryId, float] = {}
        self._pushing: dict[tuple[InstanceId, int], float] = {}  # by attempt
        self._waves: dict[tuple[int, int], tuple[float, cmd.TrainMicroBatch]] = {}
        self._free_at = 0.0  # when the trainer last finished its work
        self._trained_at = 0.0

    def read(self, entries: Iterable[tuple[ev.Event, Sequence[cmd.Command]]]) -> RecordedRun:
        for event, commands in entries:
            self._on_event(event)
            for command in commands:
                self._on_command(command, at=event.at)
        return self.record

    def _on_event(self, event: ev.Event) -> None:
        record = self.record
        match event:
            case ev.PromptsArrived():
                record.prompts.update((event.first + i, n) for i, n in enumerate(event.num_prompt_tokens))
            case ev.InstanceUp():
                record.servers[event.instance] = event
            case ev.InstanceRemoved():
                record.servers.pop(event.instance, None)
            case ev.GenerationFinished() | ev.GenerationStopped() | ev.GenerationFailed() | ev.CallStarted():
                self._end_request(event)
            case ev.CallFinished():
                self._end_call(event)
            case ev.InstanceLost():
                for id in [t for t, (order, *_) in self._running.items() if order.instance == event.instance]:
                    del self._running[id]
                self._batches.pop(event.instance, None)
                for push in [push for push in self._pushing if push[0] == event.instance]:
                    del self._pushing[push]
                for id in [t for t, (instance, _) in self._turns.items() if instance == event.instance]:
                    self._turns[id] = None, self._turns[id][1]
            case ev.ControllerRestarted():
                waited = (self._running, self._batches, self._calling, self._grading, self._pushing, self._waves)
                for under_way in waited:
                    under_way.clear()  # their ends are not in the journal
                record.servers.clear()  # those that are still there come up again
                record.max_episodes = event.max_episodes
            case ev.TrajectoryGraded() if event.trajectory in self._grading:
                free_at = 0.0
                if len(self._graders) < record.graders:
                    heappush(self._graders, event.at)
                else:
                    free_at = heapreplace(self._graders, event.at)
                record.grading_s.append(event.at - max(self._grading.pop(event.trajectory), free_at))
                self._reward(event.trajectory, math.nan if event.reward is None else event.reward)
            case ev.WeightPushFinished() if (event.instance, event.attempt) in self._pushing:
                record.push_s.append(event.at - self._pushing.pop((event.instance, event.attempt)))
            case ev.WeightPushFailed():
                self._pushing.pop((event.instance, event.attempt), None)
            case ev.MicroBatchTrained() | ev.StepTrained() | ev.VersionPublished():
                self._on_training(event)
            case _:
                pass

    def _end_request(
        self, event: ev.GenerationFinished | ev.GenerationStopped | ev.GenerationFailed | ev.CallStarted
    ) -> None:
        id, record = event.trajectory, self.record
        if id not in self._running or self._running[id][0].attempt != event.attempt:
            return
        order, since, integral, read = self._running.pop(id)
        batch = self._batches[order.instance]
        batch.leave(id // record.settings.group_size, at=event.at)
        if isinstance(event, ev.CallStarted):
            self._turns[id] = order.instance, event.num_tokens
        elif isinstance(event, ev.GenerationFinished) and id >= 0:
            record.lengths[id] = event.num_tokens
        else:
            return
        span, begun = event.at - since, record.prompt_of(id)
        if id >= 0 and order.num_tokens == begun and span > 0:
            beside = (batch.integral - integral) / span
            record.requests.append(Timed(event.num_tokens - begun, beside, batch.read - read, span))

    def _end_call(self, event: ev.CallFinished) -> None:
        id, record = event.trajectory, self.record
        attempt, since = self._calling.get(id, (None, 0.0))
        if attempt != event.attempt:
            return
        del self._calling[id]
        if id not in self._turns and record.settings.own_prompts:
            record.begun[id] = Call(0, event.at - since, event.num_tokens)
        else:
            before = self._turns[id][1]
            record.calls.setdefault(id, []).append(Call(before, event.at - since, event.num_tokens - before))
            self._turn_rewards.setdefault(id, []).append(event.reward)
        if (event.ended or event.failed) and id >= 0:
            record.lengths[id] = event.num_tokens
        if event.graded or event.failed:
            self._reward(id, math.nan if event.failed else 0.0)

    def _reward(self, id: TrajectoryId, reward: float) -> None:
        if id >= 0:
            self.record.rewards[id] = sum(self._turn_rewards.get(id, ()), reward)

    def _on_training(self, event: ev.MicroBatchTrained | ev.StepTrained | ev.VersionPublished) -> None:
        record = self.record
        if isinstance(event, ev.MicroBatchTrained):
            sent, wave = self._waves.pop((event.step, event.index))
            if wave.last or not wave.closes:  # otherwise its time includes an optimizer update
                record.wave_tokens += max(sum(map(self._size, rank)) for rank in wave.ranks)
                record.wave_s += event.at - max(sent, self._free_at)
            self._free_at = event.at
        elif isinstance(event, ev.StepTrained):
            record.update_s.append(event.at - self._free_at)
            self._free_at = self._trained_at = event.at
            if event.step == len(record.trained):  # else a replay
                record.trained.append(event.at)
        elif event.version:
            record.publish_s.append(max(0.0, event.at - self._trained_at))
            record.num_bytes = event.num_bytes

    def _size(self, id: TrajectoryId) -> int:
        return self.record.prompts[id // self.record.settings.group_size] + self.record.lengths[id]

    def _on_command(self, command: cmd.Command, *, at: float) -> None:
        match command:
            case cmd.Generate():
                batch = self._batches.setdefault(command.instance, _Batch(at=at))
                group = command.trajectory // self.record.settings.group_size
                prompt = self.record.prompts.get(group, 0)  # an evaluation's is not counted
                instance, read = self._turns.get(command.trajectory, (None, 0))
                if instance == command.instance:  # it has the KV
                    joined = batch.join(group, prompt=0, produced=command.num_tokens - read, at=at)
                else:
                    own = max(0, self.record.prompt_of(command.trajectory) - 1)  # siblings share it
                    joined = batch.join(group, prompt=prompt + own, produced=command.num_tokens - own, at=at)
                self._running[command.trajectory] = (command, at, *joined)
            case cmd.CallEnvironment():
                self._calling[command.trajectory] = command.attempt, at
            case cmd.GradeTrajectory():
                self._grading[command.trajectory] = at
            case cmd.PushWeights():
                self._pushing[command.instance, command.attempt] = at
            case cmd.TrainMicroBatch():
                self._waves[command.step, command.index] = (at, command)
            case _:
                pass


class _Task(msgspec.Struct):
    graders: Annotated[int, msgspec.Meta(ge=1)] = 1


class _Config(msgspec.Struct):
    """What is needed of the configuration of a run."""

    task: _Task = msgspec.field(default_factory=_Task)


def read_run(folder: Path) -> tuple[Workload, RecordedRun]:
    """Return the workload of a finished run, and its measurements."""
    run = RunFolder.open(folder)
    journal = Journal(run.journal)
    try:
        config = msgspec.convert(read_toml(run.config), _Config)
    except msgspec.ValidationError as err:
        raise ConfigError(f"{run.config}: {err}") from err
    try:
        record = _Reader(journal.header.settings, graders=config.task.graders).read(journal)
        if len(record.trained) < 2 or not record.requests:
            raise ConfigError(f"{folder}: has trained {len(record.trained)} steps; a simulation needs at least 2")
        return checked(_workload(record), origin=str(folder)), record
    except (LookupError, ValueError, ArithmeticError) as err:
        raise ConfigError(f"{run.journal}: has events that no run can have ({type(err).__name__}: {err})") from err


def _workload(record: RecordedRun) -> Workload:
    settings, size = record.settings, record.settings.group_size
    rules = named(settings.orchestration)
    groups = sorted({t // size for t in record.lengths})
    whole = [g for g in groups if all(TrajectoryId(g * size + i) in record.rewards for i in range(size))]
    if not whole:
        raise ConfigError("--from: no group of the run has a reward or a failure for each of its answers")
    ids = [[TrajectoryId(g * size + i) for i in range(size)] for g in whole]
    own = [max(record.prompt_of(t) for t in row) for row in ids]
    prompts = tuple(record.prompts[g] + max(0, tokens - 1) for g, tokens in zip(whole, own, strict=True))
    return Workload(
        job=JobModel(
            strategy=strategy_of(settings.rules),
            max_staleness=settings.rules.max_staleness,
            pause=settings.rules.in_flight or JobModel().pause,
            oversample=settings.rules.oversample if settings.rules.oversample > 1 else JobModel().oversample,
            steps=settings.steps,
            groups_per_step=settings.groups_per_step,
            group_size=size,
            filter_zero_variance=settings.filter_zero_variance,
            max_top_up=settings.max_top_up,
            rules=rules.rules,
            without=rules.without,
            refill=rules.refill,
            calls=rules.calls,
            max_episodes=record.max_episodes,
        ),
        lengths=LengthModel(
            regime="recorded",
            cap=0 if record.begun else settings.max_new_tokens,
            prompt_tokens=max(prompts),
            prompts=prompts,
            answers=tuple(tuple(map(record.length_of, row)) for row in ids),
            rewards=tuple(tuple(record.rewards[t] for t in row) for row in ids),
            calls=tuple(tuple(map(record.calls_of, row)) for row in ids) if record.calls or record.begun else (),
        ),
        fleet=_fleet(record),
        adapters=_adapters(record),
        train=TrainerModel(
            tokens_s_per_device=record.wave_tokens / max(record.wave_s, 1e-9),
            updates=settings.updates,
            update_s=fmean(record.update_s[1:] or record.update_s),  # the first one allocates the optimizer's memory
            micro_batch_tokens=settings.micro_batch_tokens,
            publish_bytes_s=record.num_bytes / max(1e-9, median(record.publish_s or [0.0])),
        ),
        grade=_grade(record),
    )


def _grade(record: RecordedRun) -> GradingModel:
    """Fit a log-normal to the measured mean and deviation, which determine the length of a queue."""
    if not record.grading_s:  # environments gave all rewards
        return GradingModel(median_s=0.0)
    mean_s = fmean(record.grading_s)
    variance = fmean([(seconds - mean_s) ** 2 for seconds in record.grading_s])
    sigma = math.sqrt(math.log1p(variance / mean_s**2))
    return GradingModel(
        median_s=mean_s * math.exp(-(sigma**2) / 2), sigma=sigma, workers=min(record.graders, len(record.grading_s))
    )


def _adapters(record: RecordedRun) -> AdapterModel:
    """Return how adapters were served, if they were; what they cost is in the measured times of decoding."""
    if not record.settings.adapters:
        return AdapterModel()
    return AdapterModel(use="served", throughput=1.0, load_s=fmean(record.push_s))


def _fleet(record: RecordedRun) -> FleetModel:
    servers = list(record.servers.values())
    decode, prefill_s, answer_s = fit_times(record.requests)
    return FleetModel(
        devices=len(servers) + record.settings.num_ranks,
        rollout_devices=len(servers),
        time_shared=False,
        widths=(1,),
        server=SimulatedServer(
            slots=min(s.slots for s in servers),
            kv_tokens=min(s.kv_tokens for s in servers),
            decode=decode,
            prefill_s_per_token=prefill_s,
        ),
        weight_bytes=float(record.num_bytes),
        push_fixed_s=fmean(record.push_s),
        push_bytes_s=_AT_ONCE,
        store_bytes_s=_AT_ONCE,
        answer_s=answer_s,
        report_s=1.0,
    )


def fit_times(requests: Sequence[Timed]) -> tuple[DecodeTime, float, float]:
    """Fit seconds = tokens · (base + per_request · batch) + read · prefill + rest; return decoding, prefill per token
    and rest.

    All requests have the same weight. Of all subsets of the terms, the best fit without a negative coefficient is used.
    """
    tokens, batch, read, seconds = np.array(requests, dtype=np.float64).T
    terms = np.stack([tokens, tokens * batch, read, np.ones(len(tokens))], axis=1)
    base_s, per_request_s, prefill_s, answer_s = nonnegative_fit(terms, seconds).tolist()
    return DecodeTime(base_s=base_s, per_request_s=per_request_s, per_token_s=0.0), prefill_s, answer_s
