"""The status of a run in its folder, so that `dora status` also shows a run that has ended, or a copy of one.

Invariant: the file is always a complete status, even after a power failure. While the run goes on, the status is a few
seconds old at most; afterwards it is the status at the end. The file is only shown: no decision depends on it, and a
run goes on if the file cannot be written.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from dora import files, foreign
from dora.errors import ConfigError, DoraError
from dora.journal.run_folder import RunFolder
from dora.node.holder import Holder, is_held_here, was_held_here
from dora.observe.groups import GroupRow
from dora.observe.sentence import ENDED, sentence
from dora.observe.snapshot import Snapshot
from dora.status.client import MAX_STATUS_BYTES, fetch

SAVE_EVERY_S: Final = 5.0
#: If the file of a running run is older than this, the run has ended without notice, unless its process is found here:
#: the disk may be full. The clocks of hosts that share the folder may differ by less than this.
FRESH_S: Final = 60.0
#: Why such a run ended, as far as its folder says.
WITHOUT_NOTICE: Final = "the controller ended without notice"
_ANSWER_S: Final = 3.0


class SavedStatus(msgspec.Struct, frozen=True):
    """The contents of status.json."""

    at: float  #: seconds since 1970
    url: str  #: address of the status endpoint, while the run goes on
    snapshot: Snapshot
    groups: tuple[GroupRow, ...] = ()  #: the step being formed
    holder: Holder | None = None  #: who has written it


@asynccontextmanager
async def saved_status(
    path: Path, snapshot: Callable[[], Snapshot], *, url: str, groups: Callable[[], Iterable[GroupRow]] = tuple
) -> AsyncIterator[None]:
    """Keep the file up to date while the context is open, and write the last status at its end."""
    closing, holder = asyncio.Event(), Holder.of(os.getpid())

    async def save() -> None:
        is_last = False
        while not is_last:
            is_last = closing.is_set()
            saved = SavedStatus(time.time(), url, snapshot(), tuple(groups()), holder)
            await asyncio.to_thread(_write, path, msgspec.json.encode(saved))
            with suppress(TimeoutError):
                async with asyncio.timeout(SAVE_EVERY_S):
                    await closing.wait()

    task = asyncio.create_task(save(), name="saved-status")
    try:
        yield
    finally:
        closing.set()
        await task


def read_saved(folder: Path) -> SavedStatus:
    """Return the contents of status.json of a run folder."""
    run = RunFolder.open(folder)
    try:
        return msgspec.json.decode(foreign.read(run.status, max_bytes=MAX_STATUS_BYTES), type=SavedStatus)
    except FileNotFoundError:
        raise ConfigError(f"{folder}: has no {run.status.name}: did the run never start?") from None
    except OSError as err:
        raise ConfigError(f"{run.status}: cannot be read: {err.strerror}") from err
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise ConfigError(f"{run.status}: is not the status of a run: {err}") from err


async def read_status(folder: Path) -> Snapshot:
    """Return the status of the run in a folder: from the run itself if it goes on, otherwise the status at its end."""
    saved = read_saved(folder)
    if saved.snapshot.phase in ENDED:
        return saved.snapshot
    if abs(time.time() - saved.at) > FRESH_S and not is_held_here(RunFolder(folder).lock):
        return ended_without_notice(saved.snapshot)
    with suppress(DoraError):
        live = await fetch(saved.url, timeout_s=_ANSWER_S)
        if live.run_id == saved.snapshot.run_id:
            return live
    if not was_held_here(RunFolder(folder).lock):
        return saved.snapshot
    last = read_saved(folder).snapshot  # again: it may have ended since, and said so
    return last if last.phase in ENDED else ended_without_notice(last)


def ended_without_notice(last: Snapshot) -> Snapshot:
    """Return the status of a run whose process is gone, although its last status says that it goes on."""
    ended = replace(last, phase="interrupted", reason=WITHOUT_NOTICE)
    return replace(ended, sentence=sentence(ended))


def _write(path: Path, data: bytes) -> None:
    with suppress(OSError):  # it is not essential
        files.replace(path, data)
