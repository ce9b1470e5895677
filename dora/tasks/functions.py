"""Find the `module:function` that a configuration names."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from dora.errors import ConfigError


def load_function(spec: str, *, field: str) -> Callable[..., Any]:
    """Import `module:function`, the working directory included; `field` is the config key an error names."""
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{field}: '{spec}' is not module:function")
    if os.getcwd() not in sys.path:  # an installed command does not search where it was called
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as err:  # a module of the user may fail in any way
        raise ConfigError(f"{field}: cannot import '{module_name}' ({type(err).__name__}: {err})") from err
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{field}: {module.__file__} has no function '{name}'")
    return function  # type: ignore[no-any-return]
