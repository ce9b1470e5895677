"""Defines `dora instances`: its commands, options and help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

#: Options may appear anywhere on the line, not only before the address.
instances = typer.Typer(no_args_is_help=True, rich_markup_mode=None, context_settings={"allow_interspersed_args": True})
Instance = Annotated[str, typer.Argument(metavar="ID|URL", help="Number or address of the instance.")]


@instances.callback()
def at(
    context: typer.Context,
    url: Annotated[str, typer.Argument(metavar="STATUS_URL", help="Address of a run's status endpoint.")],
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the run's token (default: DORA_STATUS_TOKEN).")
    ] = None,
) -> None:
    """List, add, drain and remove the servers of a running job."""
    context.obj = (url, token_file)


@instances.command(name="list")
def show_instances(context: typer.Context) -> None:
    """List all instances with their version, load, and pending request."""
    from dora.cli.instances import show

    show(context.obj[0])


@instances.command()
def add(context: typer.Context, instance: Instance) -> None:
    """Add a server by its address, or recall a drained one."""
    _request(context, "add", instance)


@instances.command()
def drain(context: typer.Context, instance: Instance) -> None:
    """Stop giving an instance work.

    Its requests move to peers with free capacity, or finish there.
    """
    _request(context, "drain", instance)


@instances.command()
def remove(context: typer.Context, instance: Instance) -> None:
    """Drain an instance, then remove it from the run.

    Its server is stopped if the run started it, and left running otherwise.
    """
    _request(context, "remove", instance)


def _request(context: typer.Context, verb: str, instance: str) -> None:
    from dora.cli.instances import request

    url, token_file = context.obj
    request(url, verb, instance, token_file=token_file)
