"""What the trainer gets and when: committed groups become micro-batches, one per rank and wave.

Invariant: the waves of a step are numbered from 0, each holds one micro-batch for every rank (FSDP2 hangs on unequal
counts), every committed trajectory is in exactly one of them, and the last one is marked once the step is closed.
Waves are kept until a checkpoint covers their step, so that a restarted trainer is fed the very same ones. Called by
decisions.py and the training handlers of state.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from heapq import heapreplace

from dora.core.commands import TrainMicroBatch
from dora.core.groups import Group
from dora.core.ids import TrajectoryId

#: Waves sent ahead of the trainer: the one it works on and the next, so that it never waits for a round trip.
MAX_WAVES_AHEAD = 2


def split_wave(
    sizes: Iterable[tuple[TrajectoryId, int]], *, num_ranks: int, budget: int
) -> tuple[list[list[TrajectoryId]], list[tuple[TrajectoryId, int]]]:
    """One micro-batch per rank, balanced by tokens, and what did not fit.

    Longest first onto the least loaded rank (LPT); a rank takes more than `budget` tokens only as a single trajectory.
    """
    ranks: list[list[TrajectoryId]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]  # a heap
    left: list[tuple[TrajectoryId, int]] = []
    for trajectory, size in sorted(sizes, key=lambda item: (-item[1], item[0])):
        load, rank = loads[0]
        if load and load + size > budget:
            left.append((trajectory, size))
            continue
        ranks[rank].append(trajectory)
        heapreplace(loads, (load + size, rank))
    return ranks, left


class StepFeed:
    """One step's way to the trainer."""

    __slots__ = ("closed", "groups", "num_tokens", "pending", "sent", "slack", "waves")

    def __init__(self) -> None:
        self.groups: list[Group] = []  #: committed, in commit order
        self.pending: deque[tuple[TrajectoryId, int]] = deque()  #: in no wave yet, with their token counts
        self.num_tokens = 0  #: of those pending
        self.closed = False  #: no more groups will come
        self.waves: list[TrainMicroBatch] = []
        self.slack: list[float] = []  #: of each wave: share of the ranks' time that more groups would have filled
        self.sent = 0  #: waves the trainer has been given


class Feed:
    """The trainer's side of the run, as the core sees it."""

    __slots__ = (
        "budget",
        "busy_since",
        "group_size",
        "idle_s",
        "idle_since",
        "num_ranks",
        "open_step",
        "steps",
        "trained",
        "uneven_s",
        "waves_done",
    )

    def __init__(self, *, num_ranks: int, budget: int, group_size: int) -> None:
        self.num_ranks = num_ranks
        self.budget = budget
        self.group_size = group_size
        self.steps: dict[int, StepFeed] = {}  #: by step, back to the last checkpoint
        self.open_step: int | None = None  #: the step the trainer works on or waits for; None until it is ready
        self.trained = 0  #: steps trained so far; during a replay the open step is below it
        self.waves_done = 0  #: of the open step
        self.idle_since: float | None = None  #: since when the trainer has had nothing to do
        self.busy_since = 0.0  #: since when it has worked on the wave at hand
        self.idle_s = 0.0  #: idle time since the last step was trained
        self.uneven_s = 0.0  #: the same for time in which ranks waited for others, since there were too few groups

    def step(self, number: int) -> StepFeed:
        """The feed of a step."""
        if number not in self.steps:
            self.steps[number] = StepFeed()
        return self.steps[number]

    def commit(self, group: Group, *, step: int) -> None:
        """A group has its place in a step."""
        feed = self.step(step)
        feed.groups.append(group)
        for t in group.trajectories:
            if t.reward is not None:
                feed.pending.append((t.id, t.num_prompt_tokens + t.num_tokens))
                feed.num_tokens += t.num_prompt_tokens + t.num_tokens

    def restart(self, step: int) -> None:
        """The trainer (re)starts at `step`: it is given every wave of that step and of those after it."""
        self.open_step = step
        self.waves_done = 0
        for feed in self.steps.values():
            feed.sent = 0

    def checkpointed(self, step: int) -> None:
        """Steps below `step` will never be replayed."""
        for old in [s for s in self.steps if s < step]:
            for group in self.steps.pop(old).groups:
                group.let_go()

    def next_wave(self) -> TrainMicroBatch | None:
        """The next micro-batches to send, if the trainer should have them now."""
        if self.open_step is None or self.open_step not in self.steps:
            return None
        feed = self.steps[self.open_step]
        ahead = feed.sent - self.waves_done
        if ahead >= MAX_WAVES_AHEAD:
            return None
        if feed.sent < len(feed.waves):  # a replay
            feed.sent += 1
            return feed.waves[feed.sent - 1]
        if feed.waves and feed.waves[-1].last:
            return None
        if not feed.closed and (not feed.pending or (ahead and feed.num_tokens < self.num_ranks * self.budget)):
            return None  # a full wave may be sent ahead; less only to an idle trainer
        wave = self._cut_wave(feed, step=self.open_step)
        feed.waves.append(wave)
        feed.sent += 1
        return wave

    def _cut_wave(self, feed: StepFeed, *, step: int) -> TrainMicroBatch:
        """The next wave, of the trajectories committed first."""
        taken: list[tuple[TrajectoryId, int]] = []
        before = feed.num_tokens
        while feed.pending and before - feed.num_tokens < self.num_ranks * self.budget:
            taken.append(feed.pending.popleft())
            feed.num_tokens -= taken[-1][1]
        ranks, left = split_wave(taken, num_ranks=self.num_ranks, budget=self.budget)
        is_full = before - feed.num_tokens >= self.num_ranks * self.budget
        feed.slack.append(0.0 if is_full or feed.closed else self._slack(ranks, sizes=dict(taken)))
        feed.pending.extendleft(sorted(left, reverse=True))
        feed.num_tokens += sum(size for _, size in left)
        return TrainMicroBatch(
            step=step,
            index=len(feed.waves),
            last=feed.closed and not feed.pending,
            ranks=tuple(tuple(sorted(r)) for r in ranks),
        )

    def _slack(self, ranks: list[list[TrajectoryId]], *, sizes: dict[TrajectoryId, int]) -> float:
        """Share of their time for which the ranks wait for the fullest one."""
        loads = [sum(sizes[t] for t in rank) for rank in ranks]
        return 1 - sum(loads) / (len(loads) * max(loads))
