"""Gradients, weights and metrics do not depend on how the ranks share weights and rows.

In float64: masters, reductions, moments and head, and what the models compute in float32, so that a sum which is wrong
stands out from rounding. And as everyone trains, in float32. Each update has three accumulated passes.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import SETTINGS, Answer, chain_of, in_history, make_batch, make_groups, mini_batches, with_experts
from test_resharding import storage_in
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dora.model_config import load_config
from dora.routing import RoutingShape
from dora.trainer import model as policy_module
from dora.trainer import step as step_module
from dora.trainer.checkpoint import Saver
from dora.trainer.checkpointing import Mode
from dora.trainer.context import Context, make_context
from dora.trainer.copies import frozen_adapters
from dora.trainer.meshes import Mesh, make_mesh
from dora.trainer.model import Policy
from dora.trainer.packing import Layout
from dora.trainer.replay import check_replay
from dora.trainer.resharding import Arrangement
from dora.trainer.step import Trainer
from dora.transport.messages import Configure, LoraSettings, StepDone
from dora.weights.checkpoints import checkpoints_in
from tests.families import make_model
from tests.trainer.publishing import Unpublished, whole

STEPS: Final = 3
PASSES: Final = 3
#: Metrics of time, and of padding.
OF_LAYOUT: Final = {"busy_s", "close_s", "write_wait_s", "useful_frac", "padding_frac"}
#: For sums in another order; relative to the gradient, and to the learning rate times updates.
TOLERANCE: Final = {torch.float64: 1e-10, torch.float32: 1e-5}


class Sharing(NamedTuple):
    """How ranks share weights and rows."""

    ranks: int
    shard_ranks: int
    gathered: bool = True
    context: int = 1  # ranks that divide each row
    experts: int = 1  # ranks that divide the experts
    tensor: int = 1  # ranks that divide the matrices
    checkpointing: Mode = "none"


ALONE: Final = Sharing(1, 1)
WHOLE: Final = (Sharing(2, 2), Sharing(2, 1), Sharing(4, 4), Sharing(4, 2), Sharing(4, 2, gathered=False))
CONTEXT: Final = (
    *(Sharing(2, 2, context=2), Sharing(4, 4, context=4)),
    *(Sharing(4, 4, gathered=False, context=2), Sharing(4, 2, context=2)),
)
EXPERTS: Final = (
    *(Sharing(2, 2, experts=2), Sharing(4, 4, experts=2), Sharing(4, 2, experts=2)),
    *(Sharing(4, 4, gathered=False, experts=2), Sharing(4, 4, gathered=False, experts=4)),
)
TENSOR: Final = (
    *(Sharing(2, 2, tensor=2), Sharing(4, 4, tensor=2)),
    *(Sharing(4, 2, tensor=2), Sharing(4, 4, gathered=False, tensor=2)),
)
SHARINGS: Final = {
    torch.float64: (*WHOLE, *CONTEXT, *EXPERTS, *TENSOR),
    # What a layer repeats in the backward pass would not be in float64.
    torch.float32: (
        Sharing(4, 2, gathered=False),
        Sharing(4, 4, context=2, checkpointing="selective"),
        Sharing(4, 4, gathered=False, experts=2, checkpointing="selective"),
        Sharing(4, 4, gathered=False, experts=4, checkpointing="full"),
        Sharing(4, 4, gathered=False, tensor=2, checkpointing="selective"),
    ),
}
#: Norms of queries and keys; windows, with a tied head; experts with a shared one; experts with sinks. All have four
#: heads, and two of keys.
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "qwen3": {},
    "gemma3_text": {"tie_word_embeddings": True},
    "qwen2_moe": {},
    "gpt_oss": {},
}
#: Each continues from the checkpoint of the one before: sharded, in copies, and with divided experts.
MOVED: Final = (Sharing(2, 2), Sharing(4, 2), Sharing(2, 2, experts=2))
OF_MOVED: Final = ("qwen2_moe", "three")
PLAIN: Final = {"max_grad_norm": 1e9, "micro_batch_tokens": 100_000, "warmup_steps": 0}
THREE: Final = {**PLAIN, "updates": 2, "objective": '{"kl_coefficient": 0.1}'}
REPLAYED: Final = {**THREE, "objective": '{"kl_coefficient": 0.1, "router_replay": "r3"}'}
#: With the policies of THREE; attention alone, since one of the families has experts.
LORA: Final = LoraSettings(rank=4, alpha=8.0, rslora=False, targets=("q_proj", "k_proj", "v_proj", "o_proj"), seed=1)
CASES: Final = (
    ("qwen3", "plain"),
    ("qwen3", "shared"),
    ("gemma3_text", "plain"),
    ("qwen2_moe", "three"),
    ("gpt_oss", "shared"),
    ("qwen3", "lora"),
    ("qwen2_moe", "lora"),
    ("qwen2_moe", "replayed"),
)
FEW: Final = (("qwen3", "plain"), ("qwen2_moe", "three"), ("qwen3", "lora"))
OF_ROWS: Final = (("qwen3", "shared"), ("gpt_oss", "shared"), ("qwen3", "lora"), ("qwen2_moe", "replayed"))
OF_EXPERTS: Final = (("qwen2_moe", "replayed"), ("qwen2_moe", "three"), ("gpt_oss", "shared"), ("qwen2_moe", "lora"))
OF_MATRICES: Final = (("qwen3", "plain"), ("qwen3", "shared"), ("gemma3_text", "plain"))


@dataclass
class Found:
    """What rank 0 has seen of one case."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)  # of each update, whole
    weights: dict[str, Tensor] = field(default_factory=dict)  # at the end
    metrics: list[dict[str, float]] = field(default_factory=list)  # of each step


