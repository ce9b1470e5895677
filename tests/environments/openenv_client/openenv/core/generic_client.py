"""What `dora.environments.openenv` uses of openenv-core 0.3, which DORA does not depend on, over the same WebSocket.

`.ci/clients` uses the package itself.
"""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import aiohttp


class ConnectionClosedError(Exception):
    """As that of websockets."""


class GenericEnvClient:
    def __init__(
        self, base_url: str, connect_timeout_s: float, *, message_timeout_s: float, max_message_size_mb: float
    ) -> None:
        self._url = base_url.replace("http", "ws", 1) + "/ws"
        self._max_size = int(max_message_size_mb * 2**20)

    async def connect(self) -> None:
        self._session = aiohttp.ClientSession()
        try:
            self._socket = await self._session.ws_connect(self._url, max_msg_size=self._max_size)
        except aiohttp.ClientError as err:
            await self._session.close()
            raise ConnectionError(f"Failed to connect to {self._url}: {err}") from err

    async def disconnect(self) -> None:
        with suppress(ConnectionError):
            await self._socket.send_json({"type": "close"})
        await self._socket.close()
        await self._session.close()

    async def reset(self, **given: Any) -> Any:
        return await self._exchange("reset", given)

    async def step(self, action: dict[str, Any]) -> Any:
        return await self._exchange("step", action)

    async def _exchange(self, kind: str, data: dict[str, Any]) -> Any:
        await self._socket.send_json({"type": kind, "data": data})
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise ConnectionClosedError(str(message.type))
        reply = message.json()
        if reply["type"] == "error":
            raise RuntimeError(f"Server error: {reply['data']['message']} (code: {reply['data']['code']})")
        told = reply["data"]
        return SimpleNamespace(observation=told["observation"], reward=told["reward"], done=told["done"])
