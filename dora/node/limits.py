"""The limit of open files, checked and raised before a run starts, since it would otherwise fail late."""

from __future__ import annotations

import resource
from typing import Final

from dora.errors import ConfigError

#: Open files other than streams: libraries, logs, sockets of the trainer, graders and control calls.
SPARE_FILES: Final = 256
MAX_FILES: Final = 2**20  # more than any run opens; some libraries iterate up to the limit


def allow_open_files(streams: int) -> int:
    """Raise the soft limit to the hard one, and return the number of streams that it allows.

    ConfigError if these are fewer than `streams`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    needed = streams + SPARE_FILES
    if allowed < needed:
        raise ConfigError(
            f"engine.slots: {streams} concurrent requests need about {needed} open files, but this host allows {hard}; "
            "raise the hard limit (ulimit -Hn), or lower engine.slots"
        )
    return allowed - SPARE_FILES
