"""`dora environments`: hosts of environments on another machine."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path

from dora.cli.joining import is_address, read_token
from dora.cli.output import tell
from dora.environments.remote import carry_host, serve_hosts
from dora.errors import ConfigError


def serve(
    listen: str, *, token_file: Path | None, hosts: int, memory_mb: int, python: str, command: Sequence[str]
) -> None:
    if command and python:
        raise ConfigError("--python: has no effect with a command; remove one of them")
    token = _token(token_file)

    async def run() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await serve_hosts(
            _checked(listen, "--listen"),
            stop,
            token=token,
            max_hosts=hosts,
            memory_mb=memory_mb,
            python=python,
            command=command,
            tell=tell,
        )

    asyncio.run(run())


def connect(address: str, *, token_file: Path | None) -> None:
    asyncio.run(carry_host(_checked(address, "address"), token=_token(token_file)))


def _token(file: Path | None) -> str:
    if (token := read_token(file)) is None:
        raise ConfigError("there is no token: give both sides a file with the same one, as --token-file FILE")
    return token


def _checked(address: str, field: str) -> str:
    address = address.removeprefix("tcp://")
    if not is_address(address):
        raise ConfigError(f"{field}: {address} is not an address; write it as HOST:PORT")
    return address
