"""What is shown of the episodes and the environment of a run. A run without an environment shows none of it.

Invariant: pure; plain data and its words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

#: The fields of EpisodeStats: unit and meaning.
MEASURED: Final[Mapping[str, tuple[str, str]]] = {
    "count": ("episodes", "Episodes with a reward."),
    "turns_mean": ("turns", "Turns of an episode, mean."),
    "turns_max": ("turns", "Turns of an episode, maximum."),
    "calls_mean": ("calls", "Calls of an episode, mean."),
    "calls_max": ("calls", "Calls of an episode, maximum."),
    "sampled_tokens_mean": ("tokens", "Tokens of an episode that were sampled, mean."),
    "observation_tokens_mean": ("tokens", "Tokens of an episode's observations, mean."),
    "call_s_mean": ("seconds", "Time of a call, from the end of its turn until its result, mean."),
    "call_s_p90": ("seconds", "The same, 90th percentile."),
    "call_share": ("fraction", "Share of the episodes' time, from the first request to the end, that calls took."),
    "turn_rewards": ("reward", "Mean reward that the environment gave for the first turn, the second, and so on."),
    "truncated": ("episodes", "Episodes that a budget ended, by cause: tokens, turns, time."),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeStats:
    """Episodes that have ended. The times are None if all calls were made under an earlier controller."""

    count: int
    turns_mean: float
    turns_max: int
    calls_mean: float
    calls_max: int
    sampled_tokens_mean: float
    observation_tokens_mean: float
    call_s_mean: float | None
    call_s_p90: float | None
    call_share: float | None
    turn_rewards: tuple[float, ...]
    truncated: dict[str, int]

    @property
    def text(self) -> str:
        """Turns, tokens and rewards in one line."""
        tokens = f"{self.sampled_tokens_mean:.0f} tokens sampled and {self.observation_tokens_mean:.0f} observed"
        parts = [f"{self.turns_mean:.1f} turns (at most {self.turns_max})", tokens]
        if any(self.turn_rewards):
            parts.append("reward by turn " + " ".join(f"{reward:.2f}" for reward in self.turn_rewards))
        if self.truncated:
            parts.append(f"truncated: {by_cause(self.truncated)}")
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

    calling: int  #: episodes with a call under way
    failed: dict[str, int]  #: episodes without a reward because their environment could not go on, by cause


def by_cause(counts: Mapping[str, int]) -> str:
    """Return counts in words: "2 timeout, 1 host"."""
    return ", ".join(f"{count} {cause}" for cause, count in counts.items())
