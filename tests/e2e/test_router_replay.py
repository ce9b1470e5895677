"""The default job with a policy of experts whose choices are replayed, through lost servers and a killed controller."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from dora.journal.choices import UNKNOWN
from dora.journal.run_folder import RunFolder
from dora.journal.tokens import read_tokens
from tests.e2e.runs import assert_audit_clean, run_to_end, settings

pytestmark = [pytest.mark.deep, pytest.mark.timeout(400)]

POLICY = Path(__file__).parent / "policies" / "qwen3_moe"


def test_what_the_engine_chose_is_replayed(tmp_path: Path) -> None:
    result = run_to_end(
        "run",
        *settings(
            run__folder=tmp_path,
            run__steps=4,
            model__path=POLICY,
            engine__instances=3,
            rollout__groups_per_step=8,
            rollout__max_new_tokens=96,
            objective__router_replay="r3",
            trainer__dtype="bfloat16",  # coarser than the engine, whose precision a deep audit needs
            task__sources='[{kind="arithmetic"}]',
            eval__sets="[]",
            status__port=0,
        ),
    )
    assert result.returncode == 0, result.stderr
    (root,) = tmp_path.iterdir()
    folder = RunFolder(root)
    assert_audit_clean(folder)
    audited = run_to_end("audit", str(root), "--deep")
    assert audited.returncode == 0, audited.stdout
    assert re.search(
        r"experts +chosen for \d{3,} tokens, 0 of them read again by another server; not known for 0", audited.stdout
    )
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    steps = [row["trainer"] for row in rows if row["kind"] == "step"]
    assert len(steps) == 4
    assert all(step["routing_unknown_frac"] == step["routing_later_frac"] == 0 for step in steps)
    assert all(0 <= step["routing_changed_frac"] < 0.05 for step in steps)  # few, though the trainer rounds more
    assert all(1 <= step["expert_load_mean"] <= step["expert_load_max"] for step in steps)
    trained = {row["trajectory"] for row in map(json.loads, folder.trajectories.read_text().splitlines())}
    stored = read_tokens(folder.tokens, wanted=trained)
    assert stored.answers
    for trajectory, answer in stored.answers.items():
        assert answer.choices is not None, trajectory
        num_prompt = len(stored.prompts[trajectory // 8].tokens)
        marks = answer.choices.marks(np.arange(num_prompt + len(answer.tokens)))
        assert np.flatnonzero(marks == UNKNOWN).tolist() == [len(marks) - 1], trajectory
