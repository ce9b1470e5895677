"""`dora instances`: lists, adds, drains and removes the servers of a running job, through its status endpoint."""

from __future__ import annotations

import asyncio
import getpass
import os
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dora.cli.output import say
from dora.config.load import load, read_secret
from dora.errors import ConfigError, one_line
from dora.observe.snapshot import InstanceRow
from dora.status.client import ask, fetch
from dora.status.server import MAX_NAME


def show(url: str) -> None:
    """Print one line per instance."""
    Console().print(draw(asyncio.run(fetch(url)).instances))


def request(url: str, verb: str, instance: str, *, token_file: Path | None) -> None:
    """Add, drain or remove an instance, and print the run's answer."""
    say(asyncio.run(ask(url, verb, instance, token=_token(token_file), by=_user())))


def draw(rows: tuple[InstanceRow, ...]) -> Table:
    """Return the table of the instances."""
    table = Table("instance", "address", "phase", "version", "requests", "KV", "asked", box=None)
    for row in sorted(rows, key=lambda row: row.instance):
        requests, kv = f"{row.residents}/{row.slots}", f"{row.kv_load / max(1, row.kv_tokens):.0%}"
        cells = (str(row.instance), row.url, row.phase, _versions(row), requests, kv, row.asked)
        table.add_row(*(Text(one_line(cell)) for cell in cells))
    return table


def _versions(row: InstanceRow) -> str:
    """Return what an instance holds and loads; each of several adapters with its requests."""
    if row.holdings:
        held = ((h, f"({h.requests})" if h.phase == "serving" else h.phase) for h in row.holdings)
        return ", ".join(f"{holding.version} {text}" for holding, text in held)
    return f"→ {row.pushing}" if row.pushing is not None else "" if row.version is None else str(row.version)


def _user() -> str:
    """Return who asks, for the journal of the run; "" if this user has no name, as in some containers."""
    try:
        return getpass.getuser()[:MAX_NAME]
    except (OSError, KeyError):
        return ""


def _token(file: Path | None) -> str:
    if file is not None:
        token = read_secret("DORA_STATUS_TOKEN", {"DORA_STATUS_TOKEN_FILE": str(file)})
    else:
        token = load(None, environ=os.environ).status.token
    if token is None:
        raise ConfigError("the run's token is needed: give --token-file RUN_FOLDER/status-token, or DORA_STATUS_TOKEN")
    return token
