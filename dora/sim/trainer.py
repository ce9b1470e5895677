"""The time that the trainer takes for its waves.

Ranks work in lockstep, so the fullest one determines the time.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dora.sim.workload import Workload


class WaveTime(msgspec.Struct, frozen=True):
    """The time of one wave."""

    compute_s: float  #: forward and backward, on the fullest rank
    balanced_s: float  #: the same if all ranks had the same load
    update_s: float  #: the optimizer update that follows it, if any


def wave_time(workload: Workload, loads: Sequence[int], *, closes: bool) -> WaveTime:
    """Return the time of a wave. `loads`: tokens by rank; `closes`: an optimizer update follows."""
    rate = workload.rank_tokens_s
    return WaveTime(max(loads) / rate, sum(loads) / len(loads) / rate, workload.train.update_s if closes else 0.0)
