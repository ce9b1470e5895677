"""What this host itself cannot do: open one more connection. It says nothing about any server.

Invariant: `NoConnectionLeft` never leaves the client. A call that meets it is made again, since nothing was sent; if no
call gets a connection for long, the run fails with the reason.
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

#: Pause between two tries, and how often they are logged.
PAUSE_S: Final = 1.0
LOG_INTERVAL_S: Final = 60.0
#: The run fails after this long without a connection: before a watchdog (`rollout.watchdog_s`) blames a server.
LIMIT_S: Final = 60.0

_LOCAL: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL})


class NoConnectionLeft(DoraError):
    """Open files, local ports or memory of this host are used up."""


def is_local(err: OSError) -> bool:
    """Whether a connection could not be opened for want of something on this host."""
    return err.errno in _LOCAL


class Patience:
    """Makes calls that open a connection, and waits while this host cannot open any."""

    def __init__(self) -> None:
        self._since = self._last = -math.inf  # first and latest failure of those that followed one another
        self._logged_at = -math.inf

    async def until_connected(self, call: Callable[[], Awaitable[T]]) -> T:
        """The result of `call`, made again after each NoConnectionLeft; RunFailed if that lasts."""
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
