"""The feed of the trainer: committed groups become waves of one micro-batch per rank.

Each of the M optimizer updates of a step trains the next N / M groups in commit order; a step that is cut short by the
end of the prompts has fewer updates. Invariant: the waves of a step are numbered from 0; each has one micro-batch for
every rank (FSDP2 hangs on unequal counts), with answers of one update only; every graded trajectory of the step is in
exactly one wave; the last wave of each update and the last wave of the step are marked. Waves since the oldest
remaining checkpoint are kept, so that a trainer restarted from any checkpoint gets the same waves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from dora.core.commands import TrainMicroBatch
from dora.core.ids import StepId
from dora.core.tables import Group
from dora.core.waves import Pending, answers_of, load_of

#: Untrained waves sent: the current one and the next, so that the trainer never waits for a round trip.
MAX_WAVES_AHEAD = 2
#: Checkpoints kept; the older one is used if the newer one is damaged.
KEPT_CHECKPOINTS = 2


@dataclass(slots=True, eq=False, repr=False)
class StepFeed:
    """The groups and waves of one step."""

    groups: list[Group] = field(default_factory=list)  #: in commit order
    pending: defaultdict[int, Pending] = field(default_factory=lambda: defaultdict(Pending))  #: by update
    update: int = 0  #: the update of the next wave
    closed: bool = False  #: no more groups follow
    waves: list[TrainMicroBatch] = field(default_factory=list)
    slack: list[float] = field(default_factory=list)  #: of each wave: share of the ranks' time idle for lack of groups
    sent: int = 0  #: waves sent to the trainer


@dataclass(slots=True, eq=False, repr=False)
class Feed:
    """The progress of the trainer, and the steps that it may still train."""

    num_ranks: int
    budget: int  #: tokens of one rank's micro-batch
    groups_per_update: int  #: N / M
    shared_prompts: bool = False  #: the prompt of siblings on one rank is computed once
    steps: dict[StepId, StepFeed] = field(default_factory=dict)  #: by step, from the oldest remaining checkpoint
    #: Folder by step. The start counts as a checkpoint without a folder.
    checkpoints: dict[StepId, str] = field(default_factory=lambda: {StepId(0): ""})
    open_step: StepId | None = None  #: the step the trainer works on or waits for; None until it is ready
    trained: StepId = field(default=StepId(0))  #: steps trained; `open_step` is lower while steps are repeated
    waves_done: int = 0  #: of the open step
    idle_since: float | None = None  #: start of the trainer's idle time; None while it works
    busy_since: float = 0.0  #: when it began the current wave
    idle_s: float = 0.0  #: idle time since the last step was trained
    uneven_s: float = 0.0  #: time since the last step in which ranks waited for others, for lack of groups
    incarnation: int = 0  #: number of the present start of the ranks, since the controller began
    losses: int = 0  #: starts of the ranks that were lost since a step was last trained for the first time

    def groups(self, step: StepId) -> Sequence[Group]:
        """Return the groups of a step in commit order; none if it has none or will not be trained again."""
        feed = self.steps.get(step)
        return feed.groups if feed is not None else ()

    def commit(self, group: Group, *, step: StepId) -> None:
        """Add a group to a step."""
        feed = self.steps.setdefault(step, StepFeed())
        pending = feed.pending[len(feed.groups) // self.groups_per_update]
        feed.groups.append(group)
        lengths = [(t.id, t.num_tokens + t.repeated) for t in group.trajectories if t.reward is not None]
        prompt, shared = group.num_prompt_tokens, self.shared_prompts
        for answer in answers_of(group.id, lengths, prompt=prompt, shared_prompts=shared):
            pending.add(answer)

    def restart(self, step: StepId) -> None:
        """Send every wave from `step` on to a trainer that has (re)started there."""
        self.open_step = step
        self.waves_done = 0
        for feed in self.steps.values():
            feed.sent = 0

    def lost(self) -> None:
        """Send nothing more until the ranks, which are lost, are ready again."""
        self.open_step = None
        self.idle_since = None
        self.idle_s = self.uneven_s = 0.0
        self.losses += 1
        self.incarnation += 1

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
        is_complete = feed.closed or len(feed.groups) >= (feed.update + 1) * self.groups_per_update
        pending = feed.pending[feed.update]
        if not is_complete and (not pending.answers or (ahead and pending.num_tokens < self._capacity)):
            return None  # only a full wave is sent ahead; an idle trainer gets all pending answers
        wave = self._cut_wave(feed, pending, step=self.open_step, is_complete=is_complete)
        feed.waves.append(wave)
        feed.update += wave.closes
        feed.sent += 1
        return wave

    @property
    def _capacity(self) -> int:
        """Tokens of a full wave."""
        return self.num_ranks * self.budget

    def _cut_wave(self, feed: StepFeed, pending: Pending, *, step: StepId, is_complete: bool) -> TrainMicroBatch:
        """Make the next wave of the trajectories committed first. `is_complete`: the update gets no more groups."""
        is_full = pending.num_tokens >= self._capacity
        ranks = pending.cut(num_ranks=self.num_ranks, budget=self.budget)
        loads = [load_of(rank) for rank in ranks]
        feed.slack.append(0.0 if is_full or is_complete else 1 - sum(loads) / (len(loads) * max(loads)))
        closes = is_complete and not pending.answers
        return TrainMicroBatch(
            step=step,
            index=len(feed.waves),
            last=closes and feed.closed and len(feed.groups) <= (feed.update + 1) * self.groups_per_update,
            ranks=tuple(tuple(sorted(a.trajectory for a in rank)) for rank in ranks),
            update=feed.update,
            closes=closes,
        )
