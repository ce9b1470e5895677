"""The trackers of a run. Each is a process that reads metrics.jsonl; the run sends nothing to it.

A process that ends is started again, after ever longer pauses. At the end of the run all trackers have the same
limited time to log the remaining rows. If a record is still incomplete, a line says so.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import structlog

from dora.config.schema import TrackingConfig
from dora.errors import RemoteError
from dora.journal.run_folder import RunFolder
from dora.node.plan import plan_tracker
from dora.node.supervise import Child, Node
from dora.trackers.follow import num_rows, read_position
from dora.trackers.kinds import title, tracker_env

log = structlog.get_logger(__name__)

#: Pauses before a process is started again. After the last pause there is no further start; use `dora track`.
PAUSES_S: Final = (5.0, 20.0, 60.0)
#: Longest wait for all trackers at the end of a run.
END_TIMEOUT_S: Final = 10.0


@asynccontextmanager
async def tracking(
    config: TrackingConfig,
    folder: RunFolder,
    node: Node,
    *,
    lease: Path,
    tell: Callable[[str], None],
    end_timeout_s: float = END_TIMEOUT_S,
) -> AsyncIterator[None]:
    """Run the trackers while the context is open. `end_timeout_s`: longest wait for all of them at its end."""
    children = [
        node.add(
            plan_tracker(
                folder.root,
                name,
                title=title(name),
                lease=lease,
                env=tracker_env(name, os.environ, passed=config.pass_environment),
            )
        )
        for name in config.trackers
    ]
    keeping = [asyncio.create_task(_keep(child), name=child.plan.name) for child in children]
    try:
        yield
    finally:
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
        await asyncio.gather(*(_finish(child, timeout_s=end_timeout_s) for child in children))
        for name in config.trackers:
            if line := _missing(folder, name):
                tell(line)


async def _finish(child: Child, *, timeout_s: float) -> None:
    with suppress(RemoteError):  # it does not end after SIGKILL, which the node logs
        await child.finish(timeout_s=timeout_s)


async def _keep(child: Child) -> None:
    """Start a tracker, and start it again when it has ended."""
    for pause_s in (0.0, *PAUSES_S):
        await asyncio.sleep(pause_s)
        with suppress(RemoteError):  # its log cannot be written
            await child.start()
            log.warning("tracker_ended", reason=await child.ended())


def _missing(folder: RunFolder, name: str) -> str:
    """Say what the record in a tracker lacks; "" if nothing."""
    rows, logged = num_rows(folder), read_position(folder.tracker(title(name))).rows
    if logged >= rows:
        return ""
    return f"{title(name)} has {logged} of {rows} rows of this run; finish with dora track {folder.root}"
