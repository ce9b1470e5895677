"""The terminal frontend of a run: messages, progress, Ctrl-C, and the summary at the end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dora.app.job import Running
from dora.cli import output
from dora.cli.run import INTERRUPTED
from dora.cli.summary import summary
from dora.journal.run_folder import RunFolder
from dora.observe.snapshot import Snapshot
from dora.status.terminal import show_progress


class Terminal:
    """The frontend of `dora run` and `dora pace`."""

    def tell(self, line: str) -> None:
        output.tell(line)

    def show(self, text: str) -> None:
        output.show_progress(text)

    @asynccontextmanager
    async def watch(self, run: Running) -> AsyncIterator[None]:
        """Show progress; from here on, handle SIGINT and SIGTERM until the process ends."""
        _stop_on_signals(run)
        folder, token = run.folder.root, run.token_file
        async with show_progress(run.snapshot, status_url=run.status_url, folder=folder, token=token):
            yield

    def ended(self, snapshot: Snapshot, *, folder: RunFolder, violations: int | None) -> None:
        output.say(*summary(snapshot, folder=folder, violations=violations))


def _stop_on_signals(run: Running) -> None:
    """Stop cleanly at the first signal, and at once at the second."""
    signals = 0

    def stop() -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            run.kill()
            os._exit(INTERRUPTED)
        run.interrupt()
        if run.snapshot().phase == "finished":
            return output.tell("the run has finished; its audit is skipped; press Ctrl-C again to end at once")
        waits = f"Waiting at most {run.stop_timeout_s:g} s for the trainer's checkpoint; " if run.stop_timeout_s else ""
        output.tell(f"stopping; everything in flight is kept. {waits}press Ctrl-C again to end at once")

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
