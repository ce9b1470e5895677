"""The default job with a policy of another kind: experts stored one by one, and layers that carry state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dora.journal.run_folder import RunFolder
from tests.e2e.runs import assert_audit_clean, run_to_end, settings

pytestmark = [pytest.mark.deep, pytest.mark.timeout(400)]

POLICIES = Path(__file__).parent / "policies"


@pytest.mark.parametrize(("family", "expert_ranks"), [("qwen3_moe", 2), ("lfm2", 1)])
def test_a_policy_of_another_kind_learns_and_its_engine_and_trainer_agree(
    family: str, expert_ranks: int, tmp_path: Path
) -> None:
    result = run_to_end(
        "run",
        *settings(
            run__folder=tmp_path,
            run__steps=8,
            model__path=POLICIES / family,
            engine__instances=3,
            rollout__groups_per_step=16,
            rollout__max_new_tokens=128,
            trainer__learning_rate=5e-4,
            trainer__parallel__expert=expert_ranks,
            task__sources='[{kind="arithmetic"}]',
            eval__every=0,
            eval__sets='[{name="heldout", prompts=128}]',
            status__port=0,
        ),
    )
    assert result.returncode == 0, result.stderr
    (root,) = tmp_path.iterdir()
    folder = RunFolder(root)
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    before, after = (row["mean"] for row in rows if row["kind"] == "evaluation")
    assert after > before + 0.2
    metric = "lag=0/log_ratio_abs_mean"
    differences = [row["trainer"][metric] for row in rows if row["kind"] == "step" and metric in row["trainer"]]
    assert differences  # the first step, at least
    assert max(differences) <= 1e-5
    assert_audit_clean(folder)
