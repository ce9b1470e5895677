"""Defines `dora environments`: its commands, options and help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

environments = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

TokenFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="File with the token of both sides (default: DORA_TOKEN or DORA_TOKEN_FILE)."),
]


@environments.callback()
def environment_commands() -> None:
    """Run environments on another machine than the controller's."""


@environments.command()
def serve(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND...]", help="Command that starts a host, for instance in a container."),
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address to bind; port 0: any free port.")
    ] = "127.0.0.1:8425",
    token_file: TokenFile = None,
    hosts: Annotated[int, typer.Option(min=1, help="Maximum number of hosts at a time.")] = 16,
    memory_mb: Annotated[
        int,
        typer.Option(min=1, help="Limit on the memory of a host with all that it starts, and of each address space."),
    ] = 4_096,
    python: Annotated[
        str, typer.Option(metavar="FILE", help="Python interpreter of the hosts (default: this one).")
    ] = "",
) -> None:
    """Start a host of the environment for each connection of a controller, and carry its pipes.

    A controller has environment.command = ["dora", "environments", "connect", "HOST:PORT", ...].
    """
    from dora.cli.environments import serve as run

    run(listen, token_file=token_file, hosts=hosts, memory_mb=memory_mb, python=python, command=tuple(command or ()))


@environments.command()
def connect(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where `dora environments serve` listens.")],
    token_file: TokenFile = None,
) -> None:
    """Be a host of a run, in place of one on another machine; a controller starts it."""
    from dora.cli.environments import connect as run

    run(address, token_file=token_file)
