"""`dora check`: validate everything, reach every server, print the plan."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from dora.app.check import check as check_config
from dora.config.load import load


def check(config_path: Path | None, overrides: Sequence[str], *, push: bool = False) -> None:
    """The command."""
    uvloop.run(check_config(load(config_path, overrides, environ=os.environ), _say, push=push))
    sys.stdout.write("everything is in order; nothing was changed\n")


def _say(what: str, text: str) -> None:
    sys.stdout.write(f"{what:<11}{text}\n")
