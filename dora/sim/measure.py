"""The counts of a simulation, and its result over the steady state (`limit.window`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, zip_longest
from statistics import fmean, stdev

import msgspec

from dora.core.state import State
from dora.errors import InvariantViolation
from dora.sim.answers import Answers
from dora.sim.instance import SimulatedInstance
from dora.sim.limit import Limit, alone_s, window
from dora.sim.server import Request, Use
from dora.sim.workload import AdapterUse, Workload


@dataclass(slots=True)
class SimulatedCounts:
    """All counts at the moment when a step was trained; those before `at` are kept up to date in between."""

    tokens: int = 0
    busy_s: float = 0.0
    unbalanced_s: float = 0.0
    dropped: int = 0  #: groups filtered or failed
    discarded: int = 0  #: groups that were over-sampled
    answers: int = 0
    at: float = 0.0
    migrations: int = 0
    pushes: int = 0
    evictions: int = 0
    recovered: int = 0
    mixed: int = 0
    use: Use = field(default_factory=Use)
    slots_s: float = 0.0
    called_s: float = 0.0  #: slot-seconds during calls, sampled once a second


class Measure:
    """Running counts of one simulation."""

    def __init__(self, workload: Workload, instances: list[SimulatedInstance]) -> None:
        self.workload = workload
        self.counts = SimulatedCounts()
        self.marks: list[SimulatedCounts] = []  #: by step
        self.staleness: dict[int, list[int]] = {}  #: by step: groups committed at staleness i
        self.trained = [0, 0]  #: answers of committed groups, and their tokens
        self.thrown_away = [0, 0]  #: answers of discarded groups, and their tokens at full length
        self._instances = instances
        self._published: list[float] = []
        self._last_answer: dict[int, tuple[float, Request]] = {}  # by version: when it ended
        self._last_reward: dict[int, float] = {}  # by version

    def published(self, version: int, *, at: float) -> None:
        """Record that a version can be pushed."""
        assert version == len(self._published)
        self._published.append(at)

    def answered(self, request: Request, *, at: float) -> None:
        """Record that an answer is complete."""
        self._last_answer[request.order.version] = at, request
        self.counts.answers += 1

    def graded(self, version: int, *, at: float) -> None:
        """Record that an answer of this version will be graded at `at`."""
        self._last_reward[version] = max(at, self._last_reward.get(version, 0.0))

    def calls_hold(self, num_slots: int, *, seconds: float) -> None:
        """Record that answers held slots during their calls for the last `seconds`."""
        self.counts.called_s += num_slots * seconds

    def committed(self, step: int, *, staleness: int, lengths: Sequence[int]) -> None:
        """Record that a group was committed to a step."""
        counts = self.staleness.setdefault(step, [0] * (self.workload.rules.max_staleness + 1))
        counts += [0] * (staleness + 1 - len(counts))
        counts[staleness] += 1
        _add(self.trained, lengths)

    def discarded(self, lengths: Sequence[int]) -> None:
        """Record that a group was discarded."""
        self.counts.discarded += 1
        _add(self.thrown_away, lengths)

    def trained_wave(self, *, num_tokens: int, busy_s: float, unbalanced_s: float) -> None:
        """Record that a wave was sent to the trainer."""
        self.counts.tokens += num_tokens
        self.counts.busy_s += busy_s
        self.counts.unbalanced_s += unbalanced_s

    def step_trained(self, step: int, *, at: float, state: State) -> None:
        """Record that a step was trained."""
        assert step == len(self.marks)
        use = Use()
        for instance in self._instances:
            use = use.plus(instance.use)
        self.marks.append(
            replace(
                self.counts,
                at=at,
                migrations=state.counters.migrations,
                pushes=state.num_pushed,
                evictions=sum(i.evictions for i in self._instances),
                recovered=state.counters.recovered,
                mixed=state.counters.version_conflicts,
                use=use,
                slots_s=sum(i.slots_s() for i in self._instances) + self.counts.called_s,
            )
        )

    def result(self, *, seed: int, limit: Limit, state: State, num_events: int) -> Result:
        """Return the result over the steady state. Raise InvariantViolation if it beats its limit."""
        first, last = self.window()
        self._require_possible(limit)
        a, b = self.marks[first], self.marks[last]
        steps, span = last - first, b.at - a.at
        use = b.use.plus(a.use, sign=-1)
        fleet_s = sum(getattr(use, name) for name in Use.__slots__) or math.inf  # 0 if all of it is within one push
        slots_s = fleet_s * self.workload.fleet.server.slots
        shares = {name.removesuffix("_s"): getattr(use, name) / fleet_s for name in Use.__slots__}
        by_step = (self.staleness[s] for s in range(first + 1, last + 1))
        counts = [sum(n) for n in zip_longest(*by_step, fillvalue=0)]
        groups = sum(counts)
        slowest = [self._last_answer[v][0] - self._published[v] for v in range(first, last) if v in self._last_answer]
        discarded = b.discarded - a.discarded
        job, fleet = self.workload.job, self.workload.fleet
        return Result(
            strategy=job.strategy,
            rules=" - ".join((job.rules, *job.without)),
            adapters=self.workload.adapters.use,
            max_staleness=self.workload.rules.max_staleness,
            regime=self.workload.lengths.regime,
            devices=fleet.devices,
            rollout_devices=fleet.devices if self.workload.is_shared else fleet.rollout_devices,
            instances=len(self._instances),
            seed=seed,
            steps=steps,
            step_s=span / steps,
            tokens_s=(b.tokens - a.tokens) / span,
            limit=limit,
            ratio=span / steps / limit.step_s,
            instance_shares=shares,
            slot_load=(b.slots_s - a.slots_s) / slots_s,
            tool_load=(b.called_s - a.called_s) / slots_s,
            trainer_idle=max(0.0, 1 - (b.busy_s - a.busy_s) / span),  # the sum of busy times is rounded
            trainer_unbalanced=(b.unbalanced_s - a.unbalanced_s) / span,
            staleness=tuple(counts),
            staleness_mean=sum(i * n for i, n in enumerate(counts)) / groups,
            staleness_max=max(i for i, n in enumerate(counts) if n),
            slowest_run_s=sum(slowest) / len(slowest) if slowest else 0.0,
            tail=self._tail(seed=seed),
            migrations=(b.migrations - a.migrations) / steps,
            evictions=(b.evictions - a.evictions) / steps,
            recovered=b.recovered - a.recovered,
            dropped=(b.dropped - a.dropped) / steps,
            mixed_share=(b.mixed - a.mixed) / max(1, b.answers - a.answers),
            discarded_share=discarded / (discarded + groups),
            beyond_share=sum(counts[self.workload.rules.max_staleness + 1 :]) / groups,
            length_bias=self._length_bias(),
            violations=_violations(state),
            events=num_events,
            step_error_s=self._step_error_s(),
            pushes=(b.pushes - a.pushes) / steps,
            push_limit=state.push_limit.limit,
        )

    def _step_error_s(self) -> float:
        first, last = self.window()
        steps = [b.at - a.at for a, b in pairwise(self.marks[first : last + 1])]
        return stdev(steps) / math.sqrt(len(steps)) if len(steps) > 1 else 0.0

    def _length_bias(self) -> float:
        """Return the mean trained length over the mean admitted length; discarded groups count at full length."""
        answers, tokens = (x + y for x, y in zip(self.trained, self.thrown_away, strict=True))
        return self.trained[1] * answers / (self.trained[0] * tokens)

    def window(self) -> tuple[int, int]:
        """Return the steps (first, last] that are measured."""
        return window(len(self.marks), max_staleness=self.workload.rules.max_staleness)

    def _require_possible(self, limit: Limit) -> None:
        """Raise InvariantViolation if the measured steps beat the limit of their blocks by more than their edges.

        By rule F no group of block s is admitted before step s - K - 1 is trained, and each is trained with step s + K
        at the latest. So the measured blocks are decoded and trained within the measured steps and K more on both
        sides, whose time is the tolerance: none if K = 0. A reward may arrive earlier than after the median time, by at
        most that time in a step. If many blocks with a long answer follow each other, up to 2 K + 1 of these are
        decoded during one step, instead of the K + 1 of an even stream. Strategies that break C2 or C3, and failed
        groups, train other groups than those of the blocks.
        """
        rules, grade = self.workload.rules, self.workload.grade
        if not rules.bounded or rules.discards or self.workload.grading_fails:
            return
        (first, last), k = self.window(), rules.max_staleness
        begin = self.marks[first - k].at if first >= k else 0.0
        end = self.marks[min(last + k, len(self.marks) - 1)].at
        step_s = limit.step_s * (k + 1) / (2 * k + 1) if limit.rule == "slowest" else limit.step_s
        least = (last - first) * (step_s - grade.median_s)
        if end - begin < least * (1 - 1e-9):
            raise InvariantViolation(f"{last - first} steps took {end - begin:g} s; their limit is {least:g} s")

    def _tail(self, *, seed: int) -> Tail | None:
        """Return where the time of the measured versions goes; None if answers go on under newer versions, or are
        discarded, or if there are fewer than K + 1 steps."""
        rules, (first, last) = self.workload.rules, self.window()
        if rules.in_flight is not None or rules.discards:
            return None
        answers = self.workload.answers(seed=seed)
        versions = [v for v in range(first + 1, last + 1 - rules.max_staleness) if v in self._last_answer]
        rows = [self._tail_of(v, answers=answers) for v in versions]
        return Tail(*map(fmean, zip(*rows, strict=True))) if rows else None

    def _tail_of(self, version: int, *, answers: Answers) -> tuple[float, ...]:
        ended, request = self._last_answer[version]
        number, sibling = divmod(request.order.trajectory, self.workload.job.group_size)
        group = answers.group(number)
        own_s = alone_s(group, sibling, server=self.workload.server)
        called_s = sum(call.latency_s for call in group.calls_of(sibling))
        published, push_s = self._published[version], self.workload.push_s
        batch_s = request.ran_s + called_s - own_s
        graded = max(ended, self._last_reward[version])
        after = self._published[version + self.workload.rules.max_staleness + 1]
        return own_s, batch_s, ended - published - push_s - own_s - batch_s, push_s, graded - ended, after - graded


def _add(sums: list[int], lengths: Sequence[int]) -> None:
    sums[0] += len(lengths)
    sums[1] += sum(lengths)


def _violations(state: State) -> int:
    """Return the number of violations of the constraints that the strategy keeps."""
    counters = state.counters
    counts = {
        "C1": counters.version_conflicts,
        "C2": counters.scheduling_aborts,
        "C3": counters.staleness_violations,
    }
    return sum(n for name, n in counts.items() if name not in state.settings.rules.broken_by_design)


class Tail(msgspec.Struct, frozen=True):
    """Where the time goes between the publications of a version and of the version K + 1 later: seconds of the
    version's last answer, means over the versions of the measured steps."""

    alone_s: float  #: time of the answer alone, at batch 1, with its tool calls
    batch_s: float  #: additional time in the batches that it shared
    queue_s: float  #: until its prompt was admitted and it had a slot, and whenever it was stopped or evicted
    push_s: float  #: the push to its server
    grade_s: float  #: until the version's last reward
    train_s: float  #: from that reward on: remaining micro-batches and updates, and the publication


