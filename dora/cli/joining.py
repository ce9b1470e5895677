"""What a process needs to join others: their address, and the token that proves that it may."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from dora.config.load import read_secret

MAX_PORT: Final = 65_535
_ADDRESS: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:,/]+):\d{1,5}")


def is_address(text: str) -> bool:
    """Return whether a text is HOST:PORT."""
    return bool(_ADDRESS.fullmatch(text)) and int(text.rpartition(":")[2]) <= MAX_PORT


def read_token(file: Path | None) -> str | None:
    """Return the token in this file, or the one of the environment; ConfigError if a file cannot be read."""
    environ = {**os.environ, "DORA_TOKEN": "", "DORA_TOKEN_FILE": str(file)} if file else os.environ
    return read_secret("DORA_TOKEN", environ)
