"""Turns what a caller in Python gives (a file, tables, keyword arguments, functions) into a checked configuration.

Invariant: the result is what `dora run` would read from a file and `--set`; there is no setting that only Python has.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from dora.config.load import as_toml, dump, load
from dora.config.schema import Config
from dora.errors import ConfigError
from dora.functions import in_main

#: A file, the tables of one, or a configuration; None is the CPU example.
Source = str | os.PathLike[str] | Mapping[str, Any] | Config | None

_SPELLED: Final = re.compile(r"[\w-]+")
_INSTALLED: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def configuration(source: Source, settings: Mapping[str, Any]) -> Config:
    """Return the configuration with the settings applied; ConfigError has every problem that needs no model or data.

    Runs of one notebook must not meet at one port, so the status endpoint gets a free one unless tables or settings
    give it.
    """
    overrides = list(as_overrides(settings))
    tables: Path | dict[str, Any] | None
    match source:
        case Config():
            tables = tomllib.loads(dump(source))
        case Mapping():
            tables = plain(source, key="")
        case _:
            tables = Path(source) if source is not None else None
    status = tables.get("status") if isinstance(tables, dict) else None
    has_port = isinstance(status, Mapping) and "port" in status
    return load(tables, [*([] if has_port else ["status.port=0"]), *overrides], environ=os.environ)


def as_overrides(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield `a.b=value`, as for --set, for each value of nested tables. In the name of an argument, `__` is a dot:
    run__steps is run.steps. A table with a name that --set cannot spell, such as "a.b", is given as a whole."""
    named = {name.replace("__", "."): value for name, value in settings.items()}
    for name, value in _leaves(plain(named, key="")):
        yield f"{name}={as_toml(value)}"


def _leaves(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tables.items():
        if isinstance(value, dict) and all(map(_SPELLED.fullmatch, value)):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def plain(value: Any, *, key: str) -> Any:
    """Return tables, lists, texts and numbers only: paths become texts, and functions their names; None is left out.

    `key`: where the value stands, for errors.
    """
    match value:
        case Mapping():
            items = {_name(name, key): inner for name, inner in value.items() if inner is not None}
            return {name: plain(inner, key=f"{key}.{name}".lstrip(".")) for name, inner in items.items()}
        case str():
            if value.startswith("__main__:"):
                raise ConfigError(f"{key}: {in_main(value.partition(':')[2])}")
            return str.__str__(value)  # an enumeration is printed otherwise
        case bool():
            return value
        case int() | float():
            return int(value) if isinstance(value, int) else float(value)
        case os.PathLike():
            return os.fspath(value)
        case list() | tuple():
            return [plain(inner, key=f"{key}.{i}") for i, inner in enumerate(value)]
    if callable(getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:  # a number of numpy or torch
        return plain(value.item(), key=key)
    if callable(value):
        return name_of(value, key=key)
    raise ConfigError(
        f"{key}: a {type(value).__name__} is not a setting; give text, numbers, lists, tables or functions"
    )


def _name(name: object, key: str) -> str:
    if not isinstance(name, str):
        raise ConfigError(f"{key or 'configuration'}: the name of a setting is text, not {name!r}")
    return name


def name_of(function: Callable[..., Any], *, key: str) -> str:
    """Return `FILE.py:function` or `module:function`; ConfigError if another process could not import it so."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or not name.isidentifier():
        shown = name or type(function).__name__
        raise ConfigError(
            f"{key}: {shown} cannot be imported by other processes; define a function at the top level of a file"
        )
    if module == "__main__":
        raise ConfigError(f"{key}: {in_main(name)}")
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    is_own = file.endswith(".py") and "." not in module and not any(folder in file for folder in _INSTALLED)
    return f"{Path(file).resolve()}:{name}" if is_own else f"{module}:{name}"
