"""Where tests run, and what is kept of a property test that fails.

With several workers (`pytest -n`) a file's tests run in one of them, and all whole runs in the same one: whole runs and
real servers have processes of their own, so that two at once would only slow each other down.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import settings

pytest_plugins = ("tests.durations",)

settings.register_profile("dora", deadline=None, print_blob=True)
settings.load_profile("dora")

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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep the example of a property test that fails, with the line that repeats it."""
    report = yield
    notes = "\n".join(getattr(call.excinfo.value, "__notes__", ())) if call.excinfo is not None else ""
    if "@reproduce_failure" in notes:
        kept = item.config.rootpath / ".hypothesis" / "failed" / (re.sub(r"[^\w.-]+", "-", item.nodeid) + ".txt")
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(f"{item.nodeid}\n{notes}\n")
        report.sections.append(("the example is kept", str(kept)))
    return report
