"""What one end of the transport knows of its peer: numbering, acknowledgement, redelivery. No sockets, no clock.

Invariant: each message is consumed exactly once and in order, even if connections are lost. A sent message is kept
until the peer acknowledges it; after a reconnection all messages that the peer lacks are sent again (go-back-N). A
number seen before is a duplicate; a number beyond the next one is a gap, which redelivery will fill. Both are ignored,
up to MAX_IGNORED in a row. A peer may have MAX_UNACKED unconsumed messages here; one more breaks the protocol.
"""

from __future__ import annotations

from collections import deque

from dora.errors import ProtocolError
from dora.transport.codec import Buffer

# Maximum number of messages in flight to one peer; consumption acknowledges them. A rank trains one micro-batch while
# the next ones are queued: 64 are several steps of the default job and, at 4,096 tokens of 13 B each, at most 3.4 MB.
MAX_UNACKED = 64
# Maximum number of ignored messages without a new message or a reconnection in between. A broken connection leaves up
# to one window of messages that were sent too early, and redelivery one window of duplicates.
MAX_IGNORED = 4 * MAX_UNACKED


class Link:
    """The numbered traffic with one peer in both directions."""

    def __init__(self) -> None:
        self._next_id = 1
        self._unacked: deque[tuple[int, list[Buffer]]] = deque()
        self.last_received = 0  # newest id of the peer that was accepted
        self.last_consumed = 0  # newest id of the peer that was passed on, and is acknowledged
        self.duplicates = 0  # messages received again and ignored
        self.gaps = 0  # messages received too early and ignored
        self._ignored = 0  # duplicates and gaps since the last accepted message or reconnection

    @property
    def full(self) -> bool:
        """Whether nothing more may be sent until the peer acknowledges a message."""
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
        """Drop the messages up to `last_id`, which the peer has consumed."""
        if last_id >= self._next_id:
            raise ProtocolError(f"message {last_id} was acknowledged, but only {self._next_id - 1} were sent")
        while self._unacked and self._unacked[0][0] <= last_id:
            self._unacked.popleft()

    def redelivery(self, last_id: int) -> list[list[Buffer]]:
        """Messages to send again to a peer that has reconnected and has everything up to `last_id`."""
        self._ignored = 0
        return [frames for number, frames in self._unacked if number > last_id]

    def take(self, number: int) -> bool:
        """Whether message `number` is the next one. If not, it is counted, and the caller must ignore it."""
        if number > self.last_consumed + MAX_UNACKED:
            raise ProtocolError(f"message {number} arrived when only {self.last_consumed} were consumed")
        if number == self.last_received + 1:
            self.last_received = number
            self._ignored = 0
            return True
        if number <= self.last_received:
            self.duplicates += 1
        else:
            self.gaps += 1
        self._ignored += 1
        if self._ignored > MAX_IGNORED:
            raise ProtocolError(f"{self._ignored} messages arrived out of order, the last of them {number}")
        return False
