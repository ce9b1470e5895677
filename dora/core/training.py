"""What the trainer gets and when: committed groups become micro-batches, one per rank and wave.

Invariant: the waves of a step are numbered from 0, each holds one micro-batch for every rank (FSDP2 hangs on unequal
counts), every committed trajectory is in exactly one of them, and the last one is marked once the step is closed.
Waves are kept back to the oldest checkpoint that is kept, so that a trainer restarted from any of them is fed the very
same ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapreplace

from dora.core.commands import TrainMicroBatch
from dora.core.ids import StepId, TrajectoryId
from dora.core.tables import Group

#: Waves sent ahead of the trainer: the one it works on and the next, so that it never waits for a round trip.
MAX_WAVES_AHEAD = 2
#: Checkpoints kept, newest first. The second one serves where the first turns out to be damaged.
KEPT_CHECKPOINTS = 2


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


@dataclass(slots=True, eq=False, repr=False)
class StepFeed:
    """One step's way to the trainer."""

    groups: list[Group] = field(default_factory=list)  #: committed, in commit order
    pending: deque[tuple[TrajectoryId, int]] = field(default_factory=deque)  #: in no wave yet, with token counts
    num_tokens: int = 0  #: of those pending
    closed: bool = False  #: no more groups will come
    waves: list[TrainMicroBatch] = field(default_factory=list)
    slack: list[float] = field(default_factory=list)  #: of each wave: share of the ranks' time that groups were missing
    sent: int = 0  #: waves the trainer has been given


@dataclass(slots=True, eq=False, repr=False)
class Feed:
    """The trainer's side of the run, as the core sees it."""

    num_ranks: int
    budget: int  #: tokens of one rank's micro-batch
    steps: dict[StepId, StepFeed] = field(default_factory=dict)  #: by step, back to the oldest checkpoint kept
    #: Folder by step; the start counts as one, which needs no folder.
    checkpoints: dict[StepId, str] = field(default_factory=lambda: {StepId(0): ""})
    open_step: StepId | None = None  #: the step the trainer works on or waits for; None until it is ready
    trained: StepId = field(default=StepId(0))  #: steps trained so far; during a replay the open step is below it
    waves_done: int = 0  #: of the open step
    idle_since: float | None = None  #: since when the trainer has had nothing to do; None while it works
    busy_since: float = 0.0  #: since when it has worked on the wave at hand
    idle_s: float = 0.0  #: idle time since the last step was trained
    uneven_s: float = 0.0  #: the same for time in which ranks waited for others, since there were too few groups

    def groups(self, step: StepId) -> Sequence[Group]:
        """Groups committed to a step, in that order; none if it has none, or will never be replayed."""
        feed = self.steps.get(step)
        return feed.groups if feed is not None else ()

    def commit(self, group: Group, *, step: StepId) -> None:
        """A group has its place in a step."""
        feed = self.steps.setdefault(step, StepFeed())
        feed.groups.append(group)
        for t in group.trajectories:
            if t.reward is not None:
                feed.pending.append((t.id, t.num_prompt_tokens + t.num_tokens))
                feed.num_tokens += t.num_prompt_tokens + t.num_tokens

    def restart(self, step: StepId) -> None:
        """The trainer (re)starts at `step`: it is given every wave of that step and of those after it."""
        self.open_step = step
        self.waves_done = 0
        for feed in self.steps.values():
            feed.sent = 0

    def checkpointed(self, step: StepId, folder: str) -> list[tuple[StepId, str]]:
        """The trainer can be resumed at `step`; returns the checkpoints that nothing needs now, as (step, folder).

        Steps below the oldest one kept will never be replayed.
        """
        self.checkpoints[step] = folder
        dropped = [(s, self.checkpoints.pop(s)) for s in sorted(self.checkpoints)[:-KEPT_CHECKPOINTS]]
        for old in [s for s in self.steps if s < min(self.checkpoints)]:
            for group in self.steps.pop(old).groups:
                group.let_go()
        return dropped

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

    def _cut_wave(self, feed: StepFeed, *, step: StepId) -> TrainMicroBatch:
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
