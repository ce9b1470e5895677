"""`dora node`: joins a run, until it is over or a signal arrives."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from pathlib import Path

import uvloop

from dora.app.node import run_node_process
from dora.cli.joining import is_address, read_token
from dora.cli.output import say, tell
from dora.errors import ConfigError
from dora.node.places import NODE_NAME

#: Time in which the name of the controller must get an address, and the pause between two looks.
NAME_TIMEOUT_S = 600.0
NAME_PAUSE_S = 2.0


def node(
    controller: str | None, *, token_file: Path | None, name: str | None, address: str | None, folder: Path
) -> None:
    controllers = _controllers(controller or os.environ.get("DORA_CONTROLLER", ""))
    token = read_token(token_file)
    if token is None:
        raise ConfigError("DORA_TOKEN is not set: a node needs the token of the run; set it, or DORA_TOKEN_FILE")
    name = name or socket.gethostname()
    if not NODE_NAME.fullmatch(name):
        raise ConfigError(f"--name {name}: letters, digits, '-', '_' and '.' are allowed")
    address = address or _own_address(controllers[0])
    tell(f"node {name} at {address} looks for a controller at {', '.join(controllers)}")
    say(uvloop.run(_run(controllers, token=token, name=name, address=address, folder=folder)))


async def _run(controllers: tuple[str, ...], *, token: str, name: str, address: str, folder: Path) -> str:
    leave = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _on_signal, leave)
    return await run_node_process(controllers, leave, token=token, name=name, host=address, folder=folder, tell=tell)


def _on_signal(leave: asyncio.Event) -> None:
    """Leave at the first signal; end at the second."""
    if leave.is_set():
        raise SystemExit(130)
    leave.set()


def _controllers(text: str) -> tuple[str, ...]:
    if not text:
        raise ConfigError("DORA_CONTROLLER is not set: give the address of the controller as HOST:PORT")
    addresses = tuple(dict.fromkeys(word.strip().removeprefix("tcp://") for word in text.split(",")))
    for address in addresses:
        if not is_address(address):
            raise ConfigError(f"DORA_CONTROLLER: {address} is not an address; write it as HOST:PORT")
    return addresses


def _own_address(controller: str) -> str:
    """Return the address of the interface that leads to the controller; nothing is sent."""
    host, _, port = controller.rpartition(":")
    _await_name(host.strip("[]"))
    try:
        family, kind, _, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as err:
        raise ConfigError(f"DORA_CONTROLLER: {controller}: {err.strerror}") from err


def _await_name(host: str) -> None:
    """Wait until a name resolves: a scheduler may give the controller its name after this node has started."""
    until = time.monotonic() + NAME_TIMEOUT_S
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except socket.gaierror as err:
            if time.monotonic() > until:
                raise ConfigError(
                    f"DORA_CONTROLLER: {host}: {err.strerror} (tried for {NAME_TIMEOUT_S:g} s); correct it"
                ) from err
        if until - time.monotonic() > NAME_TIMEOUT_S - NAME_PAUSE_S:
            tell(f"{host} has no address yet; waiting")
        time.sleep(NAME_PAUSE_S)
