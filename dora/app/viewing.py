"""The page of a run folder, the same as the page of a running run: served, or as one file."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from dora import foreign
from dora.app.saved_status import read_saved, read_status
from dora.errors import ConfigError
from dora.journal.run_folder import RunFolder
from dora.observe.groups import GroupRow
from dora.observe.snapshot import Snapshot
from dora.status.assets import assets
from dora.status.data import RECORDED, RunData
from dora.status.page_server import PageServer
from dora.status.records import HTTP_BOUNDS, Bounds, Records
from dora.status.report import report

#: Largest report.
MAX_REPORT_BYTES: Final = 5 * 10**6
#: Bounds of a report in the first attempt; they are lowered if the report is too large.
_REPORT_ROWS: Final = 1_000
_REPORT_BYTES: Final = 2**20
_REPORT_SAMPLES: Final = 50


def folder_data(path: Path, *, bounds: Bounds = HTTP_BOUNDS) -> RunData:
    """Return the data of a run folder, current or as of the run's end; ConfigError if it is not a run folder."""
    folder = RunFolder.open(path)
    read_saved(path)

    async def snapshot() -> Snapshot:
        return await read_status(path)

    async def groups() -> Sequence[GroupRow]:
        return (await asyncio.to_thread(read_saved, path)).groups

    return RunData(snapshot=snapshot, groups=groups, records=Records(folder, bounds=bounds), folder=path)


def folder_server(path: Path, *, host: str, port: int) -> PageServer:
    """Return the server of a run folder's page."""
    return PageServer(folder_data(path), host=host, port=port, token=samples_token(path))


def samples_token(path: Path) -> str:
    """Return the token of the run's status endpoint; a random one if the folder has none."""
    with suppress(OSError, UnicodeDecodeError):
        if token := foreign.read(RunFolder(path).status_token, max_bytes=1_000).decode().strip():
            return token
    return secrets.token_hex(16)


async def make_report(path: Path) -> bytes:
    """Return the page with all its data as one HTML file of at most MAX_REPORT_BYTES."""
    for halvings in range(8):
        bounds = Bounds(
            rows=_REPORT_ROWS >> halvings, size=_REPORT_BYTES >> halvings, samples=_REPORT_SAMPLES >> halvings
        )
        data = folder_data(path, bounds=bounds)
        html = report(assets(), await data.present() | {name: await data.rows(name) for name in RECORDED})
        if len(html) <= MAX_REPORT_BYTES:
            return html
    raise ConfigError(f"{path}: has rows that are too long for a report of {MAX_REPORT_BYTES / 1e6:g} MB")
