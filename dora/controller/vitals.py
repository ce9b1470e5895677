"""Whether the ranks are alive and make progress, judged from their pulses (trainer/pulse.py).

A rank is silent if it has sent no pulse for SILENT_S: its process is stopped, or its host is cut off. The ranks are
wedged if none of them has made progress for ten times as long as any has needed before in the same activity, and for at
least a minute; for example, in a collective that one of them never enters. Activities with a limit of their own are not
judged.

Invariant: pure; all times are by one clock. Time during which the controller itself was stopped, or a host was cut off,
does not count against any rank.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from dora.transport.messages import OWN_LIMIT, RankActivity, RankPulse, RankSpans

#: Longest time without a pulse, of which there are ten in it.
SILENT_S: Final = 20.0
#: Longest time in which no rank makes progress.
STILL_S: Final = 60.0
#: The same, as a multiple of the longest time so far without progress of a rank in the same activity.
STILL_FACTOR: Final = 10.0
#: Longest time for an activity that has not been completed before: kernels may be compiled.
FIRST_S: Final = 300.0
#: From one judgement to the next.
LOOK_S: Final = 1.0
#: If more time than this passes between two judgements, the controller itself was stopped.
GAP_S: Final = 5.0


@dataclass(slots=True)
class _Rank:
    heard_at: float
    changed_at: float
    count: int = -1
    activity: RankActivity = "waiting"


class Vitals:
    """The judgement on one start of the ranks."""

    def __init__(self, num_ranks: int, *, at: float) -> None:
        self._ranks = [_Rank(at, at) for _ in range(num_ranks)]
        self._longest: defaultdict[RankActivity, float] = defaultdict(float)
        self._looked_at = at

    def note(self, number: int, pulse: RankPulse, *, at: float) -> None:
        """Take in a pulse of a rank."""
        rank = self._ranks[number]
        rank.heard_at = at
        if pulse.count != rank.count:
            if rank.count >= 0:
                self._longest[rank.activity] = max(self._longest[rank.activity], at - rank.changed_at)
            rank.count, rank.activity, rank.changed_at = pulse.count, pulse.activity, at

    def note_spans(self, message: RankSpans) -> None:
        """Take in what a rank has done: activities that fit between two pulses are known from here alone."""
        for activity, _ in message.spans[:-1]:  # the last one may go on
            self._longest.setdefault(activity, 0.0)

    def problem(self, *, at: float, are_cut_off: bool = False) -> str:
        """Return what is wrong; "" if nothing is. To be called every LOOK_S. `are_cut_off`: no pulse can arrive."""
        gap, self._looked_at = at - self._looked_at, at
        if gap > GAP_S or are_cut_off:
            for rank in self._ranks:
                rank.heard_at = rank.changed_at = at
            return ""
        for number, rank in enumerate(self._ranks):
            if at - rank.heard_at > SILENT_S:
                silent = f"trainer rank {number} has been silent for {at - rank.heard_at:.0f} s"
                return f"{silent}; is its process stopped, or its host cut off?"
        return self._standstill(at)

    def _standstill(self, at: float) -> str:
        doing = {rank.activity for rank in self._ranks}
        still_s = min(at - rank.changed_at for rank in self._ranks)
        if doing & (OWN_LIMIT - {"waiting"}) or doing == {"waiting"}:
            return ""
        if still_s <= max(map(self._limit_s, doing - {"waiting"})):
            return ""
        each = ", ".join(f"rank {number}: {rank.activity}" for number, rank in enumerate(self._ranks[:8]))
        return (
            f"no trainer rank has made progress for {still_s:.0f} s ({each}); logs/flight-*.json has their collectives"
        )

    def _limit_s(self, activity: RankActivity) -> float:
        longest = self._longest.get(activity)
        return FIRST_S if longest is None else max(STILL_S, STILL_FACTOR * longest)
