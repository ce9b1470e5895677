"""Writes docs/MODELS.md: what the trainer does with each family of models, measured.

    python -m tests.models [FAMILY ...]

Every family is a tiny random model of its own transformers classes. It is saved as its publishers do, loaded and
checked by the trainer, and then compared with plain transformers, which this module calls itself: each sequence alone,
under transformers' own attention, without any code of the trainer.
"""

from __future__ import annotations

import sys
import tempfile
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from dora.errors import ConfigError
from dora.routers import routing_shape
from dora.trainer.forward_check import check_training
from dora.trainer.logprobs import logprobs
from dora.trainer.meshes import make_mesh
from dora.trainer.model import Policy, build_on_meta
from dora.trainer.packing import SHARE_ABOVE, Layout, make_row, prompts_of, split_passes
from tests.families import FAMILIES, make_config, make_model
from tests.trainer.publishing import gather

DOCUMENT: Final = Path(__file__).parents[1] / "docs" / "MODELS.md"
#: Lengths of the sequences; some beyond the sliding window and the LongRoPE limit of the tiny configurations.
LENGTHS: Final = (3, 70, 33, 18, 90, 41, 4)
#: Tokens of their prompts; prompts of the same length are the same.
PROMPTS: Final = (1, 20, 20, 1, 20, 20, 1)
LARGEST_ERROR: Final = 1e-4
LARGEST_GRADIENT_ERROR: Final = 1e-3


@dataclass(frozen=True)
class Verdict:
    """One row of the table."""

    family: str
    rows: str = ""  # packed or padded, and whether answers may share their prompt
    error: float = 0.0  # max |Δ log-prob|
    gradient_error: float = 0.0  # |Δ gradient| / |gradient|
    published: str = ""  # what was published, against the folder that was loaded
    problem: str = ""  # why it is refused

    @property
    def is_right(self) -> bool:
        """Whether it is either exact or refused, rather than silently wrong."""
        exact = self.error <= LARGEST_ERROR and self.gradient_error <= LARGEST_GRADIENT_ERROR
        return bool(self.problem) or (exact and self.published == "identical")

    def line(self) -> str:
        """Return the row in Markdown."""
        if self.problem:
            return f"| {self.family} | refused | | | | {self.problem.replace('|', chr(92) + '|')} |"
        verdict = "trained" if self.is_right else "WRONG"
        errors = f"{self.error:.0e} | {self.gradient_error:.0e}"
        return f"| {self.family} | {self.rows} | {errors} | {self.published} | {verdict} |"


def examine(family: str, *, device: str = "cpu") -> Verdict:
    """Measure a family. Needs a process group of one rank."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            make_model(family).save_pretrained(folder)
            policy = Policy(folder, mesh=make_mesh(device), dtype=torch.float32)
            checked = check_training(policy, dtype="float32")
        except ConfigError as err:
            return Verdict(family, problem=str(err).removeprefix("model.path: ").replace(name, "the folder"))
        except Exception as err:  # noqa: BLE001 - a refusal must be a ConfigError
            return Verdict(family, published=f"raw {err!r}".splitlines()[0])
        rows = "padded" if checked.layout.padded else "packed"
        if checked.layout.rope_limit is not None:
            rows += ", long apart"
        layouts = [replace(checked.layout, share_above=SHARE_ABOVE["off"])]
        if checked.layout != layouts[0]:
            rows += ", shared"
            layouts.append(replace(checked.layout, share_above=SHARE_ABOVE["on"]))
        errors = [compare(policy, layout, folder) for layout in layouts]
        error, gradient_error = (max(column) for column in zip(*errors, strict=True))
        return Verdict(family, rows, error, gradient_error, published(policy, folder))


def compare(policy: Policy, layout: Layout, folder: Path) -> tuple[float, float]:
    """Return the largest difference of a log-prob, and the relative one of the gradient, from plain transformers."""
    vocab_size = policy.vocab_size
    sequences = [
        np.concatenate([np.random.default_rng(k).integers(0, vocab_size, k) for k in (prompt, n - prompt)])
        for n, prompt in zip(LENGTHS, PROMPTS, strict=True)
    ]
    mask = [np.arange(n) >= prompt for n, prompt in zip(LENGTHS, PROMPTS, strict=True)]
    weights = [torch.from_numpy(np.random.default_rng(len(m)).normal(size=m.sum())).float() for m in mask]
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    expected = []
    for tokens, prompt, weight_P in zip(sequences, PROMPTS, weights, strict=True):
        tokens_T = torch.from_numpy(tokens)
        logits_TV = plain(input_ids=tokens_T[None], use_cache=False).logits[0]
        expected.append(logits_TV[:-1].log_softmax(-1).gather(-1, tokens_T[1:, None])[prompt - 1 :, 0])
        (expected[-1] * weight_P).sum().backward()
    error = 0.0
    prompts = prompts_of(np.concatenate(sequences), lengths=LENGTHS, trained=np.concatenate(mask).nonzero()[0])
    for members in split_passes(LENGTHS, prompts=prompts, layout=layout, budget=1000):
        row = make_row(
            np.concatenate([sequences[n] for n in members]),
            lengths=[LENGTHS[n] for n in members],
            trained=np.concatenate([mask[n] for n in members]).nonzero()[0],
            layout=layout,
            device=policy.device,
        )
        policy.prepare(closes_update=True)
        found_P = logprobs(policy.model, row, temperature=1.0)[0].cpu()
        error = max(error, float((found_P - torch.cat([expected[n] for n in members])).detach().abs().max()))
        (found_P * torch.cat([weights[n] for n in members])).sum().backward()
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    gradients = {name: gradient.cpu() for name, gradient in policy.gradients().items()}
    policy.clear_gradients()
    return error, relative_difference(gradients, wanted)


def relative_difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return |found - wanted| / |wanted| over all tensors; a tensor without a gradient counts as zero."""
    names = found.keys() | wanted.keys()
    zero = torch.zeros(())
    difference = sum(float((found.get(n, zero) - wanted.get(n, zero)).double().square().sum()) for n in names)
    return float((difference / sum(float(t.double().square().sum()) for t in wanted.values())) ** 0.5)


