"""The feed of the trainer: committed groups become waves of one micro-batch per rank.

Invariant: the waves of a step are numbered from 0; each has one micro-batch for every rank (FSDP2 hangs on unequal
counts); every graded trajectory of the step is in exactly one of them; the last one is marked. Waves are kept back to
the oldest checkpoint kept, so that a trainer restarted from any checkpoint gets the same waves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapreplace

from dora.core.commands import TrainMicroBatch
from dora.core.ids import StepId, TrajectoryId
from dora.core.tables import Group

#: Untrained waves sent: the current one and the next, so that the trainer never waits for a round trip.
MAX_WAVES_AHEAD = 2
#: Checkpoints kept; the older one is used if the newer one is damaged.
KEPT_CHECKPOINTS = 2


def split_wave(
    sizes: Iterable[tuple[TrajectoryId, int]], *, num_ranks: int, budget: int
) -> tuple[list[list[TrajectoryId]], list[tuple[TrajectoryId, int]]]:
    """Return one micro-batch per rank, balanced by tokens, and the trajectories that did not fit.

    Longest first onto the least loaded rank (LPT); a rank gets more than `budget` tokens only as a single trajectory.
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
    """The groups and waves of one step."""

    groups: list[Group] = field(default_factory=list)  #: in commit order
    pending: deque[tuple[TrajectoryId, int]] = field(default_factory=deque)  #: in no wave yet, with token counts
    num_tokens: int = 0  #: of those pending
    closed: bool = False  #: no more groups follow
    waves: list[TrainMicroBatch] = field(default_factory=list)
    slack: list[float] = field(default_factory=list)  #: of each wave: share of the ranks' time idle for lack of groups
    sent: int = 0  #: waves sent to the trainer


@dataclass(slots=True, eq=False, repr=False)
class Feed:
    """The progress of the trainer, and the steps that it may still train."""

    num_ranks: int
    budget: int  #: tokens of one rank's micro-batch
    steps: dict[StepId, StepFeed] = field(default_factory=dict)  #: by step, back to the oldest checkpoint kept
    #: Folder by step. The start counts as a checkpoint without a folder.
    checkpoints: dict[StepId, str] = field(default_factory=lambda: {StepId(0): ""})
    open_step: StepId | None = None  #: the step the trainer works on or waits for; None until it is ready
    trained: StepId = field(default=StepId(0))  #: steps trained; the open step is below it while some are repeated
    waves_done: int = 0  #: of the open step
    idle_since: float | None = None  #: start of the trainer's idle time; None while it works
    busy_since: float = 0.0  #: when it began the current wave
    idle_s: float = 0.0  #: idle time since the last step was trained
    uneven_s: float = 0.0  #: time since then in which ranks waited for others because there were too few groups

    def groups(self, step: StepId) -> Sequence[Group]:
        """Return the groups of a step in commit order; none if it has none or will not be trained again."""
        feed = self.steps.get(step)
        return feed.groups if feed is not None else ()

    def commit(self, group: Group, *, step: StepId) -> None:
        """Add a group to a step."""
        feed = self.steps.setdefault(step, StepFeed())
        feed.groups.append(group)
        for t in group.trajectories:
            if t.reward is not None:
                feed.pending.append((t.id, t.num_prompt_tokens + t.num_tokens))
                feed.num_tokens += t.num_prompt_tokens + t.num_tokens

    def restart(self, step: StepId) -> None:
        """Send every wave from `step` on to a trainer that has (re)started there."""
        self.open_step = step
        self.waves_done = 0
        for feed in self.steps.values():
            feed.sent = 0

    def checkpointed(self, step: StepId, folder: str) -> list[tuple[StepId, str]]:
        """Add a checkpoint at `step`, drop steps below the oldest kept, and return (step, folder) of those dropped."""
        self.checkpoints[step] = folder
        dropped = [(s, self.checkpoints.pop(s)) for s in sorted(self.checkpoints)[:-KEPT_CHECKPOINTS]]
        for old in [s for s in self.steps if s < min(self.checkpoints)]:
            for group in self.steps.pop(old).groups:
                group.let_go()
        return dropped

    def next_wave(self) -> TrainMicroBatch | None:
        """Return the next wave to send, if one is due."""
        if self.open_step is None or self.open_step not in self.steps:
            return None
        feed = self.steps[self.open_step]
        ahead = feed.sent - self.waves_done
        if ahead >= MAX_WAVES_AHEAD:
            return None
        if feed.sent < len(feed.waves):  # the step is trained again
            feed.sent += 1
            return feed.waves[feed.sent - 1]
        if feed.waves and feed.waves[-1].last:
            return None
        if not feed.closed and (not feed.pending or (ahead and feed.num_tokens < self.num_ranks * self.budget)):
            return None  # only a full wave is sent ahead; an idle trainer gets what there is
        wave = self._cut_wave(feed, step=self.open_step)
        feed.waves.append(wave)
        feed.sent += 1
        return wave

    def _cut_wave(self, feed: StepFeed, *, step: StepId) -> TrainMicroBatch:
        """Make the next wave of the trajectories committed first."""
        taken: list[tuple[TrajectoryId, int]] = []
        before = feed.num_tokens
        while feed.pending and before - feed.num_tokens < self.num_ranks * self.budget:
            taken.append(feed.pending.popleft())
            feed.num_tokens -= taken[-1][1]
        ranks, left = split_wave(taken, num_ranks=self.num_ranks, budget=self.budget)
        is_full = before - feed.num_tokens >= self.num_ranks * self.budget
        sizes = dict(taken)
        loads = [sum(sizes[t] for t in rank) for rank in ranks]
        feed.slack.append(0.0 if is_full or feed.closed else 1 - sum(loads) / (len(loads) * max(loads)))
        feed.pending.extendleft(sorted(left, reverse=True))
        feed.num_tokens += sum(size for _, size in left)
        return TrainMicroBatch(
            step=step,
            index=len(feed.waves),
            last=feed.closed and not feed.pending,
            ranks=tuple(tuple(sorted(r)) for r in ranks),
        )
