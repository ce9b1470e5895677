"""Training and publication on one GPU, beside its roofline and plain transformers: tokens/s, MFU, memory.

Run: python bench/gpu.py [--out FILE] [--limit SECONDS] [--full] [--profile cpu], after pip install -e . and without a
network. Shapes of Qwen3 0.6B, 1.7B and 8B with random weights, made on the GPU; one micro-batch of 8,192, 16,384 or
32,768 tokens in answers of 1,024 on average, lengths log-normal as in bench/training.py. Each case is a process with a
time limit, the most important ones first; a case for which no time is left is said, memory that does not suffice is a
row with that word, and FILE is written after every case. --profile cpu runs the same code in tiny shapes.

The trainer's side is `Trainer.train` as dora/trainer/main.py sets it up, with float32 weights and bfloat16 as compute
type; the check of the forward pass runs first where its two gradients fit. Plain transformers has everything in
bfloat16: packed rows with flash attention if it is installed, else rows of similar length, padded on the right, with
SDPA. AdamW's moments exist on both sides, unless float32 weights, gradients and moments (16 bytes a parameter) need
more than 80 % of the memory: then both sides update without moments (SGD). Both keep everything for the backward pass
if that fits; else the trainer checkpoints layers, selectively or in full, and transformers in full: each row says so.

MFU = 6 (layer weights × tokens + head weights × trained tokens) + 6 × layers × heads × head size × Σ length²
floating-point operations a second (causal attention counted by half; recomputation, embedding and norms not counted),
over the bfloat16 peak of the GPU's datasheet, or over the measured peak where the GPU is not known. It is that of
forward and backward; the rest of a step does not depend on its tokens, and has rows of its own. A publication stops the
trainer while the weights are gathered in host memory, beside one copy from pinned memory; a thread then writes them.
The memory that `dora check` forecasts stands beside that of a micro-batch. Measured peaks: square
bfloat16 products of random numbers; a copy within the GPU, bytes read and written.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec
import psutil
import torch
from clients.steps import (
    Answers,
    Reports,
    accumulate,
    accumulate_packed,
    by_length,
    configure,
    draw_answers,
    make_adamw,
    make_batch,
    make_trainer,
    one_rank,
    peak,
    reset_peak,
    settings,
    synchronize,
    timed,
    update,
)
from result import Report, keep, number, parser

from dora.errors import ConfigError
from dora.trainer.attention_gpu import kernels_present
from dora.trainer.checkpointing import Mode
from dora.trainer.forecast import Outline
from dora.trainer.packing import Layout
from dora.transport.messages import VersionWritten

DTYPE = "bfloat16"
MEAN_TOKENS = 1_024  # of an answer and its prompt
CASE_S = 150.0
LEAST_S = 15.0  # no case is begun with less left
PUBLISH_S = 120.0
BYTES_PER_PARAMETER = 16  # float32 weights, gradients and two moments
NO_GPU = "no GPU here: unverified without a GPU"
#: Dense bfloat16 TFLOP/s and GB/s of the vendor's datasheets, by a part of the device's name; the first match counts.
DATASHEET = {
    "H200": (989.0, 4_800.0),
    "H100 PCIe": (756.0, 2_000.0),
    "H100 NVL": (835.0, 3_900.0),
    "H100": (989.0, 3_350.0),
    "A100": (312.0, 2_039.0),
    "B200": (2_250.0, 8_000.0),
}


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

    def flops(self, answers: Answers) -> float:
        """Of forward and backward, as the docstring of this file says."""
        squares = sum(length**2 for length in answers.lengths)
        weights = self.layer_weights * sum(answers.lengths) + self.vocab * self.hidden * answers.trained
        return 6.0 * weights + 6.0 * self.layers * self.heads * self.head_size * squares


SHAPES = {
    "0.6B": Shape(151_936, 1_024, 3_072, 28, 16, 8, 128, tied=True),
    "1.7B": Shape(151_936, 2_048, 6_144, 28, 16, 8, 128, tied=True),
    "8B": Shape(151_936, 4_096, 12_288, 36, 32, 8, 128, tied=False),
    "tiny": Shape(512, 64, 192, 2, 4, 2, 16, tied=True),
}
BARS = {("1.7B", 16_384): "figure >= 45", ("8B", 16_384): "figure >= 40"}  # MFU in percent


class Case(msgspec.Struct, frozen=True):
    """What one process measures."""

    side: str  # "roofline", "plain" or "ours"
    device: str
    model: str = ""
    tokens: int = 0
    publish: bool = False
    repeats: int = 3


class Profile(NamedTuple):
    """The cases of a run."""

    device: str
    cases: tuple[tuple[str, int, bool], ...]  # model, tokens, whether a version is published too
    limit_s: float


PROFILES = {
    "gpu": Profile(
        "cuda",
        (
            ("1.7B", 16_384, True),
            ("8B", 16_384, True),
            ("0.6B", 16_384, True),
            ("1.7B", 32_768, False),
            ("8B", 32_768, False),
            ("1.7B", 8_192, False),
            ("8B", 8_192, False),
            ("0.6B", 32_768, False),
            ("0.6B", 8_192, False),
        ),
        460.0,
    ),
    "cpu": Profile("cpu", (("tiny", 2_048, True), ("tiny", 4_096, False)), 180.0),
}


class Peaks(msgspec.Struct, tag=True):
    """The roofline."""

    name: str
    memory_bytes: int
    tflops: float
    gb_per_s: float  # within the device
    to_host_gb_per_s: float
    to_store_gb_per_s: float


class Trained(msgspec.Struct, tag=True):
    """Micro-batches of one side."""

    seconds: float  # of one, median
    peak_bytes: int
    flops: float
    how: str  # attention, layers, moments
    update_s: float


class Published(msgspec.Struct, tag=True):
    """One publication, while the next step is trained."""

    num_bytes: int
    stopped_s: float
    written_s: float  # from the beginning until the version is in the store
    slower: float  # micro-batches meanwhile, of those before


class Foretold(msgspec.Struct, tag=True):
    """The memory of a micro-batch."""

    forecast_bytes: int
    measured_bytes: int  # the peak before the step closes


class Failed(msgspec.Struct, tag=True):
    """Why there are no figures."""

    reason: str


Found = Peaks | Trained | Published | Foretold | Failed


# --- one case, in a process of its own


def measure_here(case: Case, folder: Path) -> Iterator[Found]:
    """Yield each finding as soon as it is there."""
    torch.manual_seed(0)
    if case.side == "roofline":
        yield roofline(case.device, folder)
        return
    shape = SHAPES[case.model]
    answers = draw_answers(max(4, case.tokens // MEAN_TOKENS), num_tokens=case.tokens, vocab_size=shape.vocab)
    modes: tuple[Mode, ...] = ("none", "full") if case.side == "plain" else ("none", "selective", "full")
    for mode in modes:
        try:
            if case.side == "plain":
                yield measure_plain(case, answers, mode=mode)
            else:
                yield from measure_ours(case, answers, mode=mode, folder=folder)
            return
        except torch.OutOfMemoryError as err:
            reason = f"out of memory: {str(err).partition('. GPU')[0]}"
        free()
    yield Failed(reason)


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def memory_of(device: str) -> int:
    """Bytes that the device has."""
    return torch.cuda.get_device_properties(0).total_memory if device == "cuda" else psutil.virtual_memory().total


def has_moments(case: Case) -> bool:
    return BYTES_PER_PARAMETER * SHAPES[case.model].parameters < 0.8 * memory_of(case.device)


def begin(device: str) -> None:
    """Count the peak of the memory from now on."""
    synchronize()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        reset_peak()


def peak_of(device: str) -> int:
    """Of the GPU's allocator, or of the whole process on a CPU."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else peak()


