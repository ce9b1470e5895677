"""`dora status`: shows the state of a run, from its status endpoint."""

from __future__ import annotations

import asyncio

from rich.console import Console

from dora.status.client import fetch
from dora.status.terminal import draw


def status(url: str) -> None:
    Console().print(draw(asyncio.run(fetch(url))))