def published(policy: Policy, folder: Path) -> str:
    """Compare what would be published, in names and bits, with the folder that was loaded."""
    loaded = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    written = gather(policy)
    if differing := sorted(written.keys() ^ loaded.keys()):
        return f"{differing[0]} and {len(differing) - 1} other names differ"
    changed = sorted(name for name in loaded if not torch.equal(written[name], loaded[name].float()))
    return f"{changed[0]} and {len(changed) - 1} others changed" if changed else "identical"


def document(verdicts: Sequence[Verdict]) -> str:
    """Return the text of docs/MODELS.md."""
    trained = sum(not v.problem for v in verdicts)
    lines = "\n".join(verdict.line() for verdict in verdicts)
    return f"""# Models

Which families of models the trainer accepts, and how it trains them. Written by `python -m tests.models` on a CPU; do
not edit. {trained} of {len(verdicts)} families are trained; the others are refused before anything is trained, with
the message shown. The same on a GPU: unverified without a GPU.

Each family is a tiny model with random weights, built from the classes of transformers, saved as its publishers save
it, and loaded by the trainer. Its log-probs and gradients (float32, up to {max(LENGTHS)} tokens) are compared
with those of each sequence alone in plain transformers, under its own attention. The same comparison, on the loaded
model and its device, runs whenever a trainer starts and in `dora check`; log-probs are compared again as weights are
trained ([TRAINER.md](TRAINER.md)). `python -m tests.drawn SEED` does so in bfloat16, before and after 60 updates, with
families and shapes drawn at random from all those of transformers.

- *packed*: all sequences of a forward pass follow each other in one row.
- *padded*: a row per sequence, for every model with a layer that carries state from token to token (recurrence, linear
  attention, state space, convolution), in every data type: the kind of model decides the layout, and the measurement
  can only refuse it. Sequences of similar length share a pass; the metric `padding_frac` is the cost.
- *long apart*: sequences beyond the original context, whose rotary embedding (LongRoPE) differs, have passes of their
  own.
- *shared*: answers to one prompt may follow it in a row that has it once; the differences are the larger ones of rows
  with and without.
- *published*: whether a version published without training has the names and the bits of the folder that was loaded.

Some kinds of models are refused, whatever their weights: encoders and models with an encoder (BERT, RoBERTa,
CamemBERT, BART and others), and models of images or sound, unless transformers can build their text model alone
(Qwen3.5, Llama 4). The error says whether the text model can be trained from a folder of its own. A run is refused if
its longest request has more tokens than the model has positions, or than the original context of a `dynamic` rotary
embedding in any layer.

{textwrap.fill(replaying(), 120)}

Every version has all tensors of the folder. Those that are not trained (buffers, and tensors of a vision part or of
layers that predict several tokens) are published bit for bit as they were read, except that FP8 is dequantised.

| family | rows | max. difference of a log-prob | of the gradient | published | verdict |
|---|---|---|---|---|---|
{lines}
"""


def replaying() -> str:
    """Return a sentence on the families that can replay the experts of an engine, and one for each that cannot."""
    able, unable = [], []
    for family in sorted(FAMILIES):
        try:
            routing_shape(build_on_meta(make_config(family), torch.float32))
            able.append(f"`{family}`")
        except ConfigError as err:
            reason = str(err).removeprefix("objective.router_replay: ").partition("; ")[0]
            unable += [f" Refused: {reason}."] if reason.startswith("routers of ") else []
    return (
        "With `objective.router_replay`, the trainer sends tokens to the experts that the engine chose "
        f"([TRAINER.md](TRAINER.md#experts-of-the-engine)). Families that can: {', '.join(able)}.{''.join(unable)}"
    )


def main(families: Sequence[str]) -> None:
    """Examine the families given, or all of them and write the document."""
    warnings.simplefilter("ignore")
    disable_progress_bar()
    set_verbosity_error()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    verdicts = []
    for family in families or sorted(FAMILIES):
        verdicts.append(examine(family))
        print(verdicts[-1].line(), flush=True)  # noqa: T201
    dist.destroy_process_group()
    if not families:
        DOCUMENT.write_text(document(verdicts))
    if wrong := [verdict.family for verdict in verdicts if not verdict.is_right]:
        sys.exit(f"silently wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    main(sys.argv[1:])