def config_of(case: Case) -> Any:
    from transformers import Qwen3Config

    shape = SHAPES[case.model]
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


def measure_plain(case: Case, answers: Answers, *, mode: Mode) -> Trained:
    from transformers import AutoModelForCausalLM
    from transformers.utils import is_flash_attn_2_available

    flash = case.device == "cuda" and is_flash_attn_2_available()
    with torch.device(case.device):
        model = AutoModelForCausalLM.from_config(
            config_of(case),
            dtype=getattr(torch, DTYPE),
            attn_implementation="flash_attention_2" if flash else "sdpa",
        )
    model.train()  # under eval, checkpointing would silently do nothing; there is no dropout
    if mode == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    moments = has_moments(case)
    optimizer = make_adamw(model) if moments else torch.optim.SGD(model.parameters(), lr=1e-4)
    everyone = list(range(len(answers)))

    def micro_batch() -> None:
        if flash:
            accumulate_packed(model, answers, everyone)
            return
        for batch in by_length(answers, budget=case.tokens):
            accumulate(model, answers, batch)

    micro_batch()
    update(model, optimizer)
    begin(case.device)
    seconds = [timed(micro_batch) for _ in range(case.repeats)]
    update_s = timed(lambda: update(model, optimizer))
    return Trained(
        seconds=statistics.median(seconds),
        peak_bytes=peak_of(case.device),
        flops=SHAPES[case.model].flops(answers),
        how=describe("flash attention, packed" if flash else "SDPA, padded", mode, moments=moments),
        update_s=update_s,
    )


