"""`dora track`, and the hidden `dora follow`, which the controller starts for each tracker."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from dora.app.trust import require_trust
from dora.cli.output import say
from dora.cli.serve import watch_own_lease
from dora.config.recorded import read_recorded
from dora.errors import ConfigError
from dora.journal.access import set_umask
from dora.journal.run_folder import RunFolder
from dora.node.lease import hold
from dora.trackers.follow import follow as follow_rows
from dora.trackers.kinds import FIELD, KINDS, require_installed, title

#: Niceness of a tracker's process: generation and training come first.
NICENESS = 10


def track(path: Path, *, to: Sequence[str] | None, trust_folder: bool) -> None:
    folder = RunFolder.open(path)
    config = read_recorded(folder.config, environ=os.environ)
    trackers = tuple(to) if to else config.tracking.trackers
    own = [f"{FIELD} = {name}" for name in trackers if name not in KINDS]
    if own and not to and not trust_folder:
        require_trust(folder, config, named=own, to="this")
    if not trackers:
        raise ConfigError(f"{path}: tracking.trackers of this run is empty; choose one with --to")
    require_installed(trackers)
    set_umask(config.run.group)
    ended = threading.Event()
    ended.set()
    with ExitStack() as held:
        held.enter_context(hold(folder.lock))
        for name in trackers:
            rows = follow_rows(folder, name, project=config.tracking.project, ended=ended)
            say(f"{title(name):<13}{rows} rows, complete")


def follow(path: Path, name: str) -> None:
    """Log new rows until SIGTERM, and then the rows that are left."""
    os.nice(NICENESS)
    watch_own_lease()
    folder = RunFolder.open(path)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    follow_rows(folder, name, project=read_recorded(folder.config, environ={}).tracking.project, ended=ended)
