"""Loading of the `module:function` that a configuration names."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from dora.errors import ConfigError


def load_function(spec: str, *, field: str) -> Callable[..., Any]:
    """Import `module:function`, also from the working directory. Errors name the config key `field`."""
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{field}: expected module:function, got '{spec}'")
    if os.getcwd() not in sys.path:  # console scripts do not search the working directory
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
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