class Observed(Trainer):
    """A trainer that keeps the whole gradients of each update."""

    found: Found

    def _normalize_gradients(self, denominator: float) -> float:
        norm = super()._normalize_gradients(denominator)
        parameters = self._policy.model.named_parameters()
        self.found.gradients.append({name: whole(p.grad) for name, p in parameters if p.grad is not None})
        return norm

    def _check_again(self, weights: str) -> None:
        with InFloat64() if self._policy.dtype is torch.float64 else nullcontext():
            super()._check_again(weights)


def train(
    folder: Path, kind: str, sharing: Sharing, mesh: Mesh, context: Context | None, dtype: Any,
    *, steps: Sequence[int] = range(STEPS), parent: Path | None = None,
) -> Found:  # fmt: skip
    """Train these steps; with `parent` from the newest checkpoint there on, and write another."""
    policy_module.MASTER_DTYPE = dtype
    if dtype is torch.float64:
        policy_module.load_config = with_eager_experts
        step_module.check_replay = check_replay_in_float64
    policy_module.GATHERED_BYTES = 2**31 if sharing.gathered else 0
    changes: dict[str, Any] = {"three": THREE, "lora": THREE, "replayed": REPLAYED}.get(kind, PLAIN)
    lora = LORA if kind == "lora" else None
    settings = msgspec.structs.replace(SETTINGS, **changes, context_ranks=sharing.context, lora=lora)
    order = Configure(
        run_id="exact", model_path=str(folder), settings=settings, memory_root="", durable_root="",
        checkpoints=str(parent or ""), resume_from=tuple(map(str, checkpoints_in(parent)[-1:])) if parent else (),
        may_start_over=False, chain=chain_of(0), epoch=0, fence="",
    )  # fmt: skip
    policy = Policy(
        folder, mesh=mesh, dtype=dtype, activation_checkpointing=sharing.checkpointing, lora=lora,
        frozen_adapters=frozen_adapters(settings),
    )  # fmt: skip
    found = Found()
    layout = Layout(share_above=0.0 if kind == "shared" else 1e9, context=context, alike=sharing.tensor)
    storage = storage_in(
        parent or Path(), Arrangement(sharing.shard_ranks, sharing.experts, sharing.tensor), policy.may_be_divided
    )
    saver = Saver(storage, report=lambda _: None, on_failure=lambda _: None)
    trainer = Observed(
        order, end=Listener(found), policy=policy, layout=layout,  # type: ignore[arg-type]
        publisher=Unpublished(), saver=saver,  # type: ignore[arg-type]
    )  # fmt: skip
    trainer.found = found
    trainer.start()
    group, groups = dist.get_rank() // layout.ranks, dist.get_world_size() // layout.ranks
    for step in steps:
        waves = list(waves_of(make_groups(4, version=step, seed=step), updates=settings.updates))
        for index, (update, answers, closes) in enumerate(waves):
            batch = make_batch(answers[group::groups], step=step, index=index, last=index == len(waves) - 1)
            batch = with_experts(batch) if kind == "replayed" else batch
            with InFloat64() if dtype is torch.float64 else nullcontext():
                trainer.train(in_history(msgspec.structs.replace(batch, update=update, closes=closes)))
    found.weights = {name: whole(parameter) for name, parameter in policy.model.named_parameters()}
    if parent is not None:
        trainer.save_checkpoint()
    trainer.close()
    return found


def waves_of(answers: Sequence[Answer], *, updates: int) -> Iterator[tuple[int, list[Answer], bool]]:
    for update, part in enumerate(mini_batches(answers, updates)):
        for number in range(PASSES):
            yield update, part[number::PASSES], number == PASSES - 1


def check_replay_in_float64(policy: Policy, layout: Layout, *, dtype: str) -> RoutingShape:
    with InFloat64():
        return check_replay(policy, layout, dtype=dtype)


def with_eager_experts(folder: Path) -> Any:
    """The config of a model whose experts have no kernel, as those have no float64."""
    config = load_config(folder)
    config._experts_implementation = "eager"
    return config


