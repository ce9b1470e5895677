"""`dora check`: validates a configuration, contacts its servers, and prints the plan."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from dora.app.check import check as check_config
from dora.config.load import load


def check(config_path: Path | None, overrides: Sequence[str], *, push: bool = False) -> None:
    uvloop.run(check_config(load(config_path, overrides, environ=os.environ), _print, push=push))
    sys.stdout.write("all checks passed; nothing was changed\n")


def _print(topic: str, text: str) -> None:
    sys.stdout.write(f"{topic:<11}{text}\n")
