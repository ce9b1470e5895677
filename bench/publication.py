"""Publication beside training: what it adds to a step and to the memory of a rank, and the way of before.

Run: python bench/publication.py [--full] [--folder DIR]. A Qwen3 of 200 million parameters with random weights, in
float32, on two ranks (gloo, one thread each), each a process; steps of one micro-batch of 512 tokens a rank. Blocks of
steps that publish each version alternate with blocks that publish nothing, within one run; a block ends when its last
version is in the store. The ceiling of a step is one without publication. Beside it stands the way of before: the model
was gathered on rank 0 when the step closed, and a thread wrote one file. It is measured by gathering all tensors to
rank 0 (`writers=1`) and saving them with the safetensors library. Memory is the largest resident memory of a rank in a
block that publishes, less that in a block that does not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from clients.steps import Answers, Reports, configure, draw_answers, make_batch, peak, reset_peak, settings, timed
from result import Report, number, parser
from torch._C._distributed_c10d import FileStore, PrefixStore

from dora.trainer.buckets import BUCKET_BYTES
from dora.trainer.meshes import make_mesh
from dora.trainer.model import Policy
from dora.trainer.packing import Layout
from dora.trainer.publish import Publisher
from dora.trainer.step import Trainer
from dora.transport.trainer_end import TrainerEnd
from dora.weights.store import VersionStore
from tests.trainer.publishing import Unpublished, gather, make_saver

RANKS: Final = 2
TOKENS: Final = 512  # of a micro-batch
BLOCK: Final = 4  # steps
SHAPE: Final = {
    "vocab_size": 49_152, "hidden_size": 1_024, "intermediate_size": 3_072, "num_hidden_layers": 12,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "tie_word_embeddings": True,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
ENV: Final = {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}


class Switched(Unpublished):
    """A publisher that can be turned off; notes how long the trainer stood for it."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self.is_on = False
        self.stood_s = 0.0

    def publish(self, version: Any, *, chain: str, proof: None = None) -> None:
        if self.is_on:
            self.stood_s += timed(lambda: self._publisher.publish(version, chain=chain))

    def until_written(self) -> None:
        self.stood_s += timed(self._publisher.until_written)

    def wait(self) -> None:
        self.stood_s += timed(self._publisher.wait)


# --- one rank, in a process of its own


def measure_here(rank: int, folder: Path, *, blocks: int) -> dict[str, Any]:
    torch.manual_seed(0)
    store: Any = FileStore(str(folder / "words"), RANKS)
    dist.init_process_group("gloo", store=PrefixStore("group", store), rank=rank, world_size=RANKS)
    chosen = settings(device="cpu", dtype="float32", micro_batch_tokens=TOKENS)
    order = configure(folder / "model", chosen, store=folder)
    policy = Policy(folder / "model", mesh=make_mesh("cpu"), dtype=torch.float32)
    versions = VersionStore(memory_root=folder / "memory", durable_root=folder / "durable")
    publisher = Publisher(
        versions,
        policy=policy,
        model_path=folder / "model",
        dtype="float32",
        words=PrefixStore("versions", store.clone()),
        writers=RANKS,
        report=lambda written: versions.release(written.version),
        on_failure=lambda err: print(repr(err), file=sys.stderr),
    )
    switched = Switched(publisher)
    end, saver = cast(TrainerEnd, Reports()), make_saver(order)
    publishing = cast(Publisher, switched)
    trainer = Trainer(order, end=end, policy=policy, layout=Layout(), publisher=publishing, saver=saver)
    answers = draw_answers(4, num_tokens=TOKENS, vocab_size=policy.vocab_size)
    found: dict[str, Any] = {"off": [], "on": [], "stood": [], "peak_off": [], "peak_on": []}
    step = block(trainer, answers, first=0, steps=1)
    for number_of_block in range(2 * blocks):
        kind = "on" if number_of_block % 2 else "off"
        switched.is_on, switched.stood_s = kind == "on", 0.0
        dist.barrier()
        reset_peak()
        begun = time.perf_counter()
        step = block(trainer, answers, first=step, steps=BLOCK)
        publisher.wait()
        dist.barrier()
        found[kind].append((time.perf_counter() - begun) / BLOCK)
        found[f"peak_{kind}"].append(peak())
        if kind == "on":
            found["stood"].append(switched.stood_s / BLOCK)
    found |= measure_before(policy, folder, rank=rank)
    publisher.close()
    dist.destroy_process_group()
    return found


def block(trainer: Trainer, answers: Answers, *, first: int, steps: int) -> int:
    """Train some steps; return the number of the next one."""
    for step in range(first, first + steps):
        trainer.train(make_batch(answers, range(len(answers)), step=step, index=0, last=True))
    return first + steps


def measure_before(policy: Policy, folder: Path, *, rank: int) -> dict[str, Any]:
    """What the trainer did before: the model gathered on rank 0, and saved as one file."""
    from safetensors.torch import save_file

    dist.barrier()
    held = reset_peak()
    weights: dict[str, torch.Tensor] = {}
    gathered_s = timed(lambda: weights.update(gather(policy)))
    saved_s = timed(lambda: save_file(weights, folder / "before")) if rank == 0 else 0.0
    return {"gathered_s": gathered_s, "saved_s": saved_s, "gathered_bytes": peak() - held}


# --- all of them


def in_processes(folder: Path, *, blocks: int) -> list[dict[str, Any]]:
    """Return what each rank found."""
    children = []
    for rank in range(RANKS):
        command = [sys.executable, __file__, "--rank", str(rank), str(folder), str(blocks)]
        children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | ENV))
    return [json.loads(child.communicate()[0].splitlines()[-1]) for child in children]


def make_model(folder: Path) -> int:
    """Write the model; return its number of parameters."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE, architectures=["Qwen3ForCausalLM"]))
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def memory_folder() -> str | None:
    """Where live versions lie by default, if it has room; None: a temporary folder on disk."""
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > 6 << 30 else None


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--folder", type=Path, default=memory_folder(), help="where versions lie")
    arguments.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.rank:
        rank, folder, blocks = int(options.rank[0]), Path(options.rank[1]), int(options.rank[2])
        print(json.dumps(measure_here(rank, folder, blocks=blocks)), flush=True)
        return
    blocks = 6 if options.full else 2
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="dora-bench-") as name:
        folder = Path(name)
        parameters = make_model(folder / "model")
        sizes = f"{parameters / 1e6:.0f} M parameters in float32, {RANKS} ranks, {blocks} blocks of {BLOCK} steps"
        report = Report(__doc__, full=options.full, sizes=f"{sizes} each way")
        found = in_processes(folder, blocks=blocks)
    first = found[0]
    off, on, stood = (statistics.median(first[kind]) for kind in ("off", "on", "stood"))
    without, before = f"a step that does not, {number(off)} s", first["gathered_s"]
    report.row("a step that publishes", on, "s", against=without, ratio=on / off, bar="ratio <= 1.1")
    gathered = f"gathered on rank 0, as before, {number(before)} s"
    report.row("of it, the trainer stood for the publication", stood, "s", against=gathered, ratio=stood / before)
    report.row("the way of before, then one thread: a file saved", first["saved_s"], "s")
    added = max(max(rank["peak_on"]) - max(rank["peak_off"]) for rank in found)
    buckets = f"buckets of {BUCKET_BYTES >> 20} MiB"
    report.row("memory that it adds to a rank", added / 2**20, "MiB", against=buckets, bar="figure <= 256")
    report.row("memory that the way of before added to rank 0", first["gathered_bytes"] / 2**20, "MiB")
    report.print()


if __name__ == "__main__":
    main()
