"""Loading of the `module:function` that a configuration names."""

from __future__ import annotations

import importlib
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
    except Exception as err:  # user code may raise anything
        raise ConfigError(f"{field}: cannot import '{module_name}' ({type(err).__name__}: {err})") from err
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{field}: {module.__file__} has no function '{name}'")
    return function  # type: ignore[no-any-return]
