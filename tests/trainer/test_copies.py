"""The proximal and the reference policy: equal to the bit at a fresh start, never trained, as large as computed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.tensor import DTensor

from dora.errors import ConfigError, InvariantViolation
from dora.trainer import model as policy_module
from dora.trainer.copies import FrozenPolicy, load_reference
from dora.trainer.forecast import Outline, trial_row
from dora.trainer.logprobs import logprobs
from dora.trainer.meshes import make_mesh
from dora.trainer.model import Policy
from tests.families import make_model

RANKS = 2
DTYPES = (torch.float32, torch.bfloat16)
GATHERED = (2**31, 0)  #: values of GATHERED_BYTES: the tiny model stays gathered, or is gathered layer by layer
ROW = trial_row(48, longest=20)
TEMPERATURE = 0.7


def compute(model: Any, *, grad: bool = False) -> Tensor:
    with torch.set_grad_enabled(grad):
        return logprobs(model, ROW, temperature=TEMPERATURE)[0]


def of(copy: FrozenPolicy) -> Tensor:
    return copy.logprobs(ROW, temperature=TEMPERATURE, fp32_head=False)


def train(policy: Policy, *, rate: float = 0.1) -> dict[str, Tensor]:
    """One pass and one update by plain gradient descent; returns the gradients."""
    policy.prepare(closes_update=True)
    compute(policy.model, grad=True).sum().backward()
    gradients = {name: gradient.clone() for name, gradient in policy.gradients().items()}
    policy.reshard()
    for name, shard in policy.shards().items():
        shard.sub_(gradients[name], alpha=rate)
    policy.clear_gradients()
    return gradients


def live_bytes() -> int:
    """Bytes of all storages. (The allocator also counts those that gloo holds until its threads let go of them.)"""
    while gc.collect():
        pass
    tensors = [each for each in gc.get_objects() if isinstance(each, Tensor) and not isinstance(each, DTensor)]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors if not tensor.is_meta}
    return sum(storage.nbytes() for storage in storages.values())


def net_bytes(act: Callable[[], object]) -> int:
    """Bytes that are still allocated after `act`, whose result is held."""
    before = live_bytes()
    held = act()
    after = live_bytes()
    del held
    return after - before


def three(folder: Path, dtype: torch.dtype) -> tuple[Policy, FrozenPolicy, FrozenPolicy]:
    policy = Policy(folder, mesh=make_mesh("cpu"), dtype=dtype)
    proximal = FrozenPolicy(folder, policy=policy, on_host=True)  # on a CPU the same memory, by FSDP2's other path
    proximal.refresh(policy, version=0)
    return policy, proximal, load_reference(folder, policy=policy)


# ---- two ranks, in both kinds of gathering --------------------------------------------------------------------------


def check_equal_and_frozen(folder: Path, dtype: torch.dtype) -> None:
    policy, proximal, reference = three(folder, dtype)
    start = compute(policy.model)
    assert torch.equal(of(proximal), start)
    assert torch.equal(of(reference), start)
    for _ in range(3):  # the updates of a step
        train(policy)
        assert torch.equal(of(proximal), start)
    assert torch.equal(of(reference), start)
    moved = compute(policy.model)
    assert not torch.equal(moved, start)
    policy.reshard()
    proximal.refresh(policy, version=1)
    assert torch.equal(of(proximal), moved)
    assert torch.equal(of(reference), start)
    for copy in (proximal, reference):
        assert not any(p.requires_grad or p.grad is not None for p in copy.model.parameters())
        assert {p.dtype for p in copy.model.parameters()} == {dtype}


def check_gradients_are_unaffected(folder: Path, dtype: torch.dtype) -> None:
    alone = Policy(folder, mesh=make_mesh("cpu"), dtype=dtype)
    expected = [train(alone) for _ in range(2)]
    policy, proximal, reference = three(folder, dtype)
    for gradients in expected:
        of(reference), of(proximal)
        found = train(policy)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert torch.equal(found[name], gradient), name


def check_bytes(folder: Path, dtype: torch.dtype) -> None:
    """The forecast of a copy is what it takes, after its first pass."""
    policy = Policy(folder, mesh=make_mesh("cpu"), dtype=dtype)

    def add_copy() -> FrozenPolicy:
        copy = FrozenPolicy(folder, policy=policy)
        copy.refresh(policy, version=0)
        of(copy)
        return copy

    add_copy()  # whatever is allocated once for all
    sizes = {"tokens": 64, "longest": 32, "ranks": RANKS}
    with_copy, without = (Outline(folder, dtype=dtype, copies=copies).forecast(**sizes).total for copies in (1, 0))
    extra = with_copy - without
    assert net_bytes(add_copy) == pytest.approx(extra, rel=0.1)


def _rank(rank: int, folder: Path, model_path: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    try:
        for policy_module.GATHERED_BYTES in GATHERED:
            for dtype in DTYPES:
                for check in (check_equal_and_frozen, check_gradients_are_unaffected, check_bytes):
                    check(model_path, dtype)
    finally:
        dist.destroy_process_group()


@pytest.mark.deep
def test_on_two_ranks_copies_are_equal_to_the_bit_frozen_and_as_large_as_computed(
    tmp_path: Path, wide_model_path: Path
) -> None:
    mp.start_processes(_rank, (tmp_path, wide_model_path), nprocs=RANKS, start_method="spawn")


@pytest.fixture(scope="session")
def wide_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 0.4 MB, beside which the norms of layers and padding do not count."""
    folder = tmp_path_factory.mktemp("wide")
    make_model("qwen3", vocab_size=512, hidden_size=64, intermediate_size=128).save_pretrained(folder)
    return folder


# ---- one rank -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def policy(one_rank: None, model_path: Path) -> Policy:
    return Policy(model_path, mesh=make_mesh("cpu"), dtype=torch.float32)


def test_a_copy_of_another_version_is_refused(policy: Policy, model_path: Path) -> None:
    proximal = FrozenPolicy(model_path, policy=policy)
    with pytest.raises(InvariantViolation, match="has version None in step 4"):
        proximal.require(3)
    proximal.refresh(policy, version=3)
    proximal.require(3)
    with pytest.raises(InvariantViolation, match="has version 3 in step 5"):
        proximal.require(4)


def test_a_reference_of_another_architecture_or_without_weights_is_refused(
    policy: Policy, wide_model_path: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"objective\.kl_reference: .* has another architecture than the policy"):
        load_reference(wide_model_path, policy=policy)
    with pytest.raises(ConfigError, match=r"objective\.kl_reference: .* has no config\.json"):
        load_reference(tmp_path, policy=policy)


def test_passes_without_a_backward_pass_are_not_collected(policy: Policy, model_path: Path) -> None:
    """If FSDP2 clears its list of passes by itself, `forget_passes` is no longer needed."""
    proximal = FrozenPolicy(model_path, policy=policy)
    of(proximal)
    passes = proximal.model._get_fsdp_state()._comm_ctx.post_forward_order
    assert passes
    proximal.refresh(policy, version=0)
    assert not passes
