"""The time that the trainer takes for its waves.

Ranks work in lockstep, so the fullest one determines the time. The optimizer updates of a step are spread evenly over
its answers.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dora.sim.workload import Workload


class WaveTime(msgspec.Struct, frozen=True):
    """The time of one wave."""

    compute_s: float  #: forward and backward, on the fullest rank
    balanced_s: float  #: the same if all ranks had the same load
    update_s: float  #: the optimizer updates that follow it


class TrainerTime:
    """The times of one trainer, which counts the answers and updates of the current step."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._answers = 0
        self._updates = 0

    def wave(self, loads: Sequence[int], *, num_answers: int, last: bool) -> WaveTime:
        """Return the time of the next wave. `loads`: tokens by rank; `last`: the wave closes the step."""
        job, train = self._workload.job, self._workload.train
        self._answers += num_answers
        due = self._answers * train.updates // (job.groups_per_step * job.group_size)
        updates = (train.updates if last else min(due, train.updates)) - self._updates
        self._updates += updates
        if last:
            self._answers = self._updates = 0
        rate = self._workload.rank_tokens_s
        return WaveTime(max(loads) / rate, sum(loads) / len(loads) / rate, updates * train.update_s)
