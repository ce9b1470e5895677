"""Packages that only some features need: each is an extra of DORA, with the name of the package."""

from __future__ import annotations

from importlib.util import find_spec

from dora.errors import ConfigError


def require_extra(package: str, *, field: str) -> None:
    """Raise ConfigError with the command that installs a package, if it is missing. `field`: the key that needs it."""
    if find_spec(package) is None:
        extra = package.replace("_", "-")
        raise ConfigError(f"{field}: {extra} is not installed; run pip install 'dora-rl[{extra}]'")
