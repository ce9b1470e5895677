"""Failures of requests and pushes. Messages start with the server's URL.

An answer that violates the protocol raises `dora.errors.ProtocolError`.
"""

from __future__ import annotations

from dora.errors import ProtocolError, RemoteError


class ServerGone(RemoteError):
    """The connection was refused, reset or closed early. Tokens delivered before are valid, so the request can be
    continued elsewhere."""


class RequestRefused(RemoteError):
    """The server refused the request; `retryable`: the same request may succeed later or elsewhere."""

    def __init__(self, message: str, *, status: int, retryable: bool) -> None:
        super().__init__(message)
        self.status = status  # HTTP status, even if the refusal came in a stream of status 200
        self.retryable = retryable


def is_retryable(status: int) -> bool:
    """Return whether a refusal is temporary: overload (429, 503: queue full, timeout) or a server error (500: out of
    KV)."""
    return status == 429 or status >= 500


class InvalidChoices(ProtocolError):
    """The choice of experts that was asked for is absent or impossible: the server does not do what its flags say, and
    would train routers on nonsense."""


class AdapterDisproved(RemoteError):
    """A server answers under the name of an adapter, but from other values."""


class PushFailed(RemoteError):
    """A push was not confirmed; `doubtful`: the weights may have changed, or the server may still be paused."""

    def __init__(self, stage: str, reason: str, *, doubtful: bool) -> None:
        super().__init__(f"weight push failed at '{stage}': {reason}")
        self.stage = stage
        self.reason = reason
        self.doubtful = doubtful
