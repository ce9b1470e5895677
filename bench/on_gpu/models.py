"""Shapes of Qwen3 with random weights, and the trainer over them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from clients.steps import (
    Answers,
    Reports,
    WatchedTrainer,
    configure,
    draw_answers,
    make_batch,
    make_trainer,
    one_rank,
    settings,
)
from torch import Tensor

from dora.trainer.checkpointing import Mode
from dora.trainer.model import Policy
from dora.trainer.packing import PACKED, Layout
from dora.trainer.step import Trainer
from dora.transport.messages import Configure
from on_gpu.cases import Place, memory_of

DTYPE = "bfloat16"
MEAN_TOKENS = 1_024  # of an answer and its prompt
BYTES_PER_PARAMETER = 16  # float32 weights, gradients and two moments


class Shape(NamedTuple):
    """A Qwen3."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    tied: bool

    @property
    def layer_weights(self) -> int:
        """Of all matrices in the layers."""
        attention = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def parameters(self) -> int:
        """Without norms."""
        return self.layer_weights + self.vocab * self.hidden * (1 if self.tied else 2)

    def flops(self, answers: Answers, *, causal: bool) -> float:
        """Return the floating-point operations of forward and backward; `causal`: only of scores that are not masked.

        Recomputation, embedding and norms are not counted.
        """
        squares = sum(length**2 for length in answers.lengths)
        weights = self.layer_weights * sum(answers.lengths) + self.vocab * self.hidden * answers.trained
        return 6.0 * weights + (6.0 if causal else 12.0) * self.layers * self.heads * self.head_size * squares


SHAPES = {
    "0.1B": Shape(32_000, 768, 2_304, 12, 12, 4, 64, tied=True),  # stays gathered during an update
    "0.6B": Shape(151_936, 1_024, 3_072, 28, 16, 8, 128, tied=True),
    "1.7B": Shape(151_936, 2_048, 6_144, 28, 16, 8, 128, tied=True),
    "8B": Shape(151_936, 4_096, 12_288, 36, 32, 8, 128, tied=False),
    "tiny": Shape(512, 64, 192, 2, 4, 2, 16, tied=True),
}


class RandomPolicy(Policy):
    """A policy with random weights, made where they are needed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for shard in Policy.shards(self).values():
            if shard.dim() > 1:
                shard.normal_(0.0, 0.02)
            else:
                shard.fill_(1.0)


class WithoutOptimizer(RandomPolicy):
    """A policy that shows the optimizer no weights, so that it makes no moments, and no update."""

    def shards(self) -> dict[str, Tensor]:
        return {}


def has_moments(model: str, device: str) -> bool:
    """Return whether the moments fit; otherwise the model is trained without an optimizer."""
    return BYTES_PER_PARAMETER * SHAPES[model].parameters < 0.8 * memory_of(device)


def answers_of(model: str, tokens: int) -> Answers:
    return draw_answers(max(4, tokens // MEAN_TOKENS), num_tokens=tokens, vocab_size=SHAPES[model].vocab)


def order_for(model: str, place: Place, *, tokens: int, mode: Mode = "none", **changes: Any) -> Configure:
    """Return the controller's order, with the outline of a model folder; `changes` are of the trainer's settings."""
    model_path = place.folder / "model"
    if not model_path.exists():
        make_outline(config_of(model), model_path)
    chosen = settings(device=place.device, dtype=DTYPE, micro_batch_tokens=tokens, mode=mode)
    return configure(model_path, msgspec.structs.replace(chosen, **changes), store=place.folder)


class Repeated:
    """The same micro-batch, again and again."""

    def __init__(self, trainer: Trainer, answers: Answers) -> None:
        self._trainer, self._answers = trainer, answers
        self._step = self._index = 0

    def __call__(self, *, closes: bool = False) -> None:
        """Train it; `closes`: the step too."""
        everyone = range(len(self._answers))
        self._trainer.train(make_batch(self._answers, everyone, step=self._step, index=self._index, last=closes))
        self._step, self._index = (self._step + 1, 0) if closes else (self._step, self._index + 1)


@contextmanager
def trainer_of(
    model: str,
    order: Configure,
    *,
    reports: Reports | None = None,
    layout: Layout | None = PACKED,
    kind: type[WatchedTrainer] = WatchedTrainer,
) -> Iterator[WatchedTrainer]:
    """A trainer of one rank; with `reports`, it publishes, and without a layout, its forward pass is checked."""
    with one_rank(order.settings.device):
        yield make_trainer(
            order,
            layout=layout,
            reports=reports,
            publishes=reports is not None,
            policy_kind=RandomPolicy if has_moments(model, order.settings.device) else WithoutOptimizer,
            trainer_kind=kind,
        )


def config_of(model: str) -> Any:
    from transformers import Qwen3Config

    shape = SHAPES[model]
    return Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=65_536,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        architectures=["Qwen3ForCausalLM"],
    )


def make_outline(config: Any, folder: Path) -> None:
    """Make a model folder whose weights take no room: the file has a header, and a hole in place of its data."""
    from transformers import AutoModelForCausalLM

    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    header, end = {}, 0
    for name, parameter in model.named_parameters():
        begin, end = end, end + 2 * parameter.numel()
        header[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [begin, end]}
    encoded = msgspec.json.encode(header)
    path = folder / "model.safetensors"
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded)
    os.truncate(path, 8 + len(encoded) + end)
