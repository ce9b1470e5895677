"""One training step of the trainer on one core: CPU time and peak memory beside TRL's GRPO step and plain loops.

Run: python bench/training.py [--full] [--rounds N], after pip install -e '.[bench]' for TRL's row. Random weights;
answers whose lengths are the quantiles of a log-normal distribution, so that the longest has six to ten times the
median, in groups of 8 with prompts of 32 tokens. Every way takes the same step, from the answers to the updated weights
(AdamW), in float32 on one thread, in its own process; the norms of their gradients must agree within 0.1 %, or the
script fails. Ratios are medians over rounds of CPU seconds within a round; the first, small step of each process, which
warms up, is not counted. Memory is the largest resident memory during the step less that before it, when weights and
the optimizer's state are in place.

The ways: the trainer's own (micro-batches of at most 4,096 tokens as the controller cuts them, `Trainer.train`);
`compute_loss` of TRL's GRPOTrainer, on batches padded and shuffled as it does itself, 8 answers each, without
checkpointing; and plain transformers with SDPA, padded on the right: 8 answers each in the order in which they arrived,
or sorted by length into batches of at most 4,096 tokens with their padding. The last is the ceiling: it needs the whole
step before it can start, while the trainer starts with the first answers. The ratios depend on the lengths: a padded
way computes as many positions for each token as its row says, and the trainer one. TRL pads every answer to the longest
of the step, so that most of the ratio to it is padding, and grows with the tail. A hybrid (LFM2: convolutions and
attention), which cannot be packed, is compared with a plain loop over its sequences one by one. Policies beside the one
that is trained cost a forward pass each: a step of four updates with the proximal policy (its pass is left out in the
first update), with the reference policy and with both is compared with one that approximates the former. So is a step
whose answers are of the version before, with a probe of the engine's mismatch in that step. A step that trains an
adapter of rank 32 in all linear layers is compared with one that trains all weights, and with a plain loop over peft's
model, sorted by length.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from clients.steps import (
    GROUP_SIZE,
    PROMPT_TOKENS,
    Answers,
    accumulate,
    by_length,
    configure,
    draw_answers,
    in_order,
    make_adamw,
    make_trainer,
    micro_batches,
    one_rank,
    peak,
    reset_peak,
    settings,
    update,
)
from result import Report, number, parser

from dora.core.ids import VersionId
from dora.errors import ConfigError
from dora.trainer.checkpointing import Mode
from dora.trainer.meshes import make_mesh
from dora.trainer.model import Policy
from dora.transport.messages import LoraSettings
from dora.weights.store import VersionStore

BUDGET = 4_096
ROWS = 8
VOCAB = 12_288
HYBRID_VOCAB = 4_096
WARM_UP = 8  # answers of the step that warms up, of 64 tokens
AGREE = 1e-3
ENV = {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
NO_TRL = "TRL is not installed: pip install -e '.[bench]'"


class Found(msgspec.Struct):
    """What one process measured, or why it could not."""

    cpu_s: float = 0.0
    peak_bytes: int = 0
    grad_norm: float = 0.0
    refused: str = ""


class Ceiling(NamedTuple):
    """A way that the trainer's is compared with."""

    way: str
    words: str
    bar: str


LORA = LoraSettings(
    rank=32,
    alpha=32.0,
    rslora=False,
    targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    seed=0,
)
UPDATES = 4
#: Ways with more policies than the one that is trained.
POLICIES = {"proximal": "proximal policy", "reference": "reference policy", "both": "both"}
PROBE_TOKENS = 512

CEILINGS = (
    Ceiling("trl", "TRL's GRPO step", "ratio >= 3"),
    Ceiling("padded", "a padded loop in order of arrival", ""),
    Ceiling("sorted", "a loop sorted by length", "ratio >= 1"),
    Ceiling("full", "the same with all layers checkpointed", ""),
)


# --- the models


