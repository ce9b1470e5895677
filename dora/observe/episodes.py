"""Episodes of several turns: their statistics, and how long their calls take. A run without an environment has none.

Invariant: pure. Times are folded from events alone; all else is in the records of the episodes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from statistics import fmean
from typing import Annotated, Final, Protocol

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import ForkCause, TrajectoryId, Truncation
from dora.observe.figures import Figure, Metric

#: Metrics of the environment that are kept of a step, and that are shown in one line.
MAX_METRICS: Final = 64
SHOWN_METRICS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeStats:
    """Episodes that have ended. The times are None if no episode has ended since the events are known."""

    count: Annotated[int, Figure("episodes", "Episodes with a reward.")]
    turns_mean: Annotated[float, Figure("turns", "Turns of an episode, mean.")]
    turns_max: Annotated[int, Figure("turns", "Turns of an episode, maximum.")]
    calls_mean: Annotated[float, Figure("calls", "Calls of an episode, mean.")]
    calls_max: Annotated[int, Figure("calls", "Calls of an episode, maximum.")]
    sampled_tokens_mean: Annotated[float, Figure("tokens", "Tokens of an episode that were sampled, mean.")]
    observation_tokens_mean: Annotated[float, Figure("tokens", "Tokens of an episode's observations, mean.")]
    call_s_mean: Annotated[
        float | None, Figure("seconds", "Time of a call, from the end of its turn until its result, mean.")
    ]
    call_s_p90: Annotated[float | None, Figure("seconds", "The same, 90th percentile.")]
    call_share: Annotated[
        float | None,
        Figure("fraction", "Share of the episodes' time, from the first request to the end, that calls took."),
    ]
    turn_rewards: Annotated[
        tuple[float, ...],
        Figure("reward", "Mean reward that the environment gave for the first turn, the second, and so on."),
    ]
    truncated: Annotated[
        dict[str, int], Figure("episodes", "Episodes that a budget ended, by cause: tokens, turns, time.")
    ]
    forks: Annotated[
        dict[str, int],
        Figure("rows", "New rows in episodes that forked, by cause: branched, resampled, rewritten, unbridged."),
    ] = field(default_factory=dict)
    repeated_tokens_mean: Annotated[
        float, Figure("tokens", "Tokens of earlier rows that the new rows of an episode repeat, mean.")
    ] = 0.0
    metrics: Annotated[
        dict[str, float],
        Figure("value", "What the environment measured, by name, mean over the episodes that have it."),
    ] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Turns, tokens and rewards in one line."""
        tokens = f"{self.sampled_tokens_mean:.0f} tokens sampled and {self.observation_tokens_mean:.0f} observed"
        parts = [f"{self.turns_mean:.1f} turns (at most {self.turns_max})", tokens]
        if any(self.turn_rewards):
            parts.append("reward by turn " + " ".join(f"{reward:.2f}" for reward in self.turn_rewards))
        if self.truncated:
            causes = ", ".join(f"{count} of {cause}" for cause, count in self.truncated.items())
            parts.append(f"ended by a budget: {causes}")
        if self.forks:
            parts.append(f"forks: {by_cause(self.forks)}, {self.repeated_tokens_mean:.0f} tokens repeated")
        if self.metrics:
            parts.append(", ".join(f"{name} {value:.3g}" for name, value in [*self.metrics.items()][:SHOWN_METRICS]))
        return ", ".join(parts)

    @property
    def calls_text(self) -> str:
        """Number and time of calls in one line."""
        parts = [f"{self.calls_mean:.1f} an episode (at most {self.calls_max})"]
        if self.call_s_mean is not None and self.call_share is not None:
            parts.append(f"{self.call_s_mean:.2f} s each (p90 {self.call_s_p90:.2f} s)")
            parts.append(f"{self.call_share:.0%} of its time")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentRow:
    """The environment of a run."""

    calling: Annotated[int, Metric("episodes_calling", "Episodes with a call under way.")]
    #: by cause
    failed: Annotated[
        dict[str, int],
        Metric("environment_failed_total", "Episodes whose environment could not go on.", label="cause"),
    ]


def by_cause(counts: Mapping[str, int]) -> str:
    """Return counts in words: "2 timeout, 1 host"."""
    return ", ".join(f"{count} {cause}" for cause, count in counts.items())


@dataclass(slots=True)
class EpisodeTimes:
    """The times of one episode, in seconds since the run began."""

    began_at: float
    called_at: float = 0.0
    ended_at: float | None = None
    calls_s: list[float] = field(default_factory=list)  #: duration of each call
    forks: list[ForkCause] = field(default_factory=list)


