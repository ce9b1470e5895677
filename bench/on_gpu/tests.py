"""The repository's tests that need a CUDA device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from xml.etree import ElementTree

from result import Row

from on_gpu.cases import ROOT, Case, Place


def cases(part: str, *, tiny: bool) -> list[Case]:
    return [Case("pytest -m gpu", run, limit_s=400.0)]


def run(place: Place) -> Iterator[Row]:
    files = sorted(str(path) for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text())
    found = place.folder / "found.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={found}", *files]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    if not found.exists():
        raise SystemExit(f"pytest: {(done.stdout + done.stderr).strip().splitlines()[-1]}")
    tests = list(ElementTree.parse(found).iter("testcase"))
    failed = [test for test in tests if test.find("failure") is not None or test.find("error") is not None]
    ran = [test for test in tests if test.find("skipped") is None]
    if not ran:
        yield Row("tests that pass", None, against=f"{len(tests)} tests, all skipped: no CUDA device here")
        return
    passed = len(ran) - len(failed)
    skipped = f"{len(tests) - len(ran)} skipped"
    yield Row("tests that pass", passed, f"of {len(tests)}", skipped, passed / len(ran), "ratio >= 1")
    for test in failed:
        reason = next(each.get("message") or "" for each in test if each.tag in ("failure", "error"))
        yield Row(f"{test.get('classname')}::{test.get('name')}", None, against=" ".join(reason.split())[:300])
