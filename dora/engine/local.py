"""Retries for the case that this host cannot open another connection, which is not the fault of any server.

Invariant: `NoConnectionLeft` never leaves the client. Nothing was sent, so the call is retried; if no connection can be
opened for `LIMIT_S`, the run fails with the reason.
"""

from __future__ import annotations

import asyncio
import errno
import math
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import structlog

from dora.errors import DoraError, RemoteError, RunFailed

log = structlog.get_logger(__name__)

T = TypeVar("T")

PAUSE_S: Final = 1.0  # between two attempts
LOG_INTERVAL_S: Final = 60.0
#: The run fails after this time without a connection, before the watchdog (`rollout.watchdog_s`) blames a server.
LIMIT_S: Final = 60.0

_LOCAL: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL})


class NoConnectionLeft(DoraError):
    """This host has no open files, local ports or memory left."""


def is_local(err: OSError) -> bool:
    """Return whether a connection failed because a resource of this host is exhausted."""
    return err.errno in _LOCAL


class Patience:
    """Retries calls while this host cannot open connections."""

    def __init__(self) -> None:
        self._since = self._last = -math.inf  # first and latest failure of the current series
        self._logged_at = -math.inf

    async def until_connected(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `call`, retried after each NoConnectionLeft. RunFailed if that persists."""
        while True:
            try:
                result = await call()
            except NoConnectionLeft as err:
                self._note(asyncio.get_running_loop().time(), str(err))
            except RemoteError:
                self._last = -math.inf
                raise
            else:
                self._last = -math.inf
                return result
            await asyncio.sleep(PAUSE_S)

    def _note(self, now: float, reason: str) -> None:
        if now - self._last > LIMIT_S / 2:
            self._since = now
        self._last = now
        if now - self._since >= LIMIT_S:
            raise RunFailed(
                f"no connection to any server could be opened for {LIMIT_S:g} s ({reason}); raise the limits of this "
                "host (open files: ulimit -n), or lower engine.slots"
            )
        if now - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = now
            log.warning("no_connection_left", reason=reason)