class EpisodeRecord(Protocol):
    """What is known of an episode besides its times (`dora.controller.trajectories.TrajectoryRecord`)."""

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def observed(self) -> Sequence[tuple[int, int]]: ...

    @property
    def turn_rewards(self) -> Sequence[float]: ...

    @property
    def truncated(self) -> Truncation: ...

    @property
    def repeated(self) -> int: ...

    @property
    def metrics(self) -> Sequence[tuple[str, float]]: ...


class TimedEpisodes:
    """The times of all episodes of a run with an environment."""

    def __init__(self) -> None:
        self.times: dict[TrajectoryId, EpisodeTimes] = {}
        self._ended: list[TrajectoryId] = []  # by the last event, whose other observers may still ask for their times

    def apply(self, event: ev.Event, commands: Sequence[cmd.Command], *, group_size: int) -> None:
        """Take in an event of the core with its commands."""
        self.forget(self._ended)
        self._ended = [id for command in commands for id in self._ended_by(command, group_size)]
        if isinstance(event, ev.CallFinished | ev.GenerationFinished):
            times = self.times.get(event.trajectory)
            if times is not None and isinstance(event, ev.CallFinished):
                times.calls_s.append(event.at - times.called_at)
                times.forks += [event.fork] if event.fork else []
            if times is not None and (isinstance(event, ev.GenerationFinished) or event.ended):
                times.ended_at = event.at
        for command in commands:
            if isinstance(command, cmd.Generate):
                self.times.setdefault(command.trajectory, EpisodeTimes(event.at)).called_at = event.at
            elif isinstance(command, cmd.CallEnvironment):
                if command.trajectory in self.times:  # else it asks for its prompt
                    self.times[command.trajectory].called_at = event.at
            elif isinstance(command, cmd.ForgetGroups):
                for group in command.groups:
                    self.forget(range(group * group_size, (group + 1) * group_size))

    def _ended_by(self, command: cmd.Command, group_size: int) -> Iterable[TrajectoryId]:
        """Return the answers that a command ends, and for which no ForgetGroups comes."""
        if isinstance(command, cmd.DropGroup):
            return map(TrajectoryId, range(command.group * group_size, (command.group + 1) * group_size))
        if isinstance(command, cmd.ReportEvaluation):  # one version is evaluated at a time
            return [id for id in self.times if id < 0]
        return ()

    def forget(self, trajectories: Iterable[int]) -> None:
        """Drop the times of episodes."""
        for trajectory in trajectories:
            self.times.pop(TrajectoryId(trajectory), None)

    def calls_s(self, trajectory: TrajectoryId) -> tuple[float, ...]:
        """Return the duration of each call of an episode."""
        times = self.times.get(trajectory)
        return tuple(times.calls_s) if times is not None else ()

    def stats(self, records: Mapping[TrajectoryId, EpisodeRecord]) -> EpisodeStats | None:
        """Return the statistics of some episodes; None without episodes."""
        if not records:
            return None
        turns = [sum(start > 0 for start, _ in record.observed) + 1 for record in records.values()]
        calls = [len(record.turn_rewards) for record in records.values()]
        not_sampled = [sum(end - start for start, end in record.observed) for record in records.values()]
        observed = [sum(end - start for start, end in r.observed if start) for r in records.values()]  # not the prompt
        rewards = zip_longest(*(record.turn_rewards for record in records.values()))
        times = [t for id in records if (t := self.times.get(id)) is not None and t.ended_at is not None]
        calls_s = sorted(s for t in times for s in t.calls_s)
        measured: dict[str, list[float]] = defaultdict(list)
        for name, value in (pair for record in records.values() for pair in record.metrics):
            measured[name].append(value)
        episodes_s = sum(t.ended_at - t.began_at for t in times if t.ended_at is not None)
        return EpisodeStats(
            count=len(records),
            turns_mean=fmean(turns),
            turns_max=max(turns),
            calls_mean=fmean(calls),
            calls_max=max(calls),
            sampled_tokens_mean=fmean(len(r.tokens) for r in records.values()) - fmean(not_sampled),
            observation_tokens_mean=fmean(observed),
            call_s_mean=fmean(calls_s) if calls_s else None,
            call_s_p90=calls_s[-(-9 * len(calls_s) // 10) - 1] if calls_s else None,
            call_share=sum(calls_s) / episodes_s if episodes_s else None,
            turn_rewards=tuple(fmean(r for r in turn if r is not None) for turn in rewards),
            truncated=dict(Counter(r.truncated for r in records.values() if r.truncated)),
            forks=dict(Counter(cause for t in times for cause in t.forks)),
            repeated_tokens_mean=fmean(r.repeated for r in records.values()),
            metrics={name: fmean(values) for name, values in islice(measured.items(), MAX_METRICS)},
        )
