"""Transfers of weights that share what the store gives, and never exceed their own links.

All transfers under way have the same rate at any time. So the bytes that one of them would have received since the
beginning, if it had always been under way, are enough: a transfer that begins when these are b ends when they are b
plus its own size. Nothing is computed per transfer when the rate changes.
"""

from __future__ import annotations

from heapq import heappop, heappush

from dora.core.ids import InstanceId


class Transfers:
    """The transfers under way, at most one to each instance. `link_bytes_s`: the limit of each; `store_bytes_s`: of all
    together or, with `relay`, of each, as every server passes on what it receives to the next one while it receives."""

    def __init__(self, *, num_bytes: float, link_bytes_s: float, store_bytes_s: float, relay: bool = False) -> None:
        self.num_bytes = num_bytes
        self.link_bytes_s = link_bytes_s
        self.store_bytes_s = store_bytes_s
        self.relay = relay
        self._now = 0.0
        self._received = 0.0  # bytes of a transfer that was always under way
        self._heap: list[tuple[float, int, InstanceId]] = []  # (bytes at its end, number, instance)
        self._numbers: dict[InstanceId, int] = {}  # of the transfer to each instance
        self._next = 0

    def reach(self, now: float) -> None:
        """Transfer until `now`, which must not be after `next_at()`."""
        self._received += (now - self._now) * self._rate()
        self._now = now

    def begin(self, instance: InstanceId) -> None:
        """Begin a transfer. Call `reach` first."""
        self._next += 1
        self._numbers[instance] = self._next
        heappush(self._heap, (self._received + self.num_bytes, self._next, instance))

    def stop(self, instance: InstanceId) -> None:
        """Stop the transfer to an instance, if any. Call `reach` first."""
        self._numbers.pop(instance, None)

    def next_at(self) -> float | None:
        """Return when the next transfer ends at the present rate; None if none is under way."""
        self._drop_stopped()
        if not self._heap:
            return None
        return self._now + max(0.0, self._heap[0][0] - self._received) / self._rate()

    def ended(self) -> InstanceId:
        """Remove the transfer that `next_at` spoke of, and return its instance."""
        self._drop_stopped()
        at, _, instance = heappop(self._heap)
        self._received = max(self._received, at)
        del self._numbers[instance]
        return instance

    def _drop_stopped(self) -> None:
        while self._heap and self._numbers.get(self._heap[0][2]) != self._heap[0][1]:
            heappop(self._heap)

    def _rate(self) -> float:
        """Return the bytes per second of each transfer under way."""
        return min(self.link_bytes_s, self.store_bytes_s / (1 if self.relay else max(1, len(self._numbers))))
