"""Generates dora/completion/words.json, from which shells complete, from the command line and the schema.

    python -m dora.cli.words        (in the repository root)

Run it when either changes; tests/static/test_completion_words.py fails until you do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo, TyperInfo

from dora.cli.app import app
from dora.completion.complete import SHELLS
from dora.config.keys import first_sentence, settings
from dora.config.shorthand import REWARDS
from dora.seed.policy import SHIPPED

PATH: Final = Path("dora/completion/words.json")
#: Keys and options whose values are files or folders, though the schema has them as text.
_FILES: Final = ("model.path", "model.adapter", "objective.kl_reference", "environment.python", "environment.name",
                 "--model", "--data", "--reward")  # fmt: skip
_VALUES: Final[Mapping[str, Sequence[str]]] = {
    "model.path": tuple(SHIPPED),
    "--model": tuple(SHIPPED),
    "--reward": REWARDS,
    "completion": SHELLS,
}
_FLAG: Final = {"takes": "", "repeats": False, "values": []}


def render() -> str:
    """Return the text of words.json."""
    commands = {name: _command(name, function) for name, function in _functions(app)}
    commands |= {str(group.name): _group(group) for group in app.registered_groups if group.name}
    callback = app.registered_callback
    assert callback is not None
    assert callback.callback is not None
    found = {
        "options": {name: {"help": text["help"]} for name, text in _options(callback.callback).items()},
        "commands": dict(sorted(commands.items())),
        "settings": {
            one.key: {
                "help": one.meaning,
                "takes": "files" if one.key in _FILES or one.is_path else "text",
                "values": [*one.values, *_VALUES.get(one.key, ())],
            }
            for one in settings()
        },
    }
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def _functions(typer_app: typer.Typer) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the commands of an app by name, and those of apps that were added to it without a name."""
    for command in typer_app.registered_commands:
        if command.callback is not None and not command.hidden:
            yield command.name or command.callback.__name__.replace("_", "-"), command.callback
    for group in typer_app.registered_groups:
        if not group.name and group.typer_instance is not None:
            yield from _functions(group.typer_instance)


def _group(group: TyperInfo) -> dict[str, Any]:
    """Return a command that has commands of its own, which follow its arguments."""
    assert group.typer_instance is not None
    callback = group.typer_instance.registered_callback
    assert callback is not None
    assert callback.callback is not None
    return {**_command("", callback.callback), "values": [name for name, _ in _functions(group.typer_instance)]}


def _command(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    arguments = [_takes("", kind, info) for _, kind, info in _parameters(function) if isinstance(info, ArgumentInfo)]
    return {
        "help": first_sentence(function.__doc__),
        "options": {**_options(function), "--help": {"help": "Show all options", **_FLAG}},
        "takes": "files" if "files" in arguments else "",
        "values": [*_VALUES.get(name, ())],
    }


def _options(function: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    found = {}
    for name, kind, info in _parameters(function):
        if isinstance(info, OptionInfo) and not info.hidden:
            for spelled in _spellings(name, info):
                is_flag = kind is bool
                found[spelled] = {
                    "help": first_sentence(info.help),
                    "takes": "" if is_flag else _takes(spelled, kind, info),
                    "repeats": get_origin(kind) is list,
                    "values": [*_VALUES.get(spelled, ())],
                }
    return found


def _spellings(name: str, info: OptionInfo) -> Sequence[str]:
    """Return the names of an option; in Annotated, typer has the first one in place of a default."""
    given = [one for one in (info.default, *(info.param_decls or ())) if isinstance(one, str)]
    return given or [f"--{name.replace('_', '-')}"]


def _parameters(function: Callable[..., Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, type (without None) and description of each parameter that a user gives."""
    for name, hint in get_type_hints(function, include_extras=True).items():
        if get_origin(hint) is Annotated:
            kind, info = get_args(hint)
            yield name, next((inner for inner in get_args(kind) if get_origin(kind) is not list), kind), info


def _takes(spelled: str, kind: Any, info: Any) -> str:
    if spelled == "--set":
        return "setting"
    return "files" if kind is Path or spelled in _FILES or "DIR" in (info.metavar or "") else "text"


def main() -> None:
    """Write the file, relative to the working directory."""
    PATH.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
