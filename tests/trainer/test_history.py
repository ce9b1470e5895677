"""How a rank treats waves and versions of a history other than its own; one process plays all ranks."""

from __future__ import annotations

import msgspec
import pytest
import torch.distributed as dist

from dora.app.settings import RankPaths, configure_message
from dora.config.load import load
from dora.errors import ProtocolError
from dora.journal.run_folder import RunFolder
from dora.seed.policy import path as seed_path
from dora.trainer.packing import Layout
from dora.trainer.step import Trainer
from dora.transport.messages import MicroBatchDone, RankSpans, empty_micro_batch
from dora.weights.store import VersionStore, checksum_of_files
from tests.trainer.publishing import load_policy, make_publisher, make_saver

CHAIN = "0a1b2c3d4e5f"


@pytest.fixture
def _single_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class End:
    """Keeps the messages of the rank."""

    def __init__(self):
        self.sent = []

    def send(self, message):
        self.sent.append(message)


@pytest.mark.usefixtures("_single_rank")
def test_a_wave_of_another_history_is_not_trained(tmp_path):
    order = configure_message(
        load(None, [], environ={}),
        RankPaths.here(RunFolder(tmp_path), model=seed_path(), memory_root=tmp_path / "memory"),
        run_id="test",
        may_start_over=True,
        chain=CHAIN,
        epoch=0,
        max_staleness=1,
    )
    end = End()
    policy = load_policy(seed_path())
    store = VersionStore(memory_root=tmp_path / "memory", durable_root=tmp_path / "durable")
    publisher = make_publisher(policy, seed_path(), store)
    trainer = Trainer(order, end=end, policy=policy, layout=Layout(), publisher=publisher, saver=make_saver(order))
    batch = empty_micro_batch(step=0, index=0, last=False, group_size=2)
    with pytest.raises(ProtocolError, match="micro-batch 0/0 belongs to another history: it follows another"):
        trainer.train(msgspec.structs.replace(batch, parent="another"))
    assert end.sent == []
    trainer.train(msgspec.structs.replace(batch, parent=CHAIN))
    assert [type(message) for message in end.sent] == [RankSpans, MicroBatchDone]


@pytest.mark.usefixtures("_single_rank")
def test_a_version_recomputed_with_other_bytes_keeps_the_first_and_reports_the_difference(tmp_path):
    store = VersionStore(memory_root=tmp_path / "memory", durable_root=tmp_path / "durable")
    said, failures = [], []
    policy = load_policy(seed_path())
    publisher = make_publisher(policy, seed_path(), store, report=said.append, on_failure=failures.append)
    for change in (0.0, 0.0, 1.0):
        publisher.until_written()
        next(iter(policy.shards().values())).add_(change)
        publisher.publish(4, chain=CHAIN)
    publisher.close()
    assert failures == []
    first, again, other = said
    assert again == first
    assert first.differs == ""
    assert len(other.differs) == len(checksum_of_files(first.files))
    assert other.differs != checksum_of_files(first.files)
    assert other.files == first.files == dict(store.manifest(4).files)
