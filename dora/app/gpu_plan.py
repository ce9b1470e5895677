"""`dora check --gpus`: what a run would take on GPUs that this machine does not have.

The model's config.json is all that is read. Nothing is started or contacted, and nothing is measured.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from dora.app.check import Report, report_job
from dora.app.checkpoint_time import checkpoint_bytes, interval_s, time_of_checkpoint
from dora.app.estimate import (
    BYTES,
    Shapes,
    copies_text,
    kv_bytes_per_token,
    memory,
    memory_text,
    size_text,
    starts_all_on_gpus,
    time_text,
)
from dora.app.fetch import fetch_small
from dora.app.trainer_check import memory_lines, outline_of
from dora.config.schema import Config
from dora.errors import ConfigError
from dora.node.plan import assign_gpus
from dora.seed.policy import model_folder

if TYPE_CHECKING:  # torch takes seconds to import
    from dora.trainer.forecast import Outline

_GPUS = re.compile(r"([1-9]\d{0,3})x([1-9]\d{0,3})GB")


@dataclass(frozen=True, slots=True)
class Gpus:
    """A number of equal GPUs."""

    count: int
    memory: int  # bytes of each

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the value of --gpus, such as 8x80GB."""
        found = _GPUS.fullmatch(text)
        if found is None:
            raise ConfigError(f"--gpus {text}: expected the number and the memory of the GPUs, such as 8x80GB")
        return cls(int(found[1]), int(found[2]) * 2**30)

    def __str__(self) -> str:
        return f"{self.count} GPUs of {self.memory / 2**30:g} GB"


def check_plan(config: Config, gpus: Gpus, report: Report) -> bool:
    """Report the plan of a run on these GPUs; return whether it fits. It takes seconds, and blocks."""
    if "cuda" not in (config.trainer.device, config.engine.device):
        raise ConfigError("--gpus: trainer.device and engine.device are cpu, so the run uses no GPU; set them to cuda")
    config = fetch_small(config)
    model = model_folder(config.model.path, revision=config.model.revision)
    report("inputs", f"model {model}, of which only the configuration was read; prompts and rewards were not")
    mode, outline = outline_of(config, model, gpus.memory)
    shapes = Shapes.read(model).of(outline)
    plan = _Plan(config, gpus, outline, shapes)
    report_job(config, report)
    fits = [plan.check_split(report)]
    if config.trainer.device == "cuda":
        for topic, text in memory_lines(config, model, outline, mode=mode, memory=gpus.memory):
            report(topic, text)
        interval = interval_s(config, shapes)
        text = time_of_checkpoint(config, checkpoint_bytes(config, outline), rate=None, interval=interval)
        report("checkpoint", text)
        report("disk", copies_text(config, shapes))
        fits.append(plan.rank_bytes(config.trainer.ranks) <= plan.available)
    if config.engine.device == "cuda" and config.num_managed:
        fits += [plan.check_instance(report), plan.check_shared(report)]
    if config.engine.urls:
        report("server", f"the {len(config.engine.urls)} servers of engine.urls have GPUs of their own, which were not "
                         "planned; nothing was contacted")  # fmt: skip
    plan.report_time(report)
    report("sample", "none: nothing was started or contacted; dora check without --gpus does so")
    return all(fits)


