"""Commands print through dora/cli/output.py alone, where text of others loses its control characters."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CLI = Path("dora/cli")
PRINTS = re.compile(r"\bstd(?:out|err)\.(?:write|buffer)|(?<!\.)\bprint\(|typer\.echo|click\.echo")


@pytest.mark.parametrize("path", sorted(CLI.glob("*.py")), ids=lambda path: path.name)
def test_a_command_prints_through_the_one_place(path: Path) -> None:
    found = [line.strip() for line in path.read_text().splitlines() if PRINTS.search(line)]
    assert not found or path.name == "output.py"