def make_models(folder: Path) -> None:
    """A Qwen3 with 20 M parameters and an LFM2 with 5 M, random."""
    from transformers import Lfm2Config, Lfm2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shared = {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 32_768}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": True}
    dense = Qwen3Config(
        vocab_size=VOCAB, hidden_size=384, intermediate_size=1_024, num_hidden_layers=10, head_dim=64, **shared, **ends
    )
    Qwen3ForCausalLM(dense).save_pretrained(folder / "dense")
    hybrid = Lfm2Config(
        vocab_size=HYBRID_VOCAB,
        hidden_size=240,
        intermediate_size=720,
        block_auto_adjust_ff_dim=False,
        num_hidden_layers=6,
        layer_types=["conv", "conv", "full_attention", "conv", "conv", "full_attention"],
        **shared,
        **ends,
    )
    Lfm2ForCausalLM(hybrid).save_pretrained(folder / "hybrid")


# --- one way, in a process of its own


Step = Callable[[Answers], float]  #: a whole step; returns the norm of its gradient


def ours(folder: Path, model: str, mode: Mode = "none", **changes: Any) -> Step:
    """`changes`: of the trainer's settings."""
    chosen = settings(device="cpu", dtype="float32", micro_batch_tokens=BUDGET, mode=mode)
    chosen = msgspec.structs.replace(chosen, **changes)
    trainer = make_trainer(configure(folder / model, chosen, store=folder))
    steps = iter(range(1_000_000))

    def step(answers: Answers) -> float:
        number = next(steps)
        for batch in micro_batches(answers, step=number, budget=BUDGET, updates=chosen.updates):
            stale = batch.versions - min(number, chosen.max_staleness)
            trainer.train(msgspec.structs.replace(batch, versions=stale))
        return trainer.grad_norm

    return step


def with_policies(folder: Path, *, proximal: bool = False, reference: bool = False) -> Step:
    """A step of several updates with these policies beside the one that is trained."""
    objective = {
        "preset": "dapo",
        "weight_high": 1.0,
        "proximal": "copy" if proximal else "approximate",
        "kl_coefficient": 1e-3 if reference else 0.0,
    }
    return ours(folder, "dense", updates=UPDATES, objective=json.dumps(objective))


def probed(folder: Path) -> Step:
    """A step whose answers are of the version before it, with a probe."""
    store = VersionStore(memory_root=folder / "memory", durable_root=folder / "durable")
    staged = store.stage(VersionId(0))
    shutil.copytree(folder / "dense", staged, dirs_exist_ok=True)
    store.seal(VersionId(0), staged)
    return ours(folder, "dense", max_staleness=1, probe_tokens=PROBE_TOKENS, probe_every=1)


def plain(
    folder: Path, model: str, batches: Callable[[Answers], list[list[int]]], *, has_adapter: bool = False
) -> Step:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder / model, attn_implementation="sdpa", dtype=torch.float32)
    if has_adapter:
        loaded = adapted(loaded, folder / model)
    optimizer = make_adamw(loaded)

    def step(answers: Answers) -> float:
        for batch in batches(answers):
            accumulate(loaded, answers, batch)
        return update(loaded, optimizer)

    return step


def adapted(loaded: Any, folder: Path) -> Any:
    """The model with peft's own modules and the first values of the trainer's adapter."""
    from peft import LoraConfig, get_peft_model

    ours = Policy(folder, mesh=make_mesh("cpu"), dtype=torch.float32, lora=LORA)
    config = LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules=list(LORA.targets))
    model = get_peft_model(loaded, config)
    theirs = dict(model.named_parameters())
    for name, shard in ours.trained().items():
        theirs[f"base_model.model.{name}"].data.copy_(shard)
    return model


