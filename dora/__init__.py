"""DORA: reinforcement learning of language models, with several policy versions served at once.

Everything public is in `__all__` (docs/PYTHON.md) and is imported when it is first used, so that `import dora` takes no
time and commands import what they need.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dora.errors import ConfigError as ConfigError
    from dora.errors import DoraError as DoraError
    from dora.errors import RunFailed as RunFailed
    from dora.jobs.commands import check as check
    from dora.jobs.commands import evaluate as evaluate
    from dora.jobs.commands import simulate as simulate
    from dora.jobs.rows import Rows as Rows
    from dora.jobs.run import Run as Run
    from dora.jobs.run import attach as attach
    from dora.jobs.run import load as load
    from dora.jobs.run import resume as resume
    from dora.jobs.run import run as run

__all__ = [
    "ConfigError",
    "DoraError",
    "Rows",
    "Run",
    "RunFailed",
    "attach",
    "check",
    "evaluate",
    "load",
    "resume",
    "run",
    "simulate",
]

_HOMES = {
    "dora.errors": ("ConfigError", "DoraError", "RunFailed"),
    "dora.jobs.commands": ("check", "evaluate", "simulate"),
    "dora.jobs.rows": ("Rows",),
    "dora.jobs.run": ("Run", "attach", "load", "resume", "run"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            found = globals()[name] = getattr(import_module(home), name)
            return found
    raise AttributeError(f"module 'dora' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
