"""Both ends of the connection between the controller and its nodes: a ROUTER socket, and a DEALER for each address.

Invariant: frames come only from holders of the run's token (`curve`), and are bounded in size and number. A message
that violates the protocol is refused with a reason, and is not passed on.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final

import zmq
import zmq.asyncio

from dora.errors import ConfigError, ProtocolError
from dora.transport.codec import decode, encode
from dora.transport.controller_end import CONNECT_MS, HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
from dora.transport.curve import guard_controller, guard_trainer
from dora.transport.node_messages import FromNode, Rejected, ToNode

#: Reports and orders are states: of those that wait, the last one counts, so few are kept.
_QUEUED: Final = 64
#: The manifests of the live versions are the longest part of orders.
MAX_TO_NODE_BYTES: Final = 1 << 24


class NodeHub:
    """The controller's end. `receive` yields (identity of the node's process, message)."""

    def __init__(self, *, address: str, token: str) -> None:
        self._address = address
        self._context = zmq.asyncio.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        guard_controller(self._router, token)
        _set_up(self._router)

    def start(self) -> str:
        """Bind; return the address with the real port."""
        try:
            self._router.bind(self._address)
        except zmq.ZMQError as err:
            self.close()
            raise ConfigError(f"nodes.address: cannot listen on {self._address}: {err}; choose another port") from err
        return self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    async def receive(self) -> AsyncIterator[tuple[bytes, FromNode]]:
        while True:
            identity, *frames = await self._router.recv_multipart()
            try:
                message: FromNode = decode(frames, FromNode)
            except ProtocolError as err:
                await self.send(identity, Rejected(reason=f"{err}; is it the same version of DORA?"))
            else:
                yield identity, message

    async def send(self, identity: bytes, message: ToNode) -> None:
        """Send a message, or drop it if the node is not connected."""
        await self._router.send_multipart([identity, *encode(message)])

    def close(self) -> None:
        self._router.close()
        self._context.term()


class NodeEnd:
    """A node's end: one connection to each address at which a controller may be."""

    def __init__(self, addresses: tuple[str, ...], *, token: str) -> None:
        self._context = zmq.asyncio.Context()
        self._poller = zmq.asyncio.Poller()
        self._dealers: dict[zmq.asyncio.Socket, str] = {}
        for address in addresses:
            dealer = self._context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.ROUTING_ID, secrets.token_hex(16).encode())
            dealer.setsockopt(zmq.RECONNECT_IVL, 100)
            dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
            dealer.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
            guard_trainer(dealer, token, max_bytes=MAX_TO_NODE_BYTES)
            _set_up(dealer)
            try:
                dealer.connect(f"tcp://{address}")
            except zmq.ZMQError as err:
                dealer.close()
                self.close()
                raise ConfigError(f"DORA_CONTROLLER: {address}: {err}; write it as HOST:PORT") from err
            self._poller.register(dealer, zmq.POLLIN)
            self._dealers[dealer] = address

    @property
    def addresses(self) -> list[str]:
        return [*self._dealers.values()]

    async def receive(self, timeout_s: float) -> list[tuple[str, ToNode]]:
        """Return what has arrived, with the address that it came from; none after `timeout_s`.

        Messages of another release are dropped.
        """
        ready: list[tuple[Any, int]] = await self._poller.poll(1000 * timeout_s)
        found: list[tuple[str, ToNode]] = []
        for dealer, _ in ready:
            with suppress(ProtocolError):
                found.append((self._dealers[dealer], decode(await dealer.recv_multipart(), ToNode)))
        return found

    async def send(self, address: str, message: FromNode) -> None:
        """Send a message, or drop it while that controller is not connected."""
        [dealer] = [found for found, known in self._dealers.items() if known == address]
        with suppress(zmq.Again):
            await dealer.send_multipart(encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        for dealer in self._dealers:
            dealer.close()
        self._context.term()


def _set_up(socket: zmq.asyncio.Socket) -> None:
    for option, value in (
        (zmq.SNDHWM, _QUEUED),
        (zmq.RCVHWM, _QUEUED),
        (zmq.LINGER, 1_000),
        (zmq.IMMEDIATE, 1),
        (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
        (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
    ):
        socket.setsockopt(option, value)
