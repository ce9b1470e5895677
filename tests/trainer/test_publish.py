"""Publication beside training: what waits for it, and what happens if a rank, or the disk, does not take part."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from conftest import SETTINGS, in_history, make_batch, make_groups
from safetensors.torch import load_file
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from dora.errors import DoraError
from dora.seed.policy import path as seed_path
from dora.trainer import buckets, meeting
from dora.trainer.model import Policy
from dora.trainer.packing import Layout
from dora.trainer.parts import Parts
from dora.trainer.publish import Publisher
from dora.trainer.step import Trainer
from dora.transport.messages import Configure, VersionWritten
from dora.weights.store import VersionStore
from tests.trainer.publishing import Unpublished, gather, load_policy, make_publisher, make_saver

UPDATES = 2


@pytest.fixture
def policy() -> Iterator[Policy]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield load_policy(seed_path())
    dist.destroy_process_group()


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    return VersionStore(memory_root=tmp_path / "memory", durable_root=tmp_path / "durable")


class Watched(Unpublished):
    """Notes which versions were published, and whether the weights changed before they were written."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._published: dict[str, Tensor] = {}
        self.versions: list[int] = []
        self.waits = 0  # in which the weights were still those of the last version
        self.changes = 0  # between versions

    def publish(self, version: int, *, chain: str, proof: None = None) -> None:
        self.changes += bool(self._published) and not self._is_unchanged()
        self.versions.append(version)
        self._published = {name: shard.clone() for name, shard in self._policy.shards().items()}

    def until_written(self) -> None:
        self.waits += self._is_unchanged()

    def _is_unchanged(self) -> bool:
        shards = self._policy.shards()
        return all(torch.equal(shards[name], tensor) for name, tensor in self._published.items())


class End:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: object) -> None:
        self.sent.append(message)


def test_weights_change_only_after_the_wait_for_their_writers(policy: Policy, tmp_path: Path) -> None:
    order = Configure(
        run_id="", model_path=str(seed_path()), settings=msgspec.structs.replace(SETTINGS, updates=UPDATES),
        memory_root=str(tmp_path / "memory"), durable_root=str(tmp_path / "durable"), checkpoints=str(tmp_path),
        resume_from=(), may_start_over=False, chain="", epoch=0, fence="",
    )  # fmt: skip
    watched = Watched(policy)
    saver = make_saver(order)
    trainer = Trainer(order, end=End(), policy=policy, layout=Layout(), publisher=watched, saver=saver)  # type: ignore[arg-type]
    trainer.start()
    for step in range(3):
        answers = make_groups(2, version=step, seed=step)
        for update in range(UPDATES):
            last = update == UPDATES - 1
            batch = in_history(make_batch(answers, step=step, index=update, last=last))
            batch = msgspec.structs.replace(batch, update=update, closes=True, parent=trainer._chain)
            trainer.train(batch)
    assert watched.versions == [0, 1, 2, 3]
    assert watched.changes == 3
    assert watched.waits == 3  # in the first update of a step; in the second, the weights are other ones


def test_a_version_has_the_weights_of_its_moment_whatever_comes_after_the_wait(
    policy: Policy, store: VersionStore
) -> None:
    publisher = make_publisher(policy, seed_path(), store)
    before = gather(policy)
    publisher.publish(0, chain="")
    publisher.until_written()
    for shard in policy.shards().values():
        shard.zero_()
    publisher.close()
    written = load_file(store.folder(0) / "model.safetensors")
    assert written.keys() == before.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in before.items())


def test_a_thread_converts_no_more_than_a_bucket_at_a_time(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 4_096)
    for piece in Parts(policy, dtype="float32", writers=1).pieces():
        assert piece.rows.numel() * 4 <= 4_096 or len(piece.rows) == 1


def test_a_rank_that_does_not_write_its_part_is_named(
    policy: Policy, store: VersionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "PEER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(meeting, "ATTEMPT_S", 0.05)
    failures: list[BaseException] = []
    publisher = Publisher(
        store, policy=policy, model_path=seed_path(), dtype="float32", words=HashStore(), writers=2,
        report=lambda _: None, on_failure=failures.append,
    )  # fmt: skip
    publisher.publish(0, chain="")
    with pytest.raises(DoraError, match=r"^rank 1 has not reached 'written of publication 1' in 0\.2 s"):
        publisher.close()
    assert len(failures) == 1
    assert store.live() == []


def test_room_is_made_for_all_files_before_anything_is_written(
    policy: Policy, store: VersionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first folder is full, so the version is in the other one."""
    allocate = os.posix_fallocate

    def full(file: int, offset: int, length: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{file}")).is_relative_to(store.memory_root):
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(file, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    reports: list[VersionWritten] = []
    publisher = make_publisher(policy, seed_path(), store, report=reports.append)
    publisher.publish(0, chain="")
    publisher.close()
    assert (store.live(), store.durable()) == ([], [0])
    assert [report.version for report in reports] == [0]
    assert list(store.memory_root.iterdir()) == []
