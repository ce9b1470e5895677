"""With several workers (`pytest -n`): a file's tests run in one of them, and all whole runs in the same one.

Whole runs and real servers have processes of their own, so that two at once would only slow each other down.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Final

import pytest

_TESTS: Final = Path(__file__).parent
_WHOLE_RUNS: Final = {"sglang", "e2e", "chaos"}


@pytest.hookimpl(wrapper=True)  # before the plugin, which reads the names
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, None, None]:
    """Name the group of each test; --dist=loadgroup keeps it in one worker."""
    for item in items:
        path = item.path.relative_to(_TESTS)
        group = "runs" if path.parts[0] in _WHOLE_RUNS else path.as_posix()
        item.add_marker(pytest.mark.xdist_group(group))
    return (yield)
