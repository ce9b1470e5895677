"""`dora status`: shows the state of a run, from its status endpoint or its folder."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from rich.console import Console

from dora.app.saved_status import read_status
from dora.cli.output import say, tell
from dora.errors import ConfigError, DoraError
from dora.observe.sentence import ENDED
from dora.observe.snapshot import Snapshot
from dora.status.client import fetch
from dora.status.terminal import REFRESH_S, LiveView, view


def status(source: str, *, watch: bool) -> None:
    """Show the run at an address or in a folder, once or until it ends."""
    if source.startswith(("http://", "https://")):
        read = partial(fetch, source)
    elif Path(source).exists():
        read = partial(read_status, Path(source))
    else:
        raise ConfigError(f"{source}: is neither an address (http://HOST:PORT) nor a run folder")
    now = asyncio.run(_watch(source, read) if watch else _show(read))
    if now.phase == "interrupted" and not source.startswith("http"):
        say(f"to continue it: dora {'run' if now.num_steps else 'eval'} --resume {source}")


async def _show(read: Callable[[], Awaitable[Snapshot]]) -> Snapshot:
    now = await read()
    Console().print(LiveView(now))
    return now


async def _watch(source: str, read: Callable[[], Awaitable[Snapshot]]) -> Snapshot:
    console = Console()
    now = await read()
    with view(console) as show:
        show(now)
        while now.phase not in ENDED:
            await asyncio.sleep(REFRESH_S)
            try:
                now = await read()
            except DoraError:
                tell(
                    f"{source} no longer answers: the run has ended, or cannot be reached; "
                    "dora status RUN_FOLDER shows how it ended"
                )
                return now
            show(now)
    if not console.is_terminal:
        say(now.sentence)
    return now
