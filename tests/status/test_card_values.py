"""The values on the cards of the page, as its script makes them (run by Node.js)."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dora.status import data

PAGE = Path(data.__file__).parent / "page"
pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")


def _values(tmp_path: Path, rows: list[dict[str, Any]]) -> dict[str, str]:
    page = tmp_path / "page"
    shutil.copytree(PAGE, page)
    (page / "package.json").write_text('{"type": "module"}')
    command = ["node", str(Path(__file__).parent / "cards.mjs"), str(page / "curves.js")]
    found: dict[str, str] = json.loads(subprocess.check_output(command, input=json.dumps(rows), text=True, timeout=60))
    return found


def test_the_values_of_a_long_run_are_those_of_its_last_steps_although_fewer_are_drawn(tmp_path: Path) -> None:
    rows = [
        {"kind": "step", "step": n, "num_tokens": 1, "duration_s": 1.0, "reward_mean": n / 2, "reward_all_mean": n}
        | {"mixed": 1.0 if n >= 1_995 else 0.0}
        for n in range(2_000)
    ]
    found = _values(tmp_path, rows)
    assert found["Reward in training"] == "1,997 of all, 999 trained (last 5 steps)"
    assert found["Groups by their rewards"] == "100 % mixed (last 5 steps)"