class Result(msgspec.Struct, frozen=True):
    """The steady state of one simulation. Migrations, evictions and dropped groups are per step."""

    strategy: str
    rules: str  #: placement rules: `dora` or `paper`, and those turned off
    max_staleness: int
    regime: str
    devices: int
    rollout_devices: int
    instances: int
    seed: int
    steps: int  #: measured
    step_s: float
    tokens_s: float  #: consumed: prompts and answers trained
    limit: Limit
    ratio: float  #: step_s over the strategy's own limit
    instance_shares: dict[str, float]  #: of the fleet's time, see server.Use
    slot_load: float  #: share of all slots and time in which an answer holds one
    tool_load: float  #: the part of `slot_load` in which a call is under way; calls that hold no slot are not in it
    trainer_idle: float  #: share of time without work
    trainer_unbalanced: float  #: share of time in which the average rank waits for the fullest
    staleness: tuple[int, ...]
    staleness_mean: float
    staleness_max: int
    slowest_run_s: float  #: L_run: from the publication of a version to its last answer
    tail: Tail | None  #: of `slowest_run_s` and what follows; None where versions mix or groups are discarded
    migrations: float
    evictions: float
    recovered: int
    dropped: float
    mixed_share: float  #: share of answers with tokens of a version other than their tag (C1)
    discarded_share: float  #: share of groups that are discarded because their step is full (C2)
    beyond_share: float  #: share of groups trained more than K steps after their tag (C3)
    length_bias: float  #: mean length trained over mean length generated, whole job; 1 unless something is discarded
    violations: int  #: of the constraints that the strategy keeps; the shares above count those it breaks by design
    events: int
    step_error_s: float = 0.0  #: standard error of `step_s`, if the measured steps were independent
    pushes: float = 0.0  #: per step
    push_limit: int = 0  #: number of pushes at once that the run has learned by its end
    adapters: AdapterUse = "none"
