"""The parts of bench/gpu.py: what each measures, which statements it settles, and how long it may take.

Invariant: each statement of README.md, docs/ and dora/ that ends with `MARK` is settled by one part, and each statement
here is in its file (tests/static/test_bench_parts.py). What a part has found on a GPU takes the place of the statement
in its file, and the statement is removed here. No torch: `--list` and bench/README.md need the names alone.
"""

from __future__ import annotations

from typing import NamedTuple

MARK = "unverified without a GPU"
#: Why a case has no figures if the time of its part was over: such a part is not done.
NOT_REACHED = "not reached in the time of this part"


class Statement(NamedTuple):
    """A statement that ends with `MARK`."""

    file: str  # from the root of the repository
    words: str  # some of the words before the mark


class Part(NamedTuple):
    """What one call of `bench/gpu.py --part` measures; no part needs the results of another."""

    name: str
    module: str  # of this package; its function `cases` returns what is measured
    title: str
    limit_s: float
    settles: tuple[Statement, ...] = ()


_TRAINER, _DECISIONS = "docs/TRAINER.md", "docs/DECISIONS.md"
_ALL = (
    Part(
        "kernels",
        "kernels",
        "Attention kernels against the definition in float64: outputs and gradients.",
        420.0,
        (
            Statement(_TRAINER, "soft caps and sinks, FlexAttention is used"),
            Statement(_TRAINER, "FlexAttention gets a block mask in which a query sees its own segment and its prompt"),
            Statement("dora/trainer/attention_gpu.py", "FlashAttention over rows of any lengths, and FlexAttention."),
        ),
    ),
    Part(
        "families",
        "families",
        "The check of the forward pass: families of models, its tolerances, and leaks that were planted.",
        480.0,
        (
            Statement(_DECISIONS, "four times that change is allowed"),
            Statement(_DECISIONS, "the smallest leak was 3.3 times it"),
            Statement("docs/MODELS.md", "The same on a GPU"),
        ),
    ),
    Part("tests", "tests", "The tests that need a GPU (`pytest -m gpu`).", 420.0),
    Part("default-job", "default_job", "`dora run` with its embedded engines and its trainer on one GPU.", 420.0),
    Part("training-1.7B", "training", "Training Qwen3 1.7B: tokens/s, MFU, memory.", 480.0),
    Part(
        "publication",
        "publication",
        "Publication: how long training stands, and how long until the version is in the store.",
        360.0,
        (Statement(_TRAINER, "it copies in a stream of its own"),),
    ),
    Part(
        "moments",
        "moments",
        "AdamW's moments on the device, in 8 bits and on the host (`trainer.optimizer_state`).",
        360.0,
        (
            Statement(_TRAINER, "or on the host, where the update is then computed"),
            Statement(_DECISIONS, "since weights and gradients are copied"),
        ),
    ),
    Part(
        "copies",
        "copies",
        "The proximal and the reference policy on the device and on the host (`trainer.copies`).",
        240.0,
        (
            Statement(_TRAINER, "`trainer.copies = host` keeps the shards in pinned host memory"),
            Statement("dora/config/schema.py", "from which every layer is fetched before it computes"),
        ),
    ),
    Part("out-of-memory", "out_of_memory", "The error when memory runs out, and what it advises.", 240.0),
    Part(
        "compile",
        "compiled",
        "Compiled layers (`trainer.compile`): tokens/s, and the time to compile them.",
        360.0,
        (
            Statement(_TRAINER, "compiles the layers with torch.compile"),
            Statement("dora/config/schema.py", "on a CPU nothing is gained"),
        ),
    ),
    Part(
        "queue-wait",
        "queue_wait",
        "The waits for the queue of the GPU where ranks meet (`slowest_rank`).",
        180.0,
        (Statement(_TRAINER, "it includes one wait for the GPU's queue each"),),
    ),
    Part(
        "engine",
        "engine",
        "The embedded engine: log-probs of hybrids and experts beside a plain forward pass.",
        300.0,
        (Statement("docs/ENGINES.md", "Hybrids and experts on a GPU"),),
    ),
    Part("training-8B", "training", "Training Qwen3 8B, without an optimizer: tokens/s, MFU, memory.", 480.0),
    Part("training-0.6B", "training", "Training Qwen3 0.6B: tokens/s, MFU, memory.", 480.0),
)
#: In the order in which they are run.
PARTS = {part.name: part for part in _ALL}