def describe(attention: str, mode: Mode, *, moments: bool) -> str:
    parts = [attention, "" if mode == "none" else f"checkpointing {mode}", "" if moments else "without moments"]
    return ", ".join(filter(None, parts))


def measure_ours(case: Case, answers: Answers, *, mode: Mode, folder: Path) -> Iterator[Found]:
    moments = has_moments(case)
    model_path = folder / "model"
    make_outline(config_of(case), model_path)
    kernel = next(name for name, is_present in kernels_present(case.device).items() if is_present)
    reports = Reports()
    chosen = settings(device=case.device, dtype=DTYPE, micro_batch_tokens=case.tokens, mode=mode)
    order = configure(model_path, chosen, store=folder)
    with ExitStack() as stack:
        stack.callback(free)
        stack.enter_context(one_rank(case.device))
        stack.enter_context(patch("dora.trainer.model.load_shards", fill))
        if not moments:
            stack.enter_context(patch("dora.trainer.step.ShardOptimizer", WithoutMoments))
        make = partial(make_trainer, order, publishes=case.publish, reports=reports)
        try:
            trainer = make(layout=None if moments else Layout())
        except ConfigError as err:  # worth knowing, but no reason to measure nothing
            reason = str(err)
            free()
            yield Failed(f"the check of the forward pass: {reason}")
            trainer = make(layout=Layout())
        everyone = list(range(len(answers)))
        index = count()

        def micro_batch(step: int, *, last: bool = False) -> None:
            trainer.train(make_batch(answers, everyone, step=step, index=next(index), last=last))

        micro_batch(0)
        begin(case.device)
        seconds = statistics.median(timed(partial(micro_batch, 0)) for _ in range(case.repeats))
        micro_batch_bytes = peak_of(case.device)
        micro_batch(0, last=True)
        yield Trained(
            seconds=seconds,
            peak_bytes=peak_of(case.device),
            flops=SHAPES[case.model].flops(answers),
            how=describe(f"packed, {kernel}", mode, moments=moments),
            update_s=trainer.update_s,
        )
        if not case.publish:
            return
        index = count()
        meanwhile = [timed(partial(micro_batch, 1))]
        stopped_s = trainer.publish_s + timed(trainer._publisher.until_written)
        deadline = time.perf_counter() + PUBLISH_S
        while (written := reports.when(VersionWritten)) is None and time.perf_counter() < deadline:
            meanwhile.append(timed(partial(micro_batch, 1)))
        trainer._publisher.close()
        written = reports.when(VersionWritten)
        assert written is not None
        yield Published(
            num_bytes=sum(path.stat().st_size for path in (folder / "memory").glob("v*/*.safetensors")),
            stopped_s=stopped_s,
            written_s=written - trainer.publish_from,
            slower=statistics.median(meanwhile) / seconds,
        )
        outline = Outline(model_path, dtype=getattr(torch, DTYPE), checkpointing=mode)  # takes half a minute
        longest = max(answers.lengths)
        forecast = outline.forecast(tokens=case.tokens, longest=longest, ranks=1, is_trial=not moments)
        yield Foretold(forecast.total, micro_batch_bytes)


def make_outline(config: Any, folder: Path) -> None:
    """A model folder whose weights take no room: the file has a header, and a hole in place of its data."""
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


@torch.no_grad()
def fill(model: Any, *_: object, **__: object) -> None:
    """In place of reading a file: random weights, made where they are needed."""
    for parameter in model.parameters():
        shard = parameter.to_local()
        if shard.dim() > 1:
            shard.normal_(0.0, 0.02)
        else:
            shard.fill_(1.0)


class WithoutMoments:
    """An optimizer in place of AdamW, whose moments would not fit."""

    def __init__(self, shards: dict[str, torch.Tensor], _: object) -> None:
        self._shards = shards

    @torch.no_grad()
    def update(self, gradients: dict[str, torch.Tensor], *, learning_rate: float) -> None:
        for name, shard in self._shards.items():
            shard.sub_(gradients[name], alpha=learning_rate)

    def state(self) -> dict[str, torch.Tensor]:
        return {}


# --- the roofline


