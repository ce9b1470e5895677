"""The probe tells the engine's mismatch from the drift of the weights, and leaves the policy as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import SETTINGS, Answer, make_batch, make_groups
from torch import Tensor

from dora.app.settings import trainer_settings
from dora.config.schema import Config
from dora.trainer import model as policy_module
from dora.trainer.batch import pack
from dora.trainer.context import make_context
from dora.trainer.logprobs import logprobs
from dora.trainer.meshes import make_mesh
from dora.trainer.metrics import PROBED
from dora.trainer.model import Policy
from dora.trainer.packing import PACKED, Layout
from dora.trainer.probe import Probe
from dora.transport.messages import MicroBatch
from dora.weights.store import VersionStore
from tests.trainer.publishing import write_version

RANKS = 2
NOISE = 0.2


def publish(store: VersionStore, policy: Policy, model_path: Path, *, version: int) -> None:
    """A version that all ranks write."""
    staged = store.memory_root / "staged"
    write_version(policy, model_path, staged, dtype="float32")
    if dist.get_rank() == 0:
        store.seal(version, staged)
    dist.barrier()


def move(policy: Policy) -> None:
    """Other weights, as after some updates."""
    policy.reshard()
    for name, shard in policy.shards().items():
        shard.add_(0.05 * torch.randn(shard.shape, generator=torch.Generator().manual_seed(len(name))))


def batch_of(*answers: list[Answer], step: int) -> MicroBatch:
    return make_batch([answer for group in answers for answer in group], step=step, index=0, last=True)


def compute(policy: Policy, batch: MicroBatch) -> Tensor:
    """The log-probs of all trained tokens of a micro-batch, by a pass of its own."""
    advantages = np.zeros((len(batch.lengths), 1))
    row, _ = pack(batch, range(len(batch.lengths)), advantages_nU=advantages, layout=Layout(), device=policy.device)
    with torch.no_grad():
        found = logprobs(policy.model, row, temperature=SETTINGS.temperature)[0]
    policy.reshard()
    return found


def make_probe(policy: Policy, store: VersionStore, layout: Layout = PACKED) -> Probe:
    settings = msgspec.structs.replace(SETTINGS, probe_tokens=10_000)
    return Probe(store, policy=policy, layout=layout, settings=settings)


def add(probe: Probe, batch: MicroBatch, current_P: Tensor, behavior_P: Tensor) -> None:
    probe.add(batch, range(len(batch.lengths)), current_P, behavior_P)


def noise_like(values_P: Tensor) -> Tensor:
    return NOISE * torch.randn(len(values_P), generator=torch.Generator().manual_seed(7))


def k3(difference_P: Tensor) -> float:
    wide = difference_P.double()
    return float((wide.exp() - 1 - wide).mean())


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def policy(one_rank: None, model_path: Path) -> Policy:
    return Policy(model_path, mesh=make_mesh("cpu"), dtype=torch.float32)


@pytest.fixture
def store(tmp_path: Path, policy: Policy, model_path: Path) -> VersionStore:
    """Has version 0, the weights of `policy`."""
    store = VersionStore(memory_root=tmp_path / "memory", durable_root=tmp_path / "durable")
    publish(store, policy, model_path, version=0)
    return store


BATCH = batch_of(make_groups(3, version=0, seed=1), step=1)


def test_noise_of_the_engine_is_in_its_mismatch_and_not_in_the_drift(policy: Policy, store: VersionStore) -> None:
    sampled_P = compute(policy, BATCH)
    noise_P = noise_like(sampled_P)
    probe = make_probe(policy, store)
    add(probe, BATCH, sampled_P, sampled_P + noise_P)
    found = probe.close()
    assert found["engine_mismatch_k3"] == pytest.approx(k3(-noise_P), rel=1e-4)
    assert found["version_drift_k3"] == pytest.approx(0.0, abs=1e-9)
    assert found["version_drift_mean"] == pytest.approx(0.0, abs=1e-6)
    assert found["probe_tokens"] == len(sampled_P)
    assert found.keys() == PROBED.keys()


def test_other_weights_are_in_the_drift_and_not_in_the_mismatch(policy: Policy, store: VersionStore) -> None:
    sampled_P = compute(policy, BATCH)
    move(policy)
    current_P = compute(policy, BATCH)
    probe = make_probe(policy, store)
    add(probe, BATCH, current_P, sampled_P)
    found = probe.close()
    assert found["engine_mismatch_k3"] == pytest.approx(0.0, abs=1e-9)
    assert found["version_drift_k3"] == pytest.approx(k3(current_P - sampled_P), rel=1e-4)
    assert found["version_drift_k3"] > 1e-4
    assert found["version_drift_mean"] == pytest.approx(float((current_P - sampled_P).mean()), rel=1e-3)


def test_the_policy_is_the_same_to_the_bit_with_its_gradients(policy: Policy, store: VersionStore) -> None:
    move(policy)
    current_P = compute(policy, BATCH)
    loss = logprobs(policy.model, pack_all(BATCH), temperature=1.0)[0].sum()
    loss.backward()
    before = {name: tensor.clone() for name, tensor in policy.loaded().items()}
    gradients = {name: tensor.clone() for name, tensor in policy.gradients().items()}
    probe = make_probe(policy, store)
    add(probe, BATCH, current_P, current_P)
    assert probe.close()["engine_mismatch_k3"] > 1e-4  # so that it had other weights meanwhile
    for name, tensor in policy.loaded().items():
        assert torch.equal(tensor, before[name]), name
    for name, tensor in policy.gradients().items():
        assert torch.equal(tensor, gradients[name]), name
    assert torch.equal(compute(policy, BATCH), current_P)


def pack_all(batch: MicroBatch):
    advantages = np.zeros((len(batch.lengths), 1))
    return pack(
        batch, range(len(batch.lengths)), advantages_nU=advantages, layout=Layout(), device=torch.device("cpu")
    )[0]


def test_a_deleted_version_is_skipped_and_counted(
    policy: Policy, store: VersionStore, capfd: pytest.CaptureFixture[str]
) -> None:
    sampled_P = compute(policy, BATCH)
    probe = make_probe(policy, store)
    add(probe, BATCH, sampled_P, sampled_P)
    store.discard(0)
    before = {name: tensor.clone() for name, tensor in policy.loaded().items()}
    assert probe.close() == {"probe_tokens": 0, "probe_skipped": 1}
    assert "the probe of version 0 is skipped: version 0 is complete neither in" in capfd.readouterr().err
    for name, tensor in policy.loaded().items():
        assert torch.equal(tensor, before[name]), name
    assert probe.close() == {"probe_tokens": 0, "probe_skipped": 0}  # the next step begins without its sequences


def test_only_the_smallest_version_is_probed_and_fresh_tokens_count_for_the_engine(
    policy: Policy, store: VersionStore, model_path: Path
) -> None:
    oldest, middle, fresh = (make_groups(1, version=version, seed=5 + version) for version in (0, 1, 2))
    batch = batch_of(middle, oldest, fresh, step=2)
    sampled_P = compute(policy, batch)
    counts = [sum(len(answer.logprobs) for answer in group) for group in (middle, oldest, fresh)]
    noise_P = noise_like(sampled_P)
    noise_P[: counts[0]] = 5.0  # of the version that is not probed
    probe = make_probe(policy, store)
    add(probe, batch, sampled_P, sampled_P + noise_P)
    found = probe.close()
    assert found["probe_tokens"] == counts[1]
    assert found["engine_mismatch_k3"] == pytest.approx(k3(-noise_P[counts[0] :]), rel=1e-4)


@pytest.mark.parametrize("padded", [False, True])
def test_sequences_are_cut_to_the_budget_at_their_end(policy: Policy, store: VersionStore, padded: bool) -> None:
    budget = 30
    assert len(BATCH.tokens) > 2 * budget
    sampled_P = compute(policy, BATCH)
    settings = msgspec.structs.replace(SETTINGS, probe_tokens=budget)
    probe = Probe(store, policy=policy, layout=Layout(padded=padded), settings=settings)
    add(probe, BATCH, sampled_P, sampled_P)
    found = probe.close()
    mask = BATCH.loss_mask[:budget]
    assert found["probe_tokens"] == mask.sum()
    assert found["engine_mismatch_k3"] == pytest.approx(0.0, abs=1e-9)


def test_it_is_off_on_request_and_where_answers_have_tokens_of_several_versions() -> None:
    def budget(strategy: str, *, every: int = 4) -> int:
        config = Config.model_validate({"rollout": {"strategy": strategy}, "trainer": {"probe_every": every}})
        return trainer_settings(config, max_staleness=2).probe_tokens

    budgets = {strategy: budget(strategy) for strategy in ("dora", "one_step_off", "partial", "partial_sync")}
    assert budgets == {"dora": 512, "one_step_off": 512, "partial": 0, "partial_sync": 0}
    assert budget("dora", every=0) == 0


# ---- two ranks ------------------------------------------------------------------------------------------------------


def check_two_ranks(folder: Path, model_path: Path, rank: int) -> None:
    """Only the last rank has sequences; then rank 0 has some of a later version, which are not probed; then none."""
    policy = Policy(model_path, mesh=make_mesh("cpu"), dtype=torch.float32)
    store = VersionStore(memory_root=folder / "memory", durable_root=folder / "durable")
    publish(store, policy, model_path, version=0)
    sampled_P = compute(policy, BATCH)
    move(policy)
    current_P = compute(policy, BATCH)
    before = {name: tensor.clone() for name, tensor in policy.loaded().items()}
    noise_P = noise_like(sampled_P)
    probe = make_probe(policy, store)
    later = msgspec.structs.replace(BATCH, step=2, versions=BATCH.versions + 1)
    for other in (None, later):
        if rank == RANKS - 1:
            add(probe, BATCH, current_P, sampled_P + noise_P)
        elif other is not None:
            add(probe, other, current_P, sampled_P + 5.0)
        found = probe.close()
        assert found["probe_tokens"] == len(sampled_P)
        assert found["engine_mismatch_k3"] == pytest.approx(k3(-noise_P), rel=1e-4)
        assert found["version_drift_k3"] == pytest.approx(k3(current_P - sampled_P), rel=1e-4)
    assert probe.close() == {"probe_tokens": 0, "probe_skipped": 0}
    divided = make_probe(policy, store, Layout(context=make_context(RANKS)))
    add(divided, BATCH, current_P, sampled_P + noise_P)  # of both ranks
    found = divided.close()
    assert found["probe_tokens"] == len(sampled_P)
    assert found["engine_mismatch_k3"] == pytest.approx(k3(-noise_P), rel=1e-4)
    assert found["version_drift_k3"] == pytest.approx(k3(current_P - sampled_P), rel=1e-4)
    for name, tensor in policy.loaded().items():
        assert torch.equal(tensor, before[name]), name
    store.discard(0)
    dist.barrier()
    if rank == 0:
        add(probe, BATCH, current_P, sampled_P)
    assert probe.close() == {"probe_tokens": 0, "probe_skipped": 1}


def _rank(rank: int, folder: Path, model_path: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    try:
        for policy_module.GATHERED_BYTES in (2**31, 0):
            check_two_ranks(folder, model_path, rank)
    finally:
        dist.destroy_process_group()


@pytest.mark.deep
def test_on_two_ranks_all_take_part_with_or_without_sequences(tmp_path: Path, model_path: Path) -> None:
    mp.start_processes(_rank, (tmp_path, model_path), nprocs=RANKS, start_method="spawn")
