"""Make the seed policy: a small Qwen3 model warmed up on noisy demonstrations of the arithmetic task.

    python -m dora.seed.make OUT [--family qwen3_moe]

`--family` makes a smaller policy in the same way: with experts (qwen3_moe), short convolutions (lfm2) or linear
attention (qwen3_5_text). Two of them, with which the tests run the default job, are in `tests/e2e/policies/`.

The model learns two kinds of answers. A worked answer ("a3b08c10" for "a3b5c2=") has a running total and is nearly
always right; a guess ("12") is mostly wrong. It first learns worked answers alone and then both, with more guesses. So
the policy starts out weak, but samples the worked answers that reinforcement learning has to find. Worked answers are
as long as their problem, so lengths have a heavy tail from the first step on.

Invariant: the result is a function of `Recipe` alone (on one torch build, with one thread). Run this when the recipe
changes, and commit the result under `dora/seed/checkpoint/`.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from dora.tasks.arithmetic import LABELS, problem

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
IGNORED = -100  # target of a position without loss
BLOCK = 1000  # number of demonstrations that are sorted by length together

#: Tokens, and the target of each: itself, or IGNORED. Of equal length.
Row = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the result."""

    seed: int = 7
    #: One of RECIPES.
    family: str = "qwen3"
    #: Steps on worked answers alone, then steps on both kinds.
    worked_steps: int = 1400
    mixed_steps: int = 600
    #: Maximum number of tokens in one batch, padding included.
    batch_tokens: int = 1024
    peak_learning_rate: float = 2e-3
    #: In the mixed part: share of worked answers, and of right answers among the guesses.
    worked_share: float = 0.2
    right_share: float = 0.1
    #: Share of added long problems, without which the last labels would be rare, and their minimum number of terms.
    long_share: float = 0.25
    long_terms: int = 12
    #: Maximum error of a wrong guess.
    spread: int = 4
    #: Probability that a running total of a worked answer in the mixed part is off by one.
    slip: float = 0.02
    hidden_size: int = 128
    num_layers: int = 3


_SMALL = Recipe(worked_steps=700, mixed_steps=300, hidden_size=64)
#: Recipes by family of models; the first recipe makes the shipped policy.
RECIPES = {
    "qwen3": Recipe(),
    "qwen3_moe": Recipe(family="qwen3_moe", hidden_size=64, num_layers=2),
    "lfm2": replace(_SMALL, family="lfm2"),
    "qwen3_5_text": replace(_SMALL, family="qwen3_5_text"),
}


