"""Loading of the `module:function` that a configuration names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from dora.errors import ConfigError


def load_function(spec: str, *, field: str) -> Callable[..., Any]:
    """Import `module:function`, also from the working directory, or `path/file.py:function`. Errors name the config key
    `field`."""
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{field}: expected module:function, got '{spec}'")
    if os.getcwd() not in sys.path:  # console scripts do not search the working directory
        sys.path.append(os.getcwd())
    try:
        module = _import(module_name)
    except (Exception, SystemExit) as err:  # user code may raise anything; a script may exit
        raise ConfigError(f"{field}: cannot import '{module_name}' ({type(err).__name__}: {err})") from err
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{field}: {getattr(module, '__file__', module_name)} has no function '{name}'")
    try:
        inspect.signature(function)
    except ValueError as err:  # of most functions written in C
        raise ConfigError(f"{field}: the arguments of {spec} are unknown; call it in a function of yours") from err
    return function  # type: ignore[no-any-return]


def _import(name: str) -> ModuleType:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = Path(name).resolve()
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    title = path.stem if known is None else f"file_{path.stem}"  # it must not replace a module of others
    spec = importlib.util.spec_from_file_location(title, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses resolve their types there
    spec.loader.exec_module(module)
    return module
