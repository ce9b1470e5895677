"""`dora check`: validates a configuration, contacts its servers, and prints the plan; or looks for drift."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import uvloop

from dora.app.check import check as check_config
from dora.app.drift_check import train_without_learning, verdict
from dora.cli.output import say
from dora.config.load import load


def check(config_path: Path | None, overrides: Sequence[str], *, push: bool = False) -> None:
    uvloop.run(check_config(load(config_path, overrides, environ=os.environ), _print, push=push))
    say("all checks passed; nothing was changed")


def check_drift(config_path: Path | None, overrides: Sequence[str]) -> None:
    """Exit with code 1 if engine and trainer disagree."""
    found = uvloop.run(train_without_learning(load(config_path, overrides, environ=os.environ)))
    for line in found.lines():
        say(line)
    is_flat, text = verdict(found)
    say(f"{'flat' if is_flat else 'DRIFT'}: {text}")
    if not is_flat:
        raise SystemExit(1)


def _print(topic: str, text: str) -> None:
    say(f"{topic:<13}{text}")
