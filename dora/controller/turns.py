"""Statistics of episodes: number of turns, tokens and rewards, and the duration of calls.

Invariant: times are of this controller alone, from the events of the core; all else is in the records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import fmean

from dora.controller.trajectories import TrajectoryRecord
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import TrajectoryId
from dora.status.episodes import EpisodeStats


@dataclass(slots=True)
class EpisodeTimes:
    """The times of one episode, in seconds since the run began."""

    began_at: float
    called_at: float = 0.0
    ended_at: float | None = None
    calls_s: list[float] = field(default_factory=list)  #: duration of each call


class Turns:
    """The episodes of a run with an environment."""

    def __init__(self) -> None:
        self.times: dict[TrajectoryId, EpisodeTimes] = {}

    def note(self, event: ev.Event, commands: Sequence[cmd.Command]) -> None:
        """Take in an event of the core with its commands."""
        if isinstance(event, ev.CallFinished | ev.GenerationFinished):
            times = self.times.get(event.trajectory)
            if times is not None and isinstance(event, ev.CallFinished):
                times.calls_s.append(event.at - times.called_at)
            if times is not None and (isinstance(event, ev.GenerationFinished) or event.ended):
                times.ended_at = event.at
        for command in commands:
            if isinstance(command, cmd.Generate | cmd.CallEnvironment):
                times = self.times.setdefault(command.trajectory, EpisodeTimes(event.at))
                times.called_at = event.at

    def forget(self, known: Container[TrajectoryId]) -> None:
        """Drop the times of all episodes that are not in `known`."""
        self.times = {id: times for id, times in self.times.items() if id in known}

    def calls_s(self, trajectory: TrajectoryId) -> tuple[float, ...]:
        """Return the duration of each call of an episode."""
        times = self.times.get(trajectory)
        return tuple(times.calls_s) if times is not None else ()

    def stats(self, records: Mapping[TrajectoryId, TrajectoryRecord]) -> EpisodeStats | None:
        """Return the statistics of some episodes; None without episodes."""
        if not records:
            return None
        turns = [len(record.observed) + 1 for record in records.values()]
        calls = [len(record.turn_rewards) for record in records.values()]
        observed = [sum(end - start for start, end in record.observed) for record in records.values()]
        rewards = zip_longest(*(record.turn_rewards for record in records.values()))
        times = [t for id in records if (t := self.times.get(id)) is not None and t.ended_at is not None]
        calls_s = sorted(s for t in times for s in t.calls_s)
        episodes_s = sum(t.ended_at - t.began_at for t in times if t.ended_at is not None)
        return EpisodeStats(
            count=len(records),
            turns_mean=fmean(turns),
            turns_max=max(turns),
            calls_mean=fmean(calls),
            calls_max=max(calls),
            sampled_tokens_mean=fmean(len(r.tokens) for r in records.values()) - fmean(observed),
            observation_tokens_mean=fmean(observed),
            call_s_mean=fmean(calls_s) if calls_s else None,
            call_s_p90=calls_s[int(0.9 * (len(calls_s) - 1))] if calls_s else None,
            call_share=sum(calls_s) / episodes_s if episodes_s else None,
            turn_rewards=tuple(fmean(r for r in turn if r is not None) for turn in rewards),
            truncated=dict(Counter(r.truncated for r in records.values() if r.truncated)),
        )
