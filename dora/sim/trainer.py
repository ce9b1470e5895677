"""How long the trainer takes for its micro-batches (workloads.md §5).

Ranks work in lockstep: the fullest one sets the pace, and the step's optimizer updates come as their share of its
answers is done. Called by world.py in virtual time and by the paced ranks in scaled time, one wave at a time, in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dora.sim.workload import Workload


class WaveTime(msgspec.Struct, frozen=True):
    """What one wave takes."""

    compute_s: float  #: forward and backward, on the fullest rank
    balanced_s: float  #: what it would have been, had every rank had as much
    update_s: float  #: the optimizer updates that are due with it


class TrainerTime:
    """The times of one trainer; it counts the answers and updates of the step at hand."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._answers = 0
        self._updates = 0

    def wave(self, loads: Sequence[int], *, num_answers: int, last: bool) -> WaveTime:
        """`loads`: tokens by rank; `last`: the wave closes the step."""
        job, train = self._workload.job, self._workload.train
        self._answers += num_answers
        due = self._answers * train.updates // (job.groups_per_step * job.group_size)
        updates = (train.updates if last else min(due, train.updates)) - self._updates
        self._updates += updates
        if last:
            self._answers = self._updates = 0
        rate = self._workload.rank_tokens_s
        return WaveTime(max(loads) / rate, sum(loads) / len(loads) / rate, updates * train.update_s)
