"""Where tests run, and what is kept of a property test that fails.

With several workers (`pytest -n`) a file's tests run in one of them, unless they name a group of their own. The deep
tests of some folders have processes that keep two cores busy, so that only half of the workers run those of one kind at
the same time; the two kinds take about as long. They begin first, since they take longest. `--turn=K/N` runs the deep
tests of every N-th file only: all of them take longer than a check of each change may.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import settings

pytest_plugins = ("tests.durations",)

settings.register_profile("dora", deadline=None, print_blob=True)
settings.load_profile("dora")

#: Time limit of a deep test that names none, seconds: searches take minutes, and twice as long beside other work.
DEEP_TIMEOUT_S: Final = 900

_TESTS: Final = Path(__file__).parent
#: Folders whose deep tests use several processes at a time. Those of one kind share a worker for every two cores.
_KINDS: Final = {
    **dict.fromkeys(("e2e", "chaos"), "whole runs"),
    **dict.fromkeys(("sglang", "cluster", "containers", "slurm", "tutorials"), "servers and hosts"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "of the files with deep tests of each kind, run every N-th one from number K on"
    parser.addoption("--turn", metavar="K/N", default="0/1", help=help)


@pytest.hookimpl(wrapper=True)  # before the plugin, which reads the names
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, None, None]:
    """Name the group of each test; --dist=loadgroup keeps it in one worker."""
    groups: dict[str, dict[str, str]] = {kind: {} for kind in _KINDS.values()}
    for item in items:
        if item.get_closest_marker("deep") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(DEEP_TIMEOUT_S))
        if item.get_closest_marker("xdist_group") is not None:
            continue
        path = item.path.relative_to(_TESTS).as_posix()
        group = path
        if (kind := _kind(item)) is not None:
            number = len(groups[kind]) % max(1, (os.cpu_count() or 1) // 2)
            group = groups[kind].setdefault(path, f"{kind} {number}")
        item.add_marker(pytest.mark.xdist_group(group))
    yield
    items.sort(key=lambda item: _kind(item) is None)  # after pytest's own order
    if away := _not_their_turn(items):
        items[0].config.hook.pytest_deselected(items=away)
        left = {*away}
        items[:] = [item for item in items if item not in left]


def _not_their_turn(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the deep tests that do not run this time."""
    deep = [item for item in items if item.get_closest_marker("deep") is not None]
    files: dict[str | None, set[Path]] = {_kind(item): set() for item in deep}
    for item in deep:
        files[_kind(item)].add(item.path)
    number, _, count = items[0].config.getoption("turn").partition("/") if items else ("0", "", "1")
    chosen = {path for of_kind in files.values() for path in sorted(of_kind)[int(number) :: int(count)]}
    return [item for item in deep if item.path not in chosen]


def _kind(item: pytest.Item) -> str | None:
    is_deep = item.get_closest_marker("deep") is not None
    return _KINDS.get(item.path.relative_to(_TESTS).parts[0]) if is_deep else None


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
