"""How busy the servers, and the controller itself, are.

Invariant: pure; readings of clocks are inputs. Slot-seconds are folded from events alone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from dora.core import events as ev
from dora.core.state import State

#: Number of event-loop lags to keep for the quantiles: two minutes, at ten per second.
RECENT_LAGS: Final = 1200
#: Span over which generated tokens per second are measured, seconds.
RATE_SPAN_S: Final = 10.0


@dataclass(slots=True)
class SlotUse:
    """Slot-seconds of all instances since the last step."""

    seen_at: float = 0.0
    busy_s: float = 0.0
    slots_s: float = 0.0

    def apply(self, state: State, event: ev.Event) -> None:
        """Count the time since the last tick at each tick."""
        if not isinstance(event, ev.Ticked):
            return
        elapsed, self.seen_at = event.at - self.seen_at, event.at
        for instance in state.instances.values():
            self.slots_s += instance.slots * elapsed
            self.busy_s += len(instance.residents) * elapsed

    def take_idle_share(self) -> float:
        """Return the share of the slots that was free since the last call."""
        busy = self.busy_s / self.slots_s if self.slots_s else 0.0
        self.busy_s = self.slots_s = 0.0
        return 1.0 - busy


class Rate:
    """The rate at which a total grows, over the last RATE_SPAN_S."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def note(self, total: int, *, at: float) -> None:
        """Record the total; call about once per second."""
        self._samples.append((at, total))
        while len(self._samples) > 2 and at - self._samples[1][0] >= RATE_SPAN_S:
            self._samples.popleft()

    @property
    def per_s(self) -> float:
        """Growth per second; 0 until there are two samples."""
        if len(self._samples) < 2:
            return 0.0
        (start, before), (end, total) = self._samples[0], self._samples[-1]
        return (total - before) / (end - start) if end > start else 0.0


@dataclass(slots=True)
class Acceptance:
    """What speculative decoding gives, over all answers of servers that have it."""

    tokens: int = 0
    steps: int = 0

    def note(self, tokens: int, steps: int) -> None:
        """Add an answer, or a part of it."""
        self.tokens += tokens
        self.steps += steps

    @property
    def length(self) -> float | None:
        """Return the tokens of an answer for each decoding step; None without speculative decoding."""
        return self.tokens / self.steps if self.steps else None


@dataclass(slots=True)
class LoopLag:
    """The event loop's lag, in seconds."""

    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_LAGS))
    max_s: float = 0.0  #: since the start

    def note(self, lag_s: float) -> None:
        """Record one measurement."""
        self.recent_s.append(lag_s)
        self.max_s = max(self.max_s, lag_s)

    def quantile(self, share: float) -> float:
        """Return a quantile of the latest measurements; 0 without one."""
        ordered = sorted(self.recent_s)
        return ordered[int(share * (len(ordered) - 1))] if ordered else 0.0
