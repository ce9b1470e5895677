"""Decides whether code that a run folder names may be executed: only if this user wrote its configuration or allows it.

What a folder says about itself proves nothing, because others may have made it. Each start signs the configuration
(journal/signature.py); a resume, and `dora track` with a class that the folder names, verify the signature first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

import structlog

from dora import files, foreign
from dora.config.load import dump, state_folder
from dora.config.recorded import RecordedConfig
from dora.config.schema import Config
from dora.errors import ConfigError
from dora.journal import signature
from dora.journal.reader import Journal
from dora.journal.run_folder import MAX_CONFIG_BYTES, RunFolder

log = structlog.get_logger(__name__)

#: `module:name` or `FILE.py:name`, whatever characters the file has; an address has a slash after its colon.
_FUNCTION: Final = re.compile(r"(?s:[\w./~-]+|.+\.py):[^\W\d]\w*")
#: Last part of the keys that name commands, or that change what commands do.
_OF_COMMANDS: Final = frozenset({"command", "args", "python", "import_path"})
_OF_ENVIRONMENT: Final = "engine.environment."
#: Last part of the keys of addresses that are sent answers and a key.
_OF_ADDRESSES: Final = "url"
#: Bounds on what one line shows.
_MAX_SHOWN: Final = 8
_MAX_SHOWN_CHARACTERS: Final = 80


def write_config(folder: RunFolder, config: Config, *, run_id: str) -> None:
    """Write the configuration of a start into its folder, signed; unsigned, with a warning, if there is no key."""
    home = state_folder(os.environ)
    try:
        signature.draw_user_key(home)
    except OSError as err:
        if config.trainer.token is None:
            log.warning("run_not_signed", reason=f"{home}: {err.strerror}", advice="a resume needs --trust-folder")
    signed = signature.sign(dump(config).encode(), run_id=run_id, keys=_keys(config))
    files.replace(folder.config, signed)


def require_trust(folder: RunFolder, config: Config | RecordedConfig, *, named: Iterable[str], to: str) -> None:
    """Raise ConfigError unless a start of this user has signed the folder's configuration.

    `config`: the folder's configuration with the user's overrides. `to`: what the user is about to do ("a resume").
    `named`: the commands and functions that this would execute.
    """
    signed = foreign.read(folder.config, max_bytes=MAX_CONFIG_BYTES)
    if signature.is_signed(signed, run_id=Journal(folder.journal).header.run_id, keys=_keys(config)):
        return
    items = [*named]
    shown = ", ".join(_cut(one) for one in items[:_MAX_SHOWN]) or "no command or function"
    more = f" and {len(items) - _MAX_SHOWN} more" if len(items) > _MAX_SHOWN else ""
    raise ConfigError(
        f"{folder.config}: is not signed with a key of yours; --trust-folder allows {to}, which would execute "
        f"{shown}{more}"
    )


def executed(config: Config) -> Iterator[str]:
    """Yield what a run executes or sends answers to because its configuration names it, each as `key = value`."""
    for key, value in _leaves(config.model_dump(mode="json"), prefix=""):
        is_function = isinstance(value, str) and _FUNCTION.fullmatch(value)
        last = key.rpartition(".")[2]
        names = is_function or last in _OF_COMMANDS or last == _OF_ADDRESSES or key.startswith(_OF_ENVIRONMENT)
        names = names or (key == "environment.name" and config.environment.kind != "python")  # a task set, an address
        if value and names:
            yield f"{key} = {' '.join(value) if isinstance(value, list) else value}"


def _leaves(value: Any, *, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables by dotted key. A list of texts is one value."""
    items: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(value, dict):
        items = iter(value.items())
    elif isinstance(value, list) and (not all(isinstance(one, str) for one in value) or not _is_command(prefix)):
        items = enumerate(value)
    else:
        yield prefix.removesuffix("."), value
    for name, inner in items:
        yield from _leaves(inner, prefix=f"{prefix}{name}.")


def _is_command(prefix: str) -> bool:
    return prefix.removesuffix(".").rpartition(".")[2] in _OF_COMMANDS


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[: _MAX_SHOWN_CHARACTERS - 3]}..."


def _keys(config: Config | RecordedConfig) -> list[bytes]:
    """Return the keys that this user can sign with."""
    found = [signature.token_key(config.trainer.token)] if config.trainer.token else []
    try:
        key = signature.user_key(state_folder(os.environ))
    except OSError:
        key = None
    return [key, *found] if key is not None else found
