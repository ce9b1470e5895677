"""A checkpoint is loaded by any number of ranks: what they have is what they would have had all along."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import SETTINGS
from safetensors.torch import save_file
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from dora.core.ids import StepId
from dora.errors import ConfigError
from dora.trainer import checkpoint
from dora.trainer.meeting import Meeting
from dora.trainer.model import Policy
from dora.trainer.optimizer import ShardOptimizer
from dora.trainer.resharding import Arrangement, Divided, own_blocks_of
from dora.weights.checkpoints import folder_of, rank_file
from tests.families import make_model
from tests.trainer.publishing import load_policy

#: Each loads what the one before has written, and writes it for the next; so the last files are the first ones.
WORLD_SIZES = (2, 4, 4, 1, 3, 4, 4, 2, 2)
#: Ranks over which each shards its weights; the others have copies.
SHARD_RANKS = (2, 4, 2, 1, 3, 4, 4, 1, 2)
#: Ranks that divide the experts.
EXPERT_RANKS = (1, 2, 2, 1, 1, 4, 1, 1, 1)
#: Ranks that divide the matrices of the dense model, with AdamW.
TENSOR_RANKS = (1, 2, 2, 1, 1, 4, 2, 1, 1)
OPTIMIZERS = {
    "adamw": {},
    "8bit": {"optimizer_state": "8bit"},
    "host": {"optimizer_state": "host"},
    "muon": {"optimizer": "muon"},
}
FAMILIES = {"qwen3": {"num_attention_heads": 4, "num_key_value_heads": 4}, "qwen3_moe": {}}
CHAIN = "0a1b2c3d4e5f"


def storage_in(
    parent: Path, arrangement: Arrangement | None = None, divided: Divided | None = None
) -> checkpoint.Storage:
    ranks = tuple(range(dist.get_world_size()))
    words = PrefixStore(parent.name, _get_default_store().clone())
    meeting = Meeting(words, rank=dist.get_rank(), size=len(ranks), fence=lambda: None)
    return checkpoint.Storage(
        parent=parent,
        here=ranks,
        arrangement=arrangement or Arrangement(len(ranks)),
        device=torch.device("cpu"),
        meeting=meeting,
        fence=lambda: None,
        divided=divided,
    )


def whole(name: str, shape: tuple[int, ...], *, update: int) -> Tensor:
    """The whole gradient of a parameter, the same for every number of ranks."""
    generator = torch.Generator().manual_seed(hash_of(name) + update)
    return torch.randn(shape, generator=generator)


def hash_of(name: str) -> int:
    return sum(number * ord(letter) for number, letter in enumerate(name, start=1))


def updated(policy: Policy, optimizer: ShardOptimizer, *, count: int) -> None:
    """Make some updates with gradients that do not depend on the number of ranks."""
    own = own_blocks_of(policy.shards(), Arrangement(policy.sharding.size()), device=policy.device)
    shapes = {name: tuple(parameter.shape) for name, parameter in policy.model.named_parameters()}
    for update in range(count):
        gradients = {
            name: whole(name, shapes[name], update=update)[own[name].block.slices[0]].clone()
            for name in policy.shards()
        }
        optimizer.update(gradients, learning_rate=1e-2)


def load_and_save(root: Path, model: Path, kind: str, *, turn: int) -> None:
    """The first ranks make two updates; the others save what they have loaded."""
    settings = msgspec.structs.replace(SETTINGS, **OPTIMIZERS[kind])
    expert_ranks = EXPERT_RANKS[turn] if model.name == "qwen3_moe" else 1
    tensor_ranks = TENSOR_RANKS[turn] if model.name == "qwen3" and kind in ("adamw", "host") else 1
    arrangement = Arrangement(SHARD_RANKS[turn], expert_ranks, tensor_ranks)
    policy = load_policy(model, shard_ranks=SHARD_RANKS[turn], expert_ranks=expert_ranks, tensor_ranks=tensor_ranks)
    storage = storage_in(parent_of(root, model, kind), arrangement, policy.may_be_divided)
    shards = policy.shards()
    optimizer = ShardOptimizer(shards, settings, model=policy.model, group=policy.sharding.get_group())
    state = dict(shards) | optimizer.state()
    parent = storage.parent
    if turn:
        for tensor in shards.values():
            tensor.zero_()
        before = folder_of(parent, step=turn, chain=CHAIN)
        loaded = checkpoint.load(storage, [before], tensors=state, may_start_over=False)
        assert (loaded.step, loaded.chain, loaded.skipped) == (turn, CHAIN, ())
    else:
        updated(policy, optimizer, count=2)
        assert all(tensor.any() for tensor in state.values() if tensor.numel())
    if dist.get_rank() == 0:
        parent.mkdir(exist_ok=True)
    dist.barrier()
    checkpoint.save(storage, step=turn + 1, chain=CHAIN, tensors=state)  # type: ignore[arg-type]


def parent_of(root: Path, model: Path, kind: str) -> Path:
    return root / f"{model.name}-{kind}"


def _rank(rank: int, root: Path) -> None:
    torch.set_num_threads(1)
    for turn, world_size in enumerate(WORLD_SIZES):
        if rank < world_size:
            store = dist.FileStore(str(root / f"store{turn}"), world_size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
            for family, kind in itertools.product(FAMILIES, OPTIMIZERS):
                load_and_save(root, root / family, kind, turn=turn)
            dist.barrier()
            dist.destroy_process_group()
        wait_for_turn(root, turn=turn, world_size=world_size, rank=rank)


def wait_for_turn(root: Path, *, turn: int, world_size: int, rank: int) -> None:
    """All processes, those without a part in this turn too."""
    everyone = dist.FileStore(str(root / f"everyone{turn}"), max(WORLD_SIZES))
    everyone.set(f"{rank}", "done")
    everyone.wait([str(other) for other in range(max(WORLD_SIZES))])


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_every_number_of_ranks_loads_what_another_has_written(tmp_path: Path) -> None:
    for family, changes in FAMILIES.items():
        make_model(family, **changes).save_pretrained(tmp_path / family)
    multiprocessing.set_forkserver_preload([__name__])
    mp.start_processes(_rank, (tmp_path,), nprocs=max(WORLD_SIZES), start_method="forkserver")
    for parent in (path for path in tmp_path.iterdir() if path.name.endswith(tuple(OPTIMIZERS))):
        first, last = (folder_of(parent, step=step, chain=CHAIN) for step in (1, len(WORLD_SIZES)))
        for rank in range(WORLD_SIZES[0]):
            assert rank_file(first, rank).read_bytes() == rank_file(last, rank).read_bytes(), parent.name


# ---- one rank, with the files of two --------------------------------------------------------------------------------


@pytest.fixture
def of_two(tmp_path: Path) -> Path:
    """A checkpoint that two ranks wrote, one after the other: five rows, in chunks of three."""
    rows = torch.arange(10.0).view(5, 2)
    parts = [{"w": rows[:3], "step/w": torch.tensor(7.0)}, {"w": rows[3:], "step/w": torch.tensor(7.0)}]
    written = tmp_path / "step-000001-0a1b2c3d"
    written.mkdir()
    sizes, of_files, of_states = [], [], []
    for rank, tensors in enumerate(parts):
        path = written / f"rank-{rank}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        sizes.append(path.stat().st_size)
        of_files.append(checkpoint.checksum_of(path))
        of_states.append(checkpoint.state_hash(tensors))
    manifest = checkpoint.CheckpointManifest(1, 2, CHAIN, of_states, sizes, of_files)
    checkpoint.write_manifest(written, manifest)
    return written


@pytest.fixture(autouse=True)
def _single_rank(request: pytest.FixtureRequest):
    if "of_two" not in request.fixturenames:
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def load(path: Path, tensors: dict[str, Tensor]) -> checkpoint.Loaded:
    return checkpoint.load(storage_in(path.parent), [path], tensors=tensors, may_start_over=True)


def test_the_rows_of_two_ranks_are_those_of_one(of_two: Path) -> None:
    state = {"w": torch.zeros(5, 2), "step/w": torch.zeros(())}
    assert load(of_two, state) == checkpoint.Loaded(1, CHAIN, ())  # type: ignore[arg-type]
    assert torch.equal(state["w"], torch.arange(10.0).view(5, 2))
    assert state["step/w"] == 7


@pytest.mark.parametrize("which", [0, 1])
def test_a_damaged_file_of_another_rank_is_found_before_anything_is_changed(of_two: Path, which: int) -> None:
    path = of_two / f"rank-{which}.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    state = {"w": torch.zeros(5, 2), "step/w": torch.zeros(())}
    loaded = load(of_two, state)
    assert loaded.step == 0
    assert f"rank-{which}.safetensors does not match its checksum" in loaded.skipped[0]
    assert not state["w"].any()
    assert not of_two.exists()  # set aside


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"w": torch.zeros(4, 2), "step/w": torch.zeros(())}, "w has 5 rows, expected 4"),
        ({"w": torch.zeros(5, 3), "step/w": torch.zeros(())}, r"w has rows of shape \(2,\)"),
        ({"w": torch.zeros(5, 2)}, "step/w does not match"),
        ({"w": torch.zeros(5, 2), "step/w": torch.zeros(1)}, r"step/w has shape \(\)"),
        ({"w": torch.zeros(()), "step/w": torch.zeros(())}, r"w has shape \(3, 2\)"),
    ],
    ids=["rows", "columns", "names", "a number", "rows for a number"],
)
def test_a_checkpoint_of_another_model_is_refused_and_kept(of_two: Path, state: dict[str, Tensor], says: str) -> None:
    with pytest.raises(ConfigError, match=rf"belongs to another model: {says}"):
        load(of_two, state)
    assert of_two.exists()


@pytest.mark.parametrize("kind", ["link", "FIFO"])
def test_what_is_not_a_file_of_another_rank_is_not_opened(of_two: Path, kind: str) -> None:
    path = of_two / "rank-1.safetensors"
    path.rename(of_two.parent / "elsewhere")
    os.mkfifo(path) if kind == "FIFO" else path.symlink_to(of_two.parent / "elsewhere")
    assert "is incomplete" in load(of_two, {"w": torch.zeros(5, 2), "step/w": torch.zeros(())}).skipped[0]


def test_without_a_file_of_another_rank_it_is_incomplete(of_two: Path) -> None:
    (of_two / "rank-1.safetensors").unlink()
    assert "is incomplete" in load(of_two, {"w": torch.zeros(5, 2), "step/w": torch.zeros(())}).skipped[0]


def _falls_back(rank: int, parent: Path, damaged: Path, older: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(parent / "store"), 2), rank=rank, world_size=2)
    tensors = {"w": torch.zeros(2, 3)}
    loaded = checkpoint.load(storage_in(parent), [damaged, older], tensors=tensors, may_start_over=False)
    assert (loaded.step, tensors["w"].tolist()) == (1, [[1.0] * 3] * 2)
    assert loaded.skipped == (() if rank else (f"{rank_file(damaged, 0)} does not match its checksum",))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.deep
def test_a_damaged_file_of_which_another_rank_verifies_the_checksum_is_not_one_of_another_model(tmp_path: Path) -> None:
    """A name in its header has changed, and rank 0 alone computes the checksum."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        storage = storage_in(tmp_path)
        states = [(StepId(step), {"w": torch.full((4, 3), float(step))}) for step in (1, 2)]
        older, newer = (
            checkpoint.save(storage, step=step, chain=CHAIN, tensors=state).folder for step, state in states
        )
    finally:
        dist.destroy_process_group()
    rank_file(newer, 0).write_bytes(rank_file(newer, 0).read_bytes().replace(b'"w"', b'"v"'))
    multiprocessing.set_forkserver_preload([__name__])
    mp.start_processes(_falls_back, (tmp_path, newer, older), nprocs=2, start_method="forkserver")
    assert not newer.exists()