class InFloat64(TorchFunctionMode):
    """In this context, float64 takes the place of float32, also in norms and angles."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


@dataclass
class Listener:
    """Keeps the metrics that are sent."""

    found: Found

    def send(self, message: object) -> None:
        if isinstance(message, StepDone):
            self.found.metrics.append(dict(message.metrics))


def _rank(rank: int, root: Path, dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    for number, sharing in enumerate((ALONE, *SHARINGS[dtype])):
        if rank < sharing.ranks:
            with ranks_of(sharing, rank=rank, store=root / f"store-{number}") as (mesh, context):
                for family, kind in cases_of(sharing):
                    found = train(root / family, kind, sharing, mesh, context, dtype)
                    save(found, file_of(root, family, kind, sharing))
    if dtype is torch.float64:
        _move(rank, root, dtype)


def _move(rank: int, root: Path, dtype: torch.dtype) -> None:
    """Train each step with other ranks, from the checkpoint of those before."""
    family, kind = OF_MOVED
    for step, sharing in enumerate(MOVED):
        if rank < sharing.ranks:
            with ranks_of(sharing, rank=rank, store=root / f"moved-{step}") as (mesh, context):
                steps = range(step, step + 1)
                found = train(root / family, kind, sharing, mesh, context, dtype, steps=steps, parent=root / "moved")
                save(found, root / "moved.pt")
        everyone = dist.FileStore(str(root / f"everyone-{step}"), 4)
        everyone.set(f"{rank}", "done")
        everyone.wait([str(other) for other in range(4)])


@contextmanager
def ranks_of(sharing: Sharing, *, rank: int, store: Path) -> Iterator[tuple[Mesh, Context | None]]:
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), sharing.ranks), rank=rank, world_size=sharing.ranks
    )
    yield (
        make_mesh("cpu", shard_ranks=sharing.shard_ranks, expert_ranks=sharing.experts, tensor_ranks=sharing.tensor),
        make_context(sharing.context),
    )
    dist.barrier()
    dist.destroy_process_group()


def save(found: Found, path: Path) -> None:
    if dist.get_rank() == 0:
        torch.save((found.gradients, found.weights, found.metrics), path)


def cases_of(sharing: Sharing) -> tuple[tuple[str, str], ...]:
    """All that say something about a kind of sharing in one of its forms, and some in the others."""
    if sharing.experts > 1:
        return OF_EXPERTS if sharing.gathered else OF_EXPERTS[:1]
    if sharing.tensor > 1:
        return OF_MATRICES if sharing.shard_ranks < sharing.ranks else OF_MATRICES[:2]
    if sharing.context > 1:
        return CASES if sharing.context == 4 else OF_ROWS
    return CASES if sharing in (ALONE, Sharing(4, 2)) else FEW


def file_of(root: Path, family: str, kind: str, sharing: Sharing) -> Path:
    return root / f"{family}-{kind}-{sharing}.pt"


@pytest.fixture(scope="module", params=SHARINGS, ids=str)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.dtype]:
    root = tmp_path_factory.mktemp("exact")
    for family, changes in FAMILIES.items():
        make_model(family, **changes).save_pretrained(root / family)
    (root / "moved").mkdir()
    multiprocessing.set_forkserver_preload([__name__])
    mp.start_processes(_rank, (root, request.param), nprocs=4, start_method="forkserver")
    return root, request.param


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_gradients_and_weights_are_the_same(trained: tuple[Path, torch.dtype]) -> None:
    """AdamW magnifies what float32 leaves of gradients that cancel, so of it only the first update is compared."""
    root, dtype = trained
    tolerance = TOLERANCE[dtype]
    for sharing in SHARINGS[dtype]:
        for family, kind in cases_of(sharing):
            case = sharing, family, kind
            expected, weights, named = torch.load(file_of(root, family, kind, ALONE), weights_only=True)
            found, moved, metrics = torch.load(file_of(root, family, kind, sharing), weights_only=True)
            assert len(found) == len(expected) == STEPS * (1 if kind in ("plain", "shared") else 2)
            for update in range(len(found) if dtype is torch.float64 else 1):
                for name, gradient in expected[update].items():
                    off = (found[update][name] - gradient).norm() / gradient.norm().clamp_min(1e-30)
                    assert off < tolerance, (case, update, name, float(off))
            if dtype is torch.float32:
                continue
            for name, weight in weights.items():
                off = (moved[name] - weight).abs().max() / (SETTINGS.learning_rate * len(found))
                assert off < tolerance, (case, name, float(off))
            for here, there in zip(metrics, named, strict=True):
                assert here.keys() == there.keys()
                for name in here.keys() - OF_LAYOUT:
                    assert math.isclose(here[name], there[name], rel_tol=1e-6, abs_tol=1e-9), (case, name)


@pytest.mark.deep
def test_steps_from_checkpoints_of_other_ranks_are_the_same(trained: tuple[Path, torch.dtype]) -> None:
    root, dtype = trained
    if dtype is torch.float32:
        pytest.skip("compared in float64")
    _, weights, _ = torch.load(file_of(root, *OF_MOVED, ALONE), weights_only=True)
    _, moved, _ = torch.load(root / "moved.pt", weights_only=True)
    for name, weight in weights.items():
        off = (moved[name] - weight).abs().max() / (SETTINGS.learning_rate * STEPS * 2)
        assert off < TOLERANCE[dtype], (name, float(off))