def roofline(device: str, folder: Path) -> Peaks:
    on_gpu = device == "cuda"
    sizes, copied = ((4_096, 8_192, 16_384), 4 << 30) if on_gpu else ((512,), 64 << 20)
    source = torch.empty(copied, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    on_host = torch.empty(copied // 4, dtype=torch.uint8, pin_memory=on_gpu)
    copy_s = best(lambda: target.copy_(source))
    to_host_s = best(lambda: on_host.copy_(source[: copied // 4]))
    return Peaks(
        name=torch.cuda.get_device_name() if on_gpu else "CPU",
        memory_bytes=memory_of(device),
        tflops=max(product_tflops(size, device) for size in sizes),
        gb_per_s=2 * copied / copy_s / 1e9,
        to_host_gb_per_s=copied / 4 / to_host_s / 1e9,
        to_store_gb_per_s=copied / 4 / best(lambda: (folder / "raw").write_bytes(on_host.numpy().data)) / 1e9,
    )


def product_tflops(size: int, device: str) -> float:
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    times = 10

    def products() -> None:
        for _ in range(times):
            left @ right

    return 2.0 * size**3 * times / best(products) / 1e12


def best(act: Callable[[], object]) -> float:
    """The least seconds of five, after one that warms up."""
    return min(timed(act) for _ in range(6))


# --- all of them


def in_process(case: Case, *, limit_s: float) -> list[Found]:
    """The findings of a case; the last one is Failed if it did not end well."""
    with tempfile.TemporaryDirectory(dir=store_for(case), prefix="dora-bench-") as folder:
        command = [sys.executable, __file__, "--case", msgspec.json.encode(case).decode(), folder]
        env = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", **os.environ}
        env.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as child:
            try:
                out, err = child.communicate(timeout=limit_s)
                ending = ""
            except subprocess.TimeoutExpired:
                child.kill()
                out, err = child.communicate()
                ending = f"stopped after {limit_s:.0f} s"
    sys.stderr.write(err)
    found = [msgspec.json.decode(line, type=Found) for line in out.splitlines() if line.startswith('{"type"')]
    if child.returncode < 0 and not ending:
        ending = f"ended by signal {-child.returncode}"
    elif child.returncode and not ending:
        ending = (err.split("\n\n")[-1].strip().splitlines() or ["failed"])[-1]
    return [*found, Failed(ending)] if ending else found


def store_for(case: Case) -> str:
    """Where versions are kept: in memory as in a run, if there is enough of it."""
    needed = 4 * SHAPES[case.model].parameters if case.publish else 2 << 30
    memory = Path("/dev/shm")
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > needed
    return str(memory) if has_room else tempfile.gettempdir()


class Table:
    """Rows of the report from the findings, in the order in which they come."""

    def __init__(self, report: Report, peaks: Peaks | None) -> None:
        self.report = report
        self.peaks = peaks
        self.plain: dict[tuple[str, int], Trained] = {}

    def roofline(self) -> None:
        if (peaks := self.peaks) is None:
            return
        known = datasheet(peaks.name)
        for what, figure, unit, beside in (
            ("matrix products, bfloat16", peaks.tflops, "TFLOP/s", known and known[0]),
            ("copy within the device", peaks.gb_per_s, "GB/s", known and known[1]),
        ):
            against = f"datasheet, {number(beside)} {unit}" if beside else ""
            self.report.row(what, figure, unit, against=against, ratio=figure / beside if beside else None)
        self.report.row("copy into pinned host memory", peaks.to_host_gb_per_s, "GB/s")
        self.report.row("a file written to the version store's folder", peaks.to_store_gb_per_s, "GB/s")

    def add(self, case: Case, found: Found) -> None:
        what = f"{case.model}, {case.tokens:,} tokens"
        match found:
            case Failed(reason):
                self.report.skip(f"{what}, {'plain transformers' if case.side == 'plain' else 'the trainer'}", reason)
            case Trained() if case.side == "plain":
                self.plain[case.model, case.tokens] = found
                self.trained(f"{what}, plain transformers", case, found, None)
            case Trained():
                self.trained(what, case, found, self.plain.get((case.model, case.tokens)))
            case Published():
                self.published(case.model, found)
            case Foretold(forecast, measured) if case.device == "cuda":  # on a CPU a process has more than tensors
                self.report.row(
                    f"{what}: memory of a micro-batch as `dora check` forecasts it",
                    forecast / 1e9,
                    "GB",
                    against=f"measured, {number(measured / 1e9)} GB",
                    ratio=forecast / measured,
                )

    def trained(self, what: str, case: Case, found: Trained, plain: Trained | None) -> None:
        rate = case.tokens / found.seconds
        self.report.row(
            f"{what} ({found.how})",
            rate,
            "tokens/s",
            against=f"plain transformers ({plain.how}), {number(case.tokens / plain.seconds)}" if plain else "",
            ratio=plain.seconds / found.seconds if plain else None,
        )
        self.report.row(
            f"{what}: peak memory",
            found.peak_bytes / 1e9,
            "GB",
            against=f"plain transformers, {number(plain.peak_bytes / 1e9)} GB" if plain else "",
            ratio=found.peak_bytes / plain.peak_bytes if plain else None,
        )
        if self.peaks is not None:
            known = datasheet(self.peaks.name)
            top, origin = (known[0], "datasheet") if known else (self.peaks.tflops, "measured")
            tflops = found.flops / found.seconds / 1e12
            self.report.row(
                f"{what}: MFU",
                100 * tflops / top,
                f"% of the {origin} peak",
                against=f"measured products, {number(self.peaks.tflops)} TFLOP/s",
                ratio=tflops / self.peaks.tflops,
                bar=BARS.get((case.model, case.tokens), "") if case.side == "ours" else "",
            )
        if case.publish:
            self.report.row(
                f"{case.model}: clip and update",
                found.update_s,
                "s",
                against=f"plain transformers, {number(plain.update_s)} s" if plain else "",
                ratio=plain.update_s / found.update_s if plain else None,
            )

    def published(self, model: str, found: Published) -> None:
        size = found.num_bytes / 1e9
        copy_s, write_s = (
            size / rate if rate else 0.0
            for rate in ((self.peaks.to_host_gb_per_s, self.peaks.to_store_gb_per_s) if self.peaks else (0, 0))
        )
        self.report.row(
            f"{model}: a publication of {number(size)} GB stops the trainer",
            found.stopped_s,
            "s",
            against=f"copy into pinned host memory, {number(copy_s)} s",
            ratio=copy_s / found.stopped_s,
        )
        self.report.row(
            f"{model}: until the version is in the store",
            found.written_s,
            "s",
            against=f"that copy and one file written, {number(copy_s + write_s)} s",
            ratio=(copy_s + write_s) / found.written_s,
        )
        self.report.row(f"{model}: a micro-batch while it is written", found.slower, "of one before")


def datasheet(name: str) -> tuple[float, float] | None:
    return next((peaks for part, peaks in DATASHEET.items() if part in name), None)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--profile", choices=sorted(PROFILES), default="gpu")
    arguments.add_argument("--out", type=Path, help="file for the result, written after every case")
    arguments.add_argument("--limit", type=float, help="seconds for all cases together")
    arguments.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.case:
        case, folder = msgspec.json.decode(options.case[0], type=Case), Path(options.case[1])
        for finding in measure_here(case, folder):
            print(msgspec.json.encode(finding).decode(), flush=True)
        return
    profile = PROFILES[options.profile]
    has_gpu = torch.cuda.is_available()
    if profile.device == "cuda" and not has_gpu:
        report = Report(__doc__, full=options.full, sizes=NO_GPU)
        report.skip("everything", NO_GPU)
    else:
        report = run(profile, full=options.full, limit_s=options.limit or profile.limit_s, out=options.out)
    if options.out:
        keep(options.out, report.result())
    report.print()


def run(profile: Profile, *, full: bool, limit_s: float, out: Path | None) -> Report:
    deadline = time.monotonic() + limit_s
    first = in_process(Case("roofline", profile.device), limit_s=CASE_S)
    peaks = first[0] if isinstance(first[0], Peaks) else None
    accelerator = f"{peaks.name}, {peaks.memory_bytes / 2**30:.0f} GiB, torch {torch.__version__}" if peaks else ""
    sizes = f"Qwen3 {', '.join(dict.fromkeys(model for model, _, _ in profile.cases))}, random weights"
    if profile.device == "cpu":
        sizes = f"The CPU profile: {sizes}; it shows that the code runs. On a GPU: unverified without a GPU"
    report = Report(__doc__, full=full, sizes=sizes, accelerator=accelerator if profile.device == "cuda" else "")
    table = Table(report, peaks)
    for found in first:
        if isinstance(found, Failed):
            report.skip("roofline", found.reason)
    table.roofline()
    for model, tokens, publish in profile.cases:
        for side in ("plain", "ours"):
            case = Case(
                side, profile.device, model, tokens, publish=publish and side == "ours", repeats=10 if full else 3
            )
            left_s = deadline - time.monotonic()
            findings = in_process(case, limit_s=min(CASE_S, left_s)) if left_s > LEAST_S else [Failed("no time left")]
            for found in findings:
                table.add(case, found)
            if out:
                keep(out, report.result())
    return report


if __name__ == "__main__":
    main()
