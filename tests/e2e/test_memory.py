"""A rank runs out of memory: the error names what to change, and a resume with that change continues."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dora.core.events import StepTrained, VersionPublished
from dora.journal.run_folder import RunFolder
from tests.e2e.runs import assert_audit_clean, assert_one_clear_error, events_of, run_to_end, settings, small

pytestmark = pytest.mark.deep

RANK = Path(__file__).parents[1] / "trainer" / "starved_rank.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(RANK)]


@pytest.mark.timeout(300)
def test_a_run_out_of_memory_is_resumed_with_a_smaller_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains step 0 again, from which it differs by rounding."""
    monkeypatch.setenv("STARVED_STEP", "1")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # what step 0 frees goes back to the system
    job = small(
        tmp_path, rollout__strategy="sync", rollout__groups_per_step=16, rollout__group_size=8,
        rollout__max_new_tokens=128, task__sources='[{kind="arithmetic"}]', trainer__learning_rate=5e-4,
        trainer__command=json.dumps(TORCHRUN),
    )  # fmt: skip
    failed = run_to_end("run", *job)
    (root,) = tmp_path.iterdir()
    folder = RunFolder(root)
    says = (
        r"trainer rank 0: out of memory on cpu \(.*\) in a micro-batch of \d+ tokens, of which the longest "
        r"sequence has \d+; lower trainer.micro_batch_tokens, which is 4096, .*; continue with dora run --resume"
    )
    assert_one_clear_error(failed, code=1, says=says)
    resumed = run_to_end("run", "--resume", str(root), *settings(status__port=0, trainer__micro_batch_tokens=160))
    assert resumed.returncode == 0, resumed.stderr
    assert "changed: trainer.micro_batch_tokens: 4096 -> 160" in resumed.stdout + resumed.stderr
    assert [event.step for event in events_of(folder, StepTrained)] == [0, 0, 1]
    assert any(event.differs for event in events_of(folder, VersionPublished))
    assert_audit_clean(folder)
