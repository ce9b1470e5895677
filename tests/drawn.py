"""The check of the forward pass on families that nobody chose, in bfloat16, before and after training.

    python -m tests.drawn SEED

Ten families that can be trained are drawn from transformers' own list, three of them with layers that carry state,
none of them in `NAMED`. Each gets a random shape, lengths beyond every threshold of its configuration (windows, chunks,
original contexts), and the weights that transformers draws. It is checked by the trainer in bfloat16, makes 60 updates,
and is checked again. Both times the layout is compared with plain transformers in float32, one sequence at a time.
"""

from __future__ import annotations

import random
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from dora.errors import ConfigError
from dora.trainer.forward_check import check_again, check_training
from dora.trainer.layouts import carries_state
from dora.trainer.logprobs import logprobs
from dora.trainer.meshes import make_mesh
from dora.trainer.model import Policy
from dora.trainer.packing import Layout, make_row
from dora.trainer.thresholds import thresholds
from tests.families import FAMILIES, SHAPE
from tests.models import LARGEST_ERROR, LARGEST_GRADIENT_ERROR, LENGTHS, compare
from tests.trainer.publishing import gather

NUM_FAMILIES: Final = 10
NUM_STATEFUL: Final = 3
#: Those with which the check was found to be wrong.
NAMED: Final = frozenset({
    "recurrent_gemma", "lfm2", "falcon_h1", "mamba", "bamba", "granitemoehybrid", "qwen3_5", "qwen3_5_text", "gpt2",
    "gemma3", "minimax", "camembert", "xlm-roberta",
})  # fmt: skip
UPDATES: Final = 60
LEARNING_RATE: Final = 3e-3
LONGEST: Final = max(LENGTHS)
#: Families with more parameters in the small shape are not drawn: their configurations do not take it.
MOST_PARAMETERS: Final = 3e7


@dataclass(frozen=True)
class Found:
    """One row of the table."""

    family: str
    weights: str  # random or trained
    rows: str
    beyond: str  # the thresholds, in tokens
    exact: tuple[float, float]  # in float32: max |Δ log-prob|, |Δ gradient| / |gradient|
    rounding: tuple[float, float]  # in bfloat16 against float32: mean |Δ log-prob| of the layout, and of each alone

    @property
    def is_right(self) -> bool:
        """Whether it is exact in float32, and rounds in bfloat16 as sequences alone do."""
        error, gradient_error = self.exact
        laid_out, alone = self.rounding
        return error <= LARGEST_ERROR and gradient_error <= LARGEST_GRADIENT_ERROR and laid_out <= 1.2 * alone + 1e-4

    def line(self) -> str:
        """Return the row in Markdown."""
        errors = " | ".join(f"{figure:.0e}" for figure in (*self.exact, *self.rounding))
        verdict = "right" if self.is_right else "WRONG"
        return f"| {self.family} | {self.weights} | {self.rows} | {self.beyond} | {errors} | {verdict} |"


def draw(seed: int) -> Iterator[tuple[str, Any, bool]]:
    """Yield families in random order, with a random shape, and whether they carry state; only those that are small."""
    rng = random.Random(seed)
    names = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES).union(FAMILIES) - NAMED)
    rng.shuffle(names)
    for name in names:
        shape = {**SHAPE, **FAMILIES.get(name, {}), "vocab_size": rng.choice((67, 131, 200))}
        if name not in FAMILIES:
            shape |= {"num_hidden_layers": rng.choice((2, 3, 5)), "hidden_size": rng.choice((32, 64))}
        lengths = [rng.choice((16, 32)) for _ in range(20)]
        with suppress(Exception):  # a configuration that does not take the shape
            config = AutoConfig.for_model(name, **shape)
            config.eos_token_id = config.bos_token_id = config.pad_token_id = None
            text = config.get_text_config(decoder=True)
            for setting, length in zip(thresholds(config), lengths, strict=False):
                if "." not in setting and getattr(text, setting) > LONGEST:
                    setattr(text, setting, length)
            with torch.device("meta"):
                model: Any = AutoModelForCausalLM.from_config(config)
            if sum(parameter.numel() for parameter in model.parameters()) <= MOST_PARAMETERS:
                yield name, config, carries_state(model)


