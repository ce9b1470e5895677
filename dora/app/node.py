"""Runs the process of a node."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dora.app.fetch import fetch_models
from dora.config.load import load
from dora.engine.engines import open_engine
from dora.node.agent import run_node
from dora.node.member import NodeSettings

#: Health checks of servers that start, one at a time for each.
MAX_CONNECTIONS = 64
REACH_TIMEOUT_S = 30.0


async def run_node_process(
    controllers: tuple[str, ...],
    leave: asyncio.Event,
    *,
    token: str,
    name: str,
    host: str,
    folder: Path,
    tell: Callable[[str], None],
) -> str:
    """Run until the run is over, or until a leaving node is let go; return why."""
    config = load(None, environ=os.environ)
    async with open_engine(config, max_connections=MAX_CONNECTIONS) as engine:
        settings = NodeSettings(
            name=name,
            host=host,
            folder=folder,
            token=token,
            api_key=config.engine.api_key,
            find_models=partial(fetch_models, tell=tell),
            is_well=partial(engine.is_alive, timeout_s=REACH_TIMEOUT_S),
            tell=tell,
        )
        return await run_node(settings, controllers, leave)
