"""Says in one line what is wrong with a command line that typer refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import typer

#: The base of all of typer's errors about a command line; it has no public name.
UsageError: Any = typer.BadParameter.__bases__[0]
_EXTRA: Final = re.compile(r"Got unexpected extra argument\S* \((.*)\)")


def is_request_for_help(err: Any) -> bool:
    """Return whether nothing was given to a command that has commands, which then shows what there is."""
    return type(err).__name__ == "NoArgsIsHelpError"


def describe(err: Any) -> str:
    """Return the message of a `UsageError`, with what may have been meant."""
    text = str(err.format_message()).strip()
    if (option := getattr(err, "option_name", None)) and (keys := _keys_named(option)):
        return f"{text}; a setting is given as --set {' or --set '.join(f'{key}=VALUE' for key in keys)}"
    if (extra := _EXTRA.match(text)) and any(Path(word).exists() for word in extra[1].split()):
        text = f"{text.rstrip('.')}: give one path; did a pattern match several?"
    command = err.ctx.command_path if err.ctx is not None else "dora"
    return f"{text.rstrip('.')}; see {command} --help"


def _keys_named(option: str) -> list[str]:
    """Return the settings whose last part an option looks like, such as run.steps for --steps."""
    from dora.completion.complete import words

    name = option.lstrip("-").replace("-", "_")
    return [key for key in words()["settings"] if key.rpartition(".")[2] == name][:3]