def examine(name: str, config: Any, folder: Path) -> Iterator[Found]:
    """Yield what is found under random and under trained weights; ConfigError if the trainer refuses the family."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    policy = Policy(folder, mesh=make_mesh("cpu"), dtype=torch.bfloat16)
    layout = check_training(policy, dtype="bfloat16", shared_prompts="off", longest=LONGEST).layout
    yield measure(name, "random", policy, layout, folder)
    train(policy, layout)
    check_again(policy, layout, dtype="bfloat16", longest=LONGEST, weights="the trained weights")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    save_file(gather(policy), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    yield measure(name, "trained", policy, layout, folder)


def train(policy: Policy, layout: Layout) -> None:
    """Let the policy learn a few sequences by heart."""
    shards = policy.shards()
    optimizer = torch.optim.AdamW(shards.values(), lr=LEARNING_RATE)
    row = row_of([np.random.default_rng(n).integers(0, policy.vocab_size, 40) for n in range(4)], layout)
    for _ in range(UPDATES):
        policy.prepare(closes_update=True)
        (-logprobs(policy.model, row, temperature=1.0)[0].mean()).backward()
        for name, gradient in policy.gradients().items():
            shards[name].grad = gradient
        optimizer.step()
        policy.clear_gradients()
        policy.reshard()


def measure(name: str, weights: str, policy: Policy, layout: Layout, folder: Path) -> Found:
    """Compare a layout with plain transformers in float32."""
    config = policy.model.config
    exact = compare(Policy(folder, mesh=make_mesh("cpu"), dtype=torch.float32), layout, folder)
    sequences = [np.random.default_rng(n).integers(0, policy.vocab_size, n) for n in LENGTHS]
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    wanted = torch.cat([plain_logprobs(plain, torch.from_numpy(tokens)) for tokens in sequences])
    with torch.no_grad():
        alone = torch.cat([logprobs(policy.model, row_of([s], layout), temperature=1.0)[0] for s in sequences])
        laid_out = logprobs(policy.model, row_of(sequences, layout), temperature=1.0)[0]
    policy.reshard()
    rounding = (float((laid_out - wanted).abs().mean()), float((alone - wanted).abs().mean()))
    beyond = ", ".join(map(str, sorted(thresholds(config).values()))) or "none"
    return Found(name, weights, "padded" if layout.padded else "packed", beyond, exact, rounding)


@torch.no_grad()
def plain_logprobs(model: Any, tokens_T: Tensor) -> Tensor:
    """Return the log-probs of a sequence after its first token, without any code of the trainer."""
    logits_TV = model(input_ids=tokens_T[None], use_cache=False).logits[0]
    return logits_TV[:-1].log_softmax(-1).gather(-1, tokens_T[1:, None])[:, 0]


def row_of(sequences: list[np.ndarray[Any, Any]], layout: Layout) -> Any:
    """Return one row of whole sequences, of which every token after the first is trained."""
    trained = np.concatenate([np.arange(len(tokens)) for tokens in sequences]).nonzero()[0]
    lengths, device = [len(tokens) for tokens in sequences], torch.device("cpu")
    return make_row(np.concatenate(sequences), lengths=lengths, trained=trained, layout=layout, device=device)


def main(seed: int) -> None:
    """Draw families until ten have been examined."""
    warnings.simplefilter("ignore")
    disable_progress_bar()
    set_verbosity_error()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    left = {True: NUM_STATEFUL, False: NUM_FAMILIES - NUM_STATEFUL}
    wrong = []
    for name, config, is_stateful in draw(seed):
        if not left[is_stateful]:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                for found in examine(name, config, Path(folder)):
                    print(found.line(), flush=True)  # noqa: T201
                    wrong += [] if found.is_right else [f"{name} ({found.weights})"]
            except ConfigError as err:
                print(f"| {name} | refused: {str(err).replace(folder, 'the folder')} |", flush=True)  # noqa: T201
                continue
        left[is_stateful] -= 1
    dist.destroy_process_group()
    if wrong or any(left.values()):
        sys.exit(f"silently wrong: {', '.join(wrong)}; not found: {sum(left.values())}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