def make(out: Path, *, recipe: Recipe) -> None:
    """Train by the recipe and write a Hugging Face folder."""
    torch.set_num_threads(1)  # sums in a fixed order
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, recipe=recipe)
    num_steps = recipe.worked_steps + recipe.mixed_steps
    batches = _batches(tokenizer, recipe=recipe)
    train(model, batches, num_steps=num_steps, peak_learning_rate=recipe.peak_learning_rate)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of the task."""
    vocabulary = [PAD, EOS, UNK, *"0123456789=", *LABELS]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, merges=[], unk_token=UNK))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True) for token in (PAD, EOS, UNK)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def build_model(tokenizer: PreTrainedTokenizerFast, *, recipe: Recipe) -> PreTrainedModel:
    """A model with random weights, drawn with the recipe's seed."""
    torch.manual_seed(recipe.seed)
    config = AutoConfig.for_model(
        recipe.family,
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=2 * recipe.hidden_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.06,  # the usual 0.02 is for wide layers and learns slower here
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **_of_family(recipe),
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def _of_family(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of a family's config apart from the shape. A hybrid ends with a layer of full attention."""
    head = {"head_dim": recipe.hidden_size // 4}
    match recipe.family:
        case "qwen3":
            return head
        case "qwen3_moe":
            experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": recipe.hidden_size // 2}
            return {**head, **experts}
        case "lfm2":
            kinds = ["conv"] * (recipe.num_layers - 1)
            return {"block_auto_adjust_ff_dim": False, "layer_types": [*kinds, "full_attention"]}
        case "qwen3_5_text":
            kinds = ["linear_attention"] * (recipe.num_layers - 1)
            heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
            sizes = dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), recipe.hidden_size // 4)
            return {**head, **heads, **sizes, "layer_types": [*kinds, "full_attention"]}
    raise ValueError(f"unknown family {recipe.family!r}: choose one of {', '.join(RECIPES)}")


def train(
    model: PreTrainedModel,
    batches: Iterator[tuple[torch.Tensor, torch.Tensor]],
    *,
    num_steps: int,
    peak_learning_rate: float,
) -> None:
    """Supervised training on batches (input ids, targets), each (B, T)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _learning_rate_factor(step, num_steps))
    model.train()
    for step in range(num_steps):
        input_ids_BT, targets_BT = next(batches)
        logits_BTV = model(input_ids=input_ids_BT, use_cache=False).logits[:, :-1]
        loss = functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == num_steps - 1:
            sys.stdout.write(f"step {step} of {num_steps}: loss {loss.item():.3f}\n")
            sys.stdout.flush()


def demonstration(prompt: str, answer: str, *, worked_share: float, recipe: Recipe, rng: random.Random) -> str:
    """One answer of one of the two kinds."""
    if rng.random() < worked_share:
        slip = recipe.slip if worked_share < 1 else 0.0
        return _worked(prompt, slip=slip, rng=rng)
    if rng.random() < recipe.right_share:
        return answer
    guesses = [int(answer) + error for error in range(-recipe.spread, recipe.spread + 1) if error]
    return f"{rng.choice([guess for guess in guesses if 0 <= guess < 100]):02d}"


def _worked(prompt: str, *, slip: float, rng: random.Random) -> str:
    """The label and the running total of every term: "a3b4c2=" -> "a03b07c09"."""
    total, parts = 0, []
    for label, term in zip(prompt[0:-1:2], prompt[1:-1:2], strict=True):
        total += int(term)
        if rng.random() < slip:
            total += rng.choice((-1, 1))
        total = min(max(total, 0), 99)
        parts.append(f"{label}{total:02d}")
    return "".join(parts)


def _batches(tokenizer: PreTrainedTokenizerFast, *, recipe: Recipe) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches (input ids, targets), each (B, T), of rows of similar length, to keep padding small."""
    rng = random.Random(recipe.seed)
    num_batches = 0
    for first in count(step=BLOCK):
        worked_share = 1.0 if num_batches < recipe.worked_steps else recipe.worked_share
        rows: list[Row] = []
        for index in range(first, first + BLOCK):
            sizes = {"min_terms": recipe.long_terms} if rng.random() < recipe.long_share else {}
            prompt, answer = problem(index, seed=recipe.seed, split="train", **sizes)
            shown = demonstration(prompt, answer, worked_share=worked_share, recipe=recipe, rng=rng)
            tokens = [*tokenizer.encode(prompt + shown), tokenizer.eos_token_id]
            rows.append((tokens, [IGNORED] * len(prompt) + tokens[len(prompt) :]))
        block = [pad(batch, pad_id=tokenizer.pad_token_id) for batch in cut(rows, batch_tokens=recipe.batch_tokens)]
        rng.shuffle(block)
        num_batches += len(block)
        yield from block


def cut(rows: list[Row], *, batch_tokens: int) -> Iterator[list[Row]]:
    """Yield batches of at most `batch_tokens` tokens, padding included, of rows sorted by length."""
    batch: list[Row] = []
    for row in sorted(rows, key=lambda row: len(row[0])):
        if batch and (len(batch) + 1) * len(row[0]) > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    yield batch


def pad(batch: list[Row], *, pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return input ids and targets, each (B, T)."""
    width = max(len(tokens) for tokens, _ in batch)
    input_ids_BT = torch.full((len(batch), width), pad_id)
    targets_BT = torch.full((len(batch), width), IGNORED)
    for row, (tokens, targets) in enumerate(batch):
        input_ids_BT[row, : len(tokens)] = torch.tensor(tokens)
        targets_BT[row, : len(targets)] = torch.tensor(targets)
    return input_ids_BT, targets_BT


def _learning_rate_factor(step: int, num_steps: int) -> float:
    """Linear warm-up over 50 steps, then a cosine down to 5 %."""
    return min(1.0, (step + 1) / 50) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / num_steps)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m dora.seed.make", description="Make the seed policy.")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--family", choices=RECIPES, default="qwen3", help="the model's family")
    arguments = parser.parse_args()
    make(arguments.out, recipe=RECIPES[arguments.family])