def trl(folder: Path) -> Step:
    """GRPOTrainer's own loss and backward, on what it would have made of these answers."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    loaded = AutoModelForCausalLM.from_pretrained(folder / "dense", attn_implementation="sdpa", dtype=torch.float32)
    words = Tokenizer(models.WordLevel({"a": 0, "<end>": 1}, unk_token="a"))
    trainer = GRPOTrainer(
        model=loaded,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=ROWS,
            num_generations=GROUP_SIZE,
            beta=0.0,
            loss_type="dapo",
            gradient_checkpointing=False,
            report_to=[],
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * GROUP_SIZE}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>"),
    )
    optimizer = make_adamw(loaded)

    def step(answers: Answers) -> float:
        loaded.train()
        batches = trl_batches(answers)
        # As with steps_per_generation = gradient_accumulation_steps, TRL's default: a step trains what it generated.
        trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = len(batches)
        for batch in batches:
            trainer.accelerator.backward(trainer.compute_loss(trainer.model, batch))
        return update(loaded, optimizer)

    return step


def trl_batches(answers: Answers) -> list[dict[str, torch.Tensor]]:
    """The answers of a step, padded to the longest of them, shuffled, and split."""
    from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

    completions = [torch.from_numpy(tokens[PROMPT_TOKENS:]) for tokens in answers.tokens]
    pad = torch.nn.utils.rnn.pad_sequence
    batch = {
        "prompt_ids": torch.from_numpy(np.stack([tokens[:PROMPT_TOKENS] for tokens in answers.tokens])),
        "prompt_mask": torch.ones(len(answers), PROMPT_TOKENS, dtype=torch.long),
        "completion_ids": pad(completions, batch_first=True),
        "completion_mask": pad([torch.ones_like(tokens) for tokens in completions], batch_first=True),
        "advantages": torch.from_numpy(answers.advantages).float(),
    }
    whole = torch.tensor(answers.trained)
    parts = split_tensor_dict(shuffle_sequence_dict(batch), -(-len(answers) // ROWS))
    return [part | {"num_items_in_batch": whole} for part in parts]


def positions(way: str, answers: Answers) -> float:
    """Return how many positions a way computes for each token; 1 without padding."""
    batches = [list(range(len(answers)))]  # TRL's, which are padded before they are split
    if way != "trl":
        batches = in_order(answers, rows=ROWS) if way == "padded" else by_length(answers, budget=BUDGET)
    return sum(len(batch) * max(answers.lengths[i] for i in batch) for batch in batches) / sum(answers.lengths)


def make_way(name: str, folder: Path) -> Step:
    match name:
        case "ours":
            return ours(folder, "dense")
        case "updates":
            return with_policies(folder)
        case "proximal":
            return with_policies(folder, proximal=True)
        case "reference":
            return with_policies(folder, reference=True)
        case "both":
            return with_policies(folder, proximal=True, reference=True)
        case "probe":
            return probed(folder)
        case "full":
            return ours(folder, "dense", "full")
        case "trl":
            return trl(folder)
        case "padded":
            return plain(folder, "dense", lambda answers: in_order(answers, rows=ROWS))
        case "sorted":
            return plain(folder, "dense", lambda answers: by_length(answers, budget=BUDGET))
        case "adapter":
            return ours(folder, "dense", lora=LORA)
        case "adapter sorted":
            return plain(folder, "dense", lambda answers: by_length(answers, budget=BUDGET), has_adapter=True)
        case "hybrid":
            return ours(folder, "hybrid")
        case "hybrid alone":
            return plain(folder, "hybrid", lambda answers: in_order(answers, rows=1))
    raise ValueError(name)


def measure_here(name: str, folder: Path, answers: int, num_tokens: int) -> Found:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    vocab = HYBRID_VOCAB if name.startswith("hybrid") else VOCAB
    with one_rank("cpu"):
        try:
            step = make_way(name, folder)
        except ConfigError as err:
            return Found(refused=str(err))
        step(draw_answers(WARM_UP, num_tokens=64 * WARM_UP, vocab_size=vocab))
        work = draw_answers(answers, num_tokens=num_tokens, vocab_size=vocab)
        gc.collect()
        before = reset_peak()
        begun = time.process_time()
        grad_norm = step(work)
        return Found(cpu_s=time.process_time() - begun, peak_bytes=peak() - before, grad_norm=grad_norm)


# --- all of them


def measure(name: str, folder: Path, *, answers: int, num_tokens: int) -> Found:
    command = [sys.executable, __file__, "--way", name, str(folder), str(answers), str(num_tokens)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **ENV})
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Found)


def compare(report: Report, what: str, ours: list[Found], theirs: list[Found], *, words: str, bar: str = "") -> None:
    """One row of time and one of memory."""
    for found in theirs:
        if not math.isclose(found.grad_norm, ours[0].grad_norm, rel_tol=AGREE):
            raise SystemExit(f"{words}: its gradient is {found.grad_norm:.6g}, the trainer's {ours[0].grad_norm:.6g}")
    cpu_s, their_s = (statistics.median(found.cpu_s for found in side) for side in (ours, theirs))
    peak_mb, their_mb = (statistics.median(found.peak_bytes for found in side) / 1e6 for side in (ours, theirs))
    report.row(
        f"{what}: one step",
        cpu_s,
        "CPU s",
        against=f"{words}, {number(their_s)} CPU s",
        ratio=statistics.median(there.cpu_s / here.cpu_s for here, there in zip(ours, theirs, strict=True)),
        bar=bar,
    )
    report.row(
        f"{what}: peak memory", peak_mb, "MB", against=f"{words}, {number(their_mb)} MB", ratio=peak_mb / their_mb
    )


def about_padding(padded: dict[str, float]) -> str:
    """Return what the ratios of the padded ways consist of."""
    return (
        f"The ratio to TRL is of these lengths, and mostly padding: TRL pads every answer to the longest, so that it "
        f"computes {padded['trl']:.1f} positions for each token. A plain loop that sorts by length computes "
        f"{padded['sorted']:.1f}, and its row says what is left of the ratio"
    )


def cost(report: Report, what: str, more: list[Found], less: list[Found], *, words: str) -> None:
    """One row: the time of a step with something more."""
    cpu_s, less_s = (statistics.median(found.cpu_s for found in side) for side in (more, less))
    ratio = statistics.median(one.cpu_s / other.cpu_s for one, other in zip(more, less, strict=True))
    report.row(what, cpu_s, "CPU s", against=f"{words}, {number(less_s)} CPU s", ratio=ratio)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, help="1, or 3 with --full")
    arguments.add_argument("--way", nargs=4, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.way:
        name, folder, answers, num_tokens = options.way
        found = measure_here(name, Path(folder), int(answers), int(num_tokens))
        print(msgspec.json.encode(found).decode())
        return
    rounds, answers, num_tokens = (3, 64, 22_000) if options.full else (1, 24, 3_000)
    rounds = options.rounds or rounds
    drawn = draw_answers(answers, num_tokens=num_tokens, vocab_size=VOCAB)
    lengths, padded = drawn.lengths, {way: positions(way, drawn) for way in ("trl", "padded", "sorted")}
    median = statistics.median(lengths)
    sizes = f"Qwen3, 20 M; {num_tokens:,} tokens in {answers} answers, median {median:.0f}, longest {max(lengths):,}"
    sizes += f"; {rounds} round{'s' if rounds > 1 else ''}"
    report = Report(__doc__, full=options.full, sizes=f"{sizes}. {about_padding(padded)}")
    ceilings = [ceiling for ceiling in CEILINGS if ceiling.way != "trl" or find_spec("trl")]
    ways = ["ours", *(ceiling.way for ceiling in ceilings), "hybrid", "hybrid alone", "updates", *POLICIES, "probe"]
    ways += ["adapter", "adapter sorted"]
    all_found: dict[str, list[Found]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder))
        for _ in range(rounds):
            for name in ways:
                all_found[name].append(measure(name, Path(folder), answers=answers, num_tokens=num_tokens))
    for ceiling in CEILINGS:
        if ceiling not in ceilings:
            report.skip(f"packed: beside {ceiling.words}", NO_TRL)
            continue
        words = ceiling.words + (f", {padded[ceiling.way]:.2f} positions a token" if ceiling.way in padded else "")
        compare(report, "packed", all_found["ours"], all_found[ceiling.way], words=words, bar=ceiling.bar)
    if refused := all_found["hybrid"][0].refused:
        report.skip("hybrid, 5 M, right-padded rows", refused)
    else:
        compare(
            report, "hybrid, 5 M", all_found["hybrid"], all_found["hybrid alone"], words="a loop over its sequences"
        )
    for way, what in POLICIES.items():
        cost(report, f"{UPDATES} updates, {what}: one step", all_found[way], all_found["updates"], words="without")
    what = f"answers of the version before, a probe of {PROBE_TOKENS} tokens: one step"
    cost(report, what, all_found["probe"], all_found["ours"], words="without")
    words = "all weights trained"
    cost(report, f"an adapter of rank {LORA.rank}: one step", all_found["adapter"], all_found["ours"], words=words)
    words = "a loop over peft's model, sorted by length"
    compare(report, f"an adapter of rank {LORA.rank}", all_found["adapter"], all_found["adapter sorted"], words=words)
    report.print()


if __name__ == "__main__":
    main()
