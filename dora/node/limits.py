"""Limits of this host that a run would meet late: asked, and raised where that needs no rights, before it starts."""

from __future__ import annotations

import resource
from typing import Final

from dora.errors import ConfigError

#: Open files besides the streams: libraries, logs, sockets of the trainer, graders and control calls.
SPARE_FILES: Final = 256
#: More than any run opens; some libraries go through every number up to the limit.
MOST_FILES: Final = 2**20


def allow_open_files(streams: int) -> None:
    """Raise the soft limit as far as it goes; ConfigError if so many streams do not fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    needed = streams + SPARE_FILES
    if allowed < needed:
        raise ConfigError(
            f"engine.slots: {streams} requests at the same time need about {needed} open files, and this host allows "
            f"{hard}; raise the hard limit (ulimit -Hn), or lower engine.slots"
        )
