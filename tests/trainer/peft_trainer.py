"""A plain loop over peft's own model, and DORA's trainer with an adapter on some ranks, step by step."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from dora.trainer import model as policy_module
from dora.trainer.checkpoint import Saver
from dora.trainer.copies import frozen_adapters
from dora.trainer.meshes import make_mesh
from dora.trainer.model import Policy
from dora.trainer.packing import Layout, Row
from dora.trainer.parts import Parts
from dora.trainer.resharding import Arrangement
from dora.trainer.step import Trainer
from dora.transport.messages import Configure, LoraSettings
from dora.weights.checkpoints import checkpoints_in
from tests.trainer.conftest import SETTINGS, TIS_CAP, Answer, PlainTrainer, in_history, make_batch, make_groups
from tests.trainer.publishing import Unpublished, whole
from tests.trainer.test_copies import ROW
from tests.trainer.test_layouts_exact import InFloat64, waves_of, with_eager_experts
from tests.trainer.test_resharding import storage_in

ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
DENSE: Final = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
#: Two updates a step: the second one needs π_o. The reference has no effect that could be seen, but is computed.
SETTINGS_OF_STEP: Final = {
    "updates": 2, "max_grad_norm": 0.05,
    "objective": f'{{"preset": "dapo", "weight_high": {TIS_CAP}, "kl_coefficient": 1e-30}}',
}  # fmt: skip
STEPS: Final = 3


def lora(targets: Sequence[str] = DENSE, *, rank: int = 4, rslora: bool = False) -> LoraSettings:
    return LoraSettings(rank=rank, alpha=12.0, rslora=rslora, targets=tuple(targets), seed=7)


def begun(folder: Path, settings: LoraSettings) -> LoraSettings:
    """Have training begin with an adapter that peft writes, beside the folder of the model."""
    adapter = folder.with_name(f"{folder.name}-adapter")
    if not adapter.exists():
        model = _with_adapter(AutoModelForCausalLM.from_pretrained(folder), settings)
        generator = torch.Generator().manual_seed(5)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(std=0.05, generator=generator)
        model.save_pretrained(adapter, save_embedding_layers=False)
    return msgspec.structs.replace(settings, begins_with=str(adapter))


def stored_in(adapter: str | Path) -> dict[str, Tensor]:
    """The matrices in a folder, by the names that they have in the trainer."""
    tensors = load_file(Path(adapter) / "adapter_model.safetensors")
    return {
        name.removeprefix("base_model.model.").replace(".weight", ".default.weight"): tensor
        for name, tensor in tensors.items()
    }


def answers_of(step: int) -> list[Answer]:
    return make_groups(4, version=step, seed=30 + step)


# ---- DORA -----------------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """What the ranks have; whole tensors."""

    first: dict[str, Tensor]  # of the adapter
    adapters: list[dict[str, Tensor]] = field(default_factory=list)  # after each step
    merged: dict[str, Tensor] = field(default_factory=dict)  # what would be published at the end
    reference: Tensor = field(default_factory=lambda: torch.empty(0))  # [P] log-probs of ROW under it, at the end


def train(
    folder: Path,
    settings: LoraSettings,
    *,
    shard_ranks: int = 0,
    gathered: bool = True,
    steps: Sequence[int] = range(STEPS),
    checkpoints: Path | None = None,
) -> Found:
    """Train these steps on the ranks of the process group; with `checkpoints` from the newest one there on, and write
    another."""
    policy_module.MASTER_DTYPE = torch.float64
    policy_module.load_config = with_eager_experts
    policy_module.GATHERED_BYTES = 2**31 if gathered else 0
    of_trainer = msgspec.structs.replace(SETTINGS, **SETTINGS_OF_STEP, lora=settings)
    policy = Policy(
        folder, mesh=make_mesh("cpu", shard_ranks=shard_ranks), dtype=torch.float64, lora=settings,
        frozen_adapters=frozen_adapters(of_trainer),
    )  # fmt: skip
    order = Configure(
        run_id="lora", model_path=str(folder), memory_root="", durable_root="", checkpoints=str(checkpoints or ""),
        settings=of_trainer,
        resume_from=tuple(map(str, checkpoints_in(checkpoints)[-1:])) if checkpoints else (),
        may_start_over=False, chain=f"{0:032x}", epoch=0, fence="",
    )  # fmt: skip
    storage = storage_in(checkpoints or Path(), Arrangement(shard_ranks or dist.get_world_size()), None)
    found = Found(adapter_of(policy))
    trainer = Exact(
        order, end=Silent(), policy=policy, layout=Layout(), publisher=Unpublished(),  # type: ignore[arg-type]
        saver=Saver(storage, report=lambda _: None, on_failure=lambda _: None),
    )  # fmt: skip
    trainer.start()
    for step in steps:
        waves = list(waves_of(answers_of(step), updates=2))
        for index, (update, answers, closes) in enumerate(waves):
            mine = answers[dist.get_rank() :: dist.get_world_size()]
            batch = make_batch(mine, step=step, index=index, last=index == len(waves) - 1)
            with InFloat64():
                trainer.train(in_history(msgspec.structs.replace(batch, update=update, closes=closes)))
        found.adapters.append(adapter_of(policy))
    if checkpoints is not None:
        trainer.save_checkpoint()
    trainer.close()
    found.merged = merged(policy)
    with InFloat64():
        found.reference = trainer.reference(ROW)
    return found


def adapter_of(policy: Policy) -> dict[str, Tensor]:
    trained = policy.trained().keys()
    return {name: whole(p).clone() for name, p in policy.model.named_parameters() if name in trained}


def merged(policy: Policy) -> dict[str, Tensor]:
    """What the ranks would publish, in the type of the computation; on rank 0."""
    parts = Parts(policy, dtype=str(policy.dtype).removeprefix("torch."), writers=1)
    found: dict[str, Tensor] = {}
    for piece in (*parts.gather(), *parts.pieces()):
        found[piece.name] = torch.cat([found[piece.name], piece.rows]) if piece.name in found else piece.rows
    return found


class Exact(Trainer):
    """A trainer in float64."""

    def _check_again(self, weights: str) -> None:
        with InFloat64():
            super()._check_again(weights)

    def reference(self, row: Row) -> Tensor:
        found = self._copies.reference(row)
        assert found is not None
        return found


class Silent:
    """In place of a connection."""

    def send(self, message: Any) -> None:
        """Do nothing."""


# ---- peft -----------------------------------------------------------------------------------------------------------


class PeftTrainer(PlainTrainer):
    """The plain trainer over a model of peft, whose adapter begins with given values."""

    def __init__(self, folder: Path, settings: LoraSettings, first: dict[str, Tensor]) -> None:
        plain = AutoModelForCausalLM.from_pretrained(
            folder, config=with_eager_experts(folder), dtype=torch.float64, attn_implementation="eager"
        )
        self.model = _with_adapter(plain, settings)
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.parameters = {name.removeprefix("base_model.model."): p for name, p in trained.items()}
        assert self.parameters.keys() == first.keys()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.data = first[name].double().clone()
        self.first = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.num_updates = 0

    def _logprobs(self, a: Answer) -> Tensor:
        with InFloat64():
            return super()._logprobs(a)

    @torch.no_grad()
    def row(self) -> Tensor:
        """[P] log-probs of ROW, whose sequences are computed one by one."""
        with InFloat64():
            logits = [self.model(input_ids=tokens[None]).logits[0] for tokens in ROW.tokens_BT[0].split([*ROW.lengths])]
        logprobs_TV = (torch.cat(logits) / SETTINGS.temperature).log_softmax(-1)
        return logprobs_TV[ROW.predictors_P].gather(-1, ROW.targets_P[:, None])[:, 0]

    def adapter(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    def merged(self) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in self.model.merge_and_unload().named_parameters()}


def _with_adapter(model: Any, settings: LoraSettings) -> Any:
    config = LoraConfig(
        r=settings.rank, lora_alpha=settings.alpha, use_rslora=settings.rslora,  # type: ignore[arg-type]
        target_modules=list(settings.targets), lora_dropout=0.0,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about weights that are stored transposed
        return get_peft_model(model, config)


def difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest difference of tensors of equal names, relative to the largest element of each."""
    return max(
        float((left[name].double() - tensor.double()).abs().max() / tensor.double().abs().max().clamp_min(1e-30))
        for name, tensor in right.items()
    )
