"""A resume with another number and layout of ranks: they load what others have saved, and train the same waves."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora.controller.recorder import read_rows
from dora.core import commands as cmd
from dora.core import events as ev
from dora.journal.run_folder import RunFolder
from tests.e2e.runs import Run, assert_audit_clean, events_of, orders_of, settings, small

pytestmark = [pytest.mark.deep, pytest.mark.timeout(400)]

STEPS = 9
POLICIES = Path(__file__).parent / "policies"


def trained_after(folder: RunFolder) -> list[int]:
    return [event.step for event in events_of(folder, ev.TrainerReady)]


def test_a_run_goes_on_with_fewer_ranks_and_then_with_copies_of_the_weights(tmp_path: Path) -> None:
    """Experts are divided among the first ranks, whole on the second one, and divided again."""
    model = POLICIES / "qwen3_moe"
    changes = {"trainer__ranks": 2, "trainer__parallel__expert": 2, "trainer__checkpoint_every": 2}
    with Run(*small(tmp_path, model__path=model, run__steps=STEPS, **changes)) as run:
        folder = run.folder
        run.until_trained(3)
        run.process.kill()  # the next ranks train a step again, from a checkpoint
        run.end()
    for ranks, shard_ranks, until in ((1, 1, 6), (4, 2, STEPS)):
        parallel = {"trainer__parallel__replicate": ranks // shard_ranks, "trainer__parallel__expert": shard_ranks}
        again = settings(status__port=0, trainer__ranks=ranks, **parallel)
        with Run("--resume", str(folder.root), *again) as run:
            if until < STEPS:
                run.until_trained(until)
                run.interrupt()
                assert run.end() == 130, run.told()
            else:
                assert run.end() == 0, run.told()
            assert f"trainer.ranks: {2 if ranks == 1 else 1} -> {ranks}" in run.told()
    starts = trained_after(folder)
    assert starts[0] == 0
    assert starts[1] in (2, 4)  # the newest checkpoint, of two ranks
    assert starts[2] >= 6
    trained = [group for order in orders_of(folder, cmd.ForgetGroups) for group in order.groups]
    dropped = [order.group for order in orders_of(folder, cmd.DropGroup)]
    assert sorted(trained + dropped) == [order.group for order in orders_of(folder, cmd.AdmitGroup)]
    assert [order.reason for order in orders_of(folder, cmd.FinishRun)] == [f"all {STEPS} steps are trained"]
    assert_audit_clean(folder)


def test_a_run_whose_ranks_divide_sequences_goes_on_with_ranks_that_divide_matrices(tmp_path: Path) -> None:
    changes = {"trainer__ranks": 2, "trainer__parallel__context": 2, "trainer__shared_prompts": "on"}
    with Run(*small(tmp_path, run__steps=4, trainer__checkpoint_every=1, **changes)) as run:
        folder = run.folder
        run.until_trained(2)
        run.interrupt()
        assert run.end() == 130, run.told()
    again = settings(status__port=0, trainer__parallel__context=1, trainer__parallel__tensor=2)
    with Run("--resume", str(folder.root), *again) as run:
        assert run.end() == 0, run.told()
        assert "trainer.parallel.context: 2 -> 1" in run.told()
    assert all(len(order.ranks) == 1 for order in orders_of(folder, cmd.TrainMicroBatch))  # the parts of a wave
    trained = [row["trainer"]["all/sequences"] for row in read_rows(folder.metrics, kind="step")]
    assert trained == [16] * 4  # each once
    assert [order.reason for order in orders_of(folder, cmd.FinishRun)] == ["all 4 steps are trained"]
    assert_audit_clean(folder)
