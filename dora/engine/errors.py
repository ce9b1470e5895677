"""The two ways in which a server fails a request, as the controller tells them apart.

Raised by `stream.py` and `client.py`; the message starts with the server's url. A third, an answer that is not the
protocol, is `dora.errors.ProtocolError`.
"""

from __future__ import annotations

from dora.errors import RemoteError


class ServerGone(RemoteError):
    """Refused, reset, or cut in the middle. Tokens handed on before it are good: the request can go on elsewhere."""


class RequestRefused(RemoteError):
    """The server lives and said no; `retryable` tells whether the same request may succeed later or elsewhere."""

    def __init__(self, message: str, *, status: int, retryable: bool) -> None:
        super().__init__(message)
        self.status = status  # HTTP status, also where the refusal came inside a stream of status 200
        self.retryable = retryable


def is_retryable(status: int) -> bool:
    """Load (429, 503: queue full, time-outs) and server trouble (500: out of KV) pass; any other refusal stays."""
    return status == 429 or status >= 500


class PushFailed(RemoteError):
    """The server is not confirmed to hold the label; `doubtful`: it may hold other weights, or be paused."""

    def __init__(self, stage: str, reason: str, *, doubtful: bool) -> None:
        super().__init__(f"weight push failed at '{stage}': {reason}")
        self.stage = stage
        self.reason = reason
        self.doubtful = doubtful
