"""Unchanged MCP servers, each in a Python of its own, whose tools a host calls."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from dora.config.schema import EnvironmentConfig, McpServerConfig
from dora.environments.api import Observation, Reset, ToolCall, Turn
from dora.environments.pool import EnvironmentPool

#: What is installed: the host's SDK with a server of the same release, and one of the release before.
TIME: Final = {
    "mcp-server-time": "mcp-server-time==2026.10.19",
    "mcp-server-time-1": "mcp-server-time==2025.9.25 mcp<2",
}
#: Calls of one turn, and what begins or is in their answers.
CALLS: Final = (
    ("get_current_time", {"timezone": "UTC"}, '"timezone": "UTC"'),
    ("get_current_time", {"timezone": "Mars"}, "error: "),
    ("convert_time", {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}, "T21:00:00+09:00"),
    ("get_current_time", {}, "error: "),
    ("no_such_tool", {}, "error: there is no tool 'no_such_tool'; there are convert_time, get_current_time"),
)


def play(server: Path, host: Path) -> str:
    """Let a host of the Python `host` use the server; return what went wrong, or ""."""
    return asyncio.run(_play(server, host))


async def _play(server: Path, host: Path) -> str:
    command = (str(server), "-m", "mcp_server_time", "--local-timezone", "UTC")
    for per_episode in (False, True):
        one = McpServerConfig(command=command, per_episode=per_episode)
        settings = EnvironmentConfig(mcp=(one,), python=str(host), call_timeout_s=60.0)
        async with EnvironmentPool(settings) as pool:
            reset = await pool.start(1, {"prompt": "p"}, source="s", name="row")
            if not isinstance(reset, Reset) or {one["function"]["name"] for one in reset.tools} != {
                "convert_time",
                "get_current_time",
            }:
                return f"it began with {reset}"
            turn = Turn(
                "", calls=tuple(ToolCall(str(n), name, arguments) for n, (name, arguments, _) in enumerate(CALLS))
            )
            said = await pool.step(1, turn)
            if not isinstance(said, Observation):
                return f"it answered {said}"
            for (name, _, wanted), message in zip(CALLS, said.messages, strict=True):
                if wanted not in message["content"]:
                    return f"{name} answered {message['content']}, not {wanted}"
            await pool.close(1)
    return ""
