"""What one end remembers about the other: numbering, acknowledgement, redelivery. No sockets, no clock.

Invariant: each message is consumed exactly once and in order, whatever the connection loses. What is sent is kept
until the peer acknowledges it; after a reconnection all that the peer lacks is sent again (go-back-N); a number seen
before is a duplicate, a number beyond the next one is a gap which the coming redelivery fills. Both are ignored.
Called by: controller_end (one per rank), trainer_end (one).
"""

from __future__ import annotations

from collections import deque

from dora.errors import ProtocolError
from dora.transport.codec import Buffer

# Messages under way to one peer, acknowledged on consumption. A rank works on one micro-batch while the next ones
# wait: 64 is several steps of the default job, and at 4,096 tokens (13 B each) it is 3.4 MB of memory at most.
MAX_UNACKED = 64


class Link:
    """The numbered traffic with one peer in both directions."""

    def __init__(self) -> None:
        self._next_id = 1
        self._unacked: deque[tuple[int, list[Buffer]]] = deque()
        self.last_received = 0  # newest id of the peer that was taken in
        self.last_consumed = 0  # newest id of the peer that the program has got; what acknowledgements carry
        self.duplicates = 0  # received again and ignored
        self.gaps = 0  # received too early and ignored

    @property
    def full(self) -> bool:
        """No more may be sent until the peer acknowledges."""
        return len(self._unacked) >= MAX_UNACKED

    @property
    def num_unacked(self) -> int:
        return len(self._unacked)

    @property
    def next_id(self) -> int:
        """The id that the next message sent must carry."""
        return self._next_id

    def keep(self, frames: list[Buffer]) -> None:
        """Remember the message `next_id`, which is about to be sent."""
        assert not self.full, "sent beyond the window"
        self._unacked.append((self._next_id, frames))
        self._next_id += 1

    def acknowledge(self, last_id: int) -> None:
        """The peer has everything up to `last_id`."""
        if last_id >= self._next_id:
            raise ProtocolError(f"message {last_id} was acknowledged, but only {self._next_id - 1} were sent")
        while self._unacked and self._unacked[0][0] <= last_id:
            self._unacked.popleft()

    def redelivery(self, last_id: int) -> list[list[Buffer]]:
        """Messages to send again to a peer that has everything up to `last_id`."""
        return [frames for number, frames in self._unacked if number > last_id]

    def take(self, number: int) -> bool:
        """Whether the message `number` is the next one; else it is counted and must be ignored."""
        if number == self.last_received + 1:
            self.last_received = number
            return True
        if number <= self.last_received:
            self.duplicates += 1
        else:
            self.gaps += 1
        return False
