"""The state of the embedded engine, which its routes share, and `die`, for when it can no longer be trusted."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from dora.embedded.adapters import NamedAdapters
from dora.embedded.dialect import Dialect
from dora.embedded.gate import Gate
from dora.embedded.requests import RequestLimits
from dora.embedded.scheduler import Scheduler
from dora.embedded.text import TextCodec
from dora.errors import one_line


@dataclass(slots=True, kw_only=True)
class EngineState:
    """The state that the routes share."""

    batcher: Scheduler
    gate: Gate
    limits: RequestLimits
    dialect: Dialect
    tokenizer: TextCodec | None
    arguments: dict[str, Any]  # for /server_info
    adapters: NamedAdapters
    api_key: str | None
    label: str  # label of the last successful update, shown by /model_info; version spans use the batcher's label
    updating: bool = False  # between begin_ and end_weight_update
    groups: dict[str, Any] = field(default_factory=dict)  # process groups that transfer weights, by name
    draining: bool = False
    unhealthy: bool = False  # the last health probe timed out

    @property
    def model_path(self) -> str:
        return str(self.arguments["model_path"])


ENGINE: web.AppKey[EngineState] = web.AppKey("engine", EngineState)


def die(reason: str) -> None:
    """End the process, because its weights or its state can no longer be trusted."""
    sys.stderr.write(one_line(f"engine stopped: {reason}") + "\n")
    sys.stderr.flush()
    os._exit(1)
