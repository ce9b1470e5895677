"""The transcript of an episode on the page, as its script makes it (run by Node.js)."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora.journal.deep import KeptPart, KeptTrajectory
from dora.status import data

PAGE = Path(data.__file__).parent / "page"
pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")


def _shown(tmp_path: Path, *samples: dict[str, Any]) -> list[str]:
    page = tmp_path / "page"
    shutil.copytree(PAGE, page)
    (page / "package.json").write_text('{"type": "module"}')
    command = ["node", str(Path(__file__).parent / "transcript.mjs"), str(page / "tokens.js")]
    return json.loads(subprocess.check_output(command, input=json.dumps(samples), text=True, timeout=60))


def _episode(**changes: Any) -> dict[str, Any]:
    kept = KeptTrajectory(
        **{"step": 1, "group": 2, "trajectory": 9, "version": 1, "reward": 0.5, "truncated": "", "prompt": "q"},
        **{"text": "", "prompt_tokens": (1,), "tokens": (1, 2, 3, 4), "logprobs": (-0.5, -0.5, 0.0, -0.5)},
        observed=((2, 3),),
        pieces=("look", " up", "7", "done"),
        turn_rewards=(0.25, 1.0),
        calls_s=(2.0, 0.5),
        parts=(
            KeptPart("policy", "look up", 2, (("look_up", '{"key":"k"}'), ("", "<img src=x>"))),
            KeptPart("environment", "7", 3),
            KeptPart("policy", "done", 4),
        ),
    )
    return {**msgspec.to_builtins(kept), "num_parts": 3, **changes}


def test_each_turn_has_its_tokens_reward_time_and_calls_and_what_was_observed_is_marked(tmp_path: Path) -> None:
    whole, resumed, cut, unrewarded = _shown(
        tmp_path, _episode(), _episode(calls_s=[0.5]), _episode(num_parts=9), _episode(turn_rewards=[], calls_s=[])
    )
    observed = "[li.observed [p Environment: 1 token observed, not trained][pre 7]]"
    assert whole == (
        "[ol.transcript "
        "[li [p Turn 1: 2 tokens, reward 0.25, answered in 2 s][pre look up]"
        '[ul [li look_up({"key":"k"})][li not a valid call: <img src=x>]]]'
        f"{observed}"
        "[li [p Turn 2: 1 token, reward 1, answered in 0.5 s][pre done]]]"
    )
    assert "answered in" not in resumed
    assert "Turn 2: 1 token, reward 1]" in resumed
    assert cut.endswith("[li.quiet and 6 more]]")
    assert "[p Turn 1: 2 tokens]" in unrewarded