class _Plan:
    """A run on some GPUs."""

    def __init__(self, config: Config, gpus: Gpus, outline: Outline, shapes: Shapes) -> None:
        from dora.trainer.forecast import FITS

        self.config = config
        self.gpus = gpus
        self.shapes = shapes
        self.available = FITS * gpus.memory  #: bytes of a GPU that may be used
        trainer, longest = config.trainer, config.longest_slice
        self.alone = outline.forecast(tokens=max(trainer.micro_batch_tokens, longest), longest=longest, ranks=1)
        self.num_ranks = trainer.ranks if trainer.device == "cuda" else 0  #: on GPUs
        self.on: dict[int, list[str]] = defaultdict(list)  #: what is on each GPU
        for rank in range(self.num_ranks):
            self.on[rank].append(f"rank {rank}")
        if config.engine.device == "cuda":
            for index, names in enumerate(assign_gpus(config, environ={})):
                for name in (names or "0").split(","):
                    self.on[int(name)].append(f"instance {len(config.engine.urls) + index}")
        #: Whether the GPUs are split between ranks and servers, which estimates of time assume.
        self.has_split = starts_all_on_gpus(config) and all(len(users) == 1 for users in self.on.values())

    def rank_bytes(self, ranks: int) -> int:
        """Return the bytes of one of `ranks` ranks."""
        shard_ranks = max(1, ranks // self.config.trainer.parallel.replicate)
        return self.alone.total - self.alone.states + -(-self.alone.states // shard_ranks)

    def check_split(self, report: Report) -> bool:
        config, given = self.config, self.gpus.count
        needed = max(self.on, default=-1) + 1
        each = config.engine.tensor_parallel
        users = [f"{self.num_ranks} trainer.ranks"] if self.num_ranks else []
        if config.num_managed and config.engine.device == "cuda":
            users.append(f"{config.num_managed} engine.instances of engine.tensor_parallel = {each}")
        what = " and ".join(users) or "what the run starts"
        if needed > given:
            report("GPUs", f"DOES NOT FIT: {what} need {needed} GPUs, and {given} are given; {self._change()}")
        else:
            report("GPUs", f"{what}: {needed} of {self.gpus}")
        return needed <= given

    def _change(self) -> str:
        """Return what to change if the run needs more GPUs."""
        if self.config.engine.gpus:
            return "list other GPUs in engine.gpus, or start fewer instances"
        if not self.has_split:
            return "lower trainer.ranks or engine.instances"
        return (
            f"`dora plan CONFIG --gpus {self.gpus.count}x{self.gpus.memory / 2**30:g}GB` searches the best use of them"
        )

    def check_instance(self, report: Report) -> bool:
        config, need = self.config, memory(self.config, self.shapes)
        text = memory_text(config, self.shapes)
        served = BYTES[config.trainer.publish_dtype]
        each = kv_bytes_per_token(self.shapes, dtype_bytes=served, tp=config.engine.tensor_parallel)
        room = self.available - need.engine_weights  # for KV
        tokens = int(room / each) if each else None
        least = config.longest_request if config.kv_tokens is None else config.kv_tokens
        if room > 0 and (tokens is None or tokens >= least):
            left = "" if tokens is None else f", room for {tokens:,} tokens of KV"
            report("memory", f"{text}, of {size_text(self.available)} (assumed: 90 % of a GPU){left}")
            return True
        change = "use larger GPUs" if config.engine.kind == "embedded" else "raise engine.tensor_parallel"
        if tokens is not None and config.kv_tokens is not None and tokens >= config.longest_request:
            change += f", or set engine.kv_tokens to at most {tokens}"
        report("memory", f"{text}: DOES NOT FIT in {size_text(self.available)} (assumed: 90 % of a GPU); {change}")
        return False

    def check_shared(self, report: Report) -> bool:
        """Check the GPUs that several processes share."""
        need = memory(self.config, self.shapes)
        rank = self.rank_bytes(self.config.trainer.ranks)
        fit = True
        for gpu, users in sorted(self.on.items()):
            total = sum(rank if u.startswith("rank") else need.engine_weights + (need.engine_kv or 0) for u in users)
            if len(users) > 1:
                fits = total <= self.available
                fit = fit and fits
                verdict = "" if fits else ", which DOES NOT FIT: list other GPUs in engine.gpus"
                report("memory", f"GPU {gpu} is shared by {', '.join(users)}: {size_text(total)} of "
                                 f"{size_text(self.gpus.memory)}{verdict}")  # fmt: skip
        return fit

    def report_time(self, report: Report) -> None:
        if not self.has_split:
            report("split", "the time of a step is not forecast: that is done only if the run starts all ranks and "
                            "servers, each on GPUs of its own")  # fmt: skip
            return
        report("split", time_text(self.config, self.shapes))
        report(
            "", f"`dora plan CONFIG --gpus {self.gpus.count}x{self.gpus.memory / 2**30:g}GB` searches the best split"
        )
