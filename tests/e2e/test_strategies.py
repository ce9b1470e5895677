"""The four strategies on one small job: audited, and comparable prompt by prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora.core import commands as cmd
from dora.journal.run_folder import RunFolder
from tests.e2e.runs import assert_audit_clean, orders_of, run_to_end, small

pytestmark = [pytest.mark.deep, pytest.mark.timeout(300)]

STEPS = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFolder]:
    """A run of each, with the same seed, K = 0 and the filter off; made when first asked for."""
    return {}


@pytest.fixture
def folder(folders: dict[str, RunFolder], tmp_path_factory: pytest.TempPathFactory, strategy: str) -> RunFolder:
    if strategy not in folders:
        folders[strategy] = run(tmp_path_factory.mktemp(strategy), strategy)
    return folders[strategy]


def run(parent: Path, strategy: str) -> RunFolder:
    result = run_to_end(
        "run", *small(parent, rollout__strategy=strategy, run__steps=STEPS, run__seed=7, engine__instances=2)
    )
    assert result.returncode == 0, result.stderr
    (folder,) = parent.iterdir()
    return RunFolder(folder)


@pytest.mark.parametrize("strategy", ["sync", "periodic", "one_step_off", "dora"])
def test_a_strategy_trains_all_steps_and_is_audited_clean(folder: RunFolder, strategy: str) -> None:
    committed = orders_of(folder, cmd.CommitGroup)
    assert [order.step for order in committed] == [step for step in range(STEPS) for _ in range(4)]
    bound = 1 if strategy == "one_step_off" else 0
    assert max(order.step - order.version for order in committed) == bound
    assert_audit_clean(folder)


@pytest.mark.parametrize("strategy", ["sync", "dora"])
def test_every_strategy_without_staleness_trains_the_same_prompts_in_every_step(
    folder: RunFolder, strategy: str
) -> None:
    """Prompt i of the stream is group i, so equal group numbers under one seed are equal prompts."""
    by_step = [{o.group for o in orders_of(folder, cmd.CommitGroup) if o.step == s} for s in range(STEPS)]
    assert by_step == [{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}]


def test_equal_seeds_give_equal_prompts(folders: dict[str, RunFolder]) -> None:
    from dora.journal.tokens import read_tokens

    assert {"sync", "dora"} <= folders.keys(), "the tests above made them"
    prompts = {
        name: {group: prompt.tokens.tolist() for group, prompt in read_tokens(folders[name].tokens).prompts.items()}
        for name in ("sync", "dora")
    }
    assert prompts["sync"] == prompts["dora"]
    assert len(prompts["sync"]) == 4 * STEPS
