"""A trainer at work beside measured servers: when there is one, and that its processes end."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from dora.app.trainer_load import shares_cores, working_trainer
from dora.config.load import load
from dora.errors import RemoteError
from dora.seed.policy import model_folder

ONE_RANK = ("trainer.ranks=1", "trainer.micro_batch_tokens=512")


@pytest.mark.parametrize(
    ("changes", "shares"),
    [
        ([], True),
        (["rollout.max_staleness=0"], False),  # it waits while the servers work
        (["trainer.device=cuda"], False),
        (["engine.device=cuda"], False),
        (['engine.urls=["http://other:1"]', "engine.instances=0", "rollout.max_staleness=0"], False),
    ],
)
def test_a_trainer_works_beside_servers_that_share_its_cores(changes: list[str], shares: bool) -> None:
    assert shares_cores(load(None, changes, environ={})) is shares


@pytest.mark.deep
async def test_its_processes_train_until_the_context_ends() -> None:
    before = {process.pid for process in multiprocessing.active_children()}
    async with working_trainer(load(None, ONE_RANK, environ={}), model_folder("seed")):
        [rank] = [process for process in multiprocessing.active_children() if process.pid not in before]
        assert rank.is_alive()
    assert not rank.is_alive()


@pytest.mark.deep
async def test_a_rank_that_cannot_train_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RemoteError, match="rank-0 of the trainer ended before it trained; its output says why"):
        async with working_trainer(load(None, ONE_RANK, environ={}), tmp_path):
            pytest.fail("it cannot train")
    assert str(tmp_path) in capfd.readouterr().err
