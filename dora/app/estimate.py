"""Estimates the memory of an instance and the step time from the shapes in a model folder.

Times assume an H100, and prompts and answers of half their maximum length on average. The time of a step is the limit
of docs/SIMULATION.md. The estimates are only displayed. What a trainer rank takes: dora/trainer/forecast.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import msgspec
from safetensors import safe_open

from dora.config.schema import Config
from dora.model_config import chosen_share, is_of_experts, load_config, text_config

if TYPE_CHECKING:  # torch takes seconds to import
    from dora.trainer.forecast import Outline

#: An H100: memory bandwidth, bf16 throughput at a trainer's typical utilization, and the constant part of a decoding
#: step (fitted to 7.2 ms per token of Qwen3-8B at concurrency 4).
BANDWIDTH: Final = 3.35e12  # bytes per second
FLOPS: Final = 4e14  # per second
STEP_BASE_S: Final = 2.3e-3
BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Shapes:
    """The dimensions of a decoder."""

    parameters: int
    experts: int  # number of parameters of routed experts
    chosen: float  # share of these experts to which a token is routed
    layers: int
    kv_width: int  # KV heads x head size; 0 without attention
    kv_heads: int

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the configuration and the headers of the safetensors files."""
        config = text_config(load_config(folder))
        parameters = experts = 0
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dict
                    count = 1
                    for size in tensors.get_slice(name).get_shape():
                        count *= size
                    parameters += count
                    experts += count if is_of_experts(name) else 0
        heads = getattr(config, "num_attention_heads", 0)
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
        return cls(
            parameters=parameters,
            experts=experts,
            chosen=chosen_share(config),
            layers=config.num_hidden_layers,
            kv_width=kv_heads * head_dim,
            kv_heads=kv_heads,
        )

    def of(self, outline: Outline) -> Shapes:
        """Return the shapes with the parameters of an outline, which needs no weights."""
        return replace(self, parameters=outline.published, experts=outline.experts)

    def used(self, num_tokens: float) -> float:
        """Return how many parameters a batch is expected to use if its tokens choose experts independently."""
        return self.parameters - self.experts * float((1 - self.chosen) ** num_tokens)

    @property
    def active(self) -> float:
        """The number of parameters that one token uses."""
        return self.used(1)


class Memory(msgspec.Struct, frozen=True):
    """Bytes per GPU (on a CPU, per process)."""

    engine_weights: float
    engine_kv: float | None  # None: as much as a server decides to use


def memory(config: Config, shapes: Shapes) -> Memory:
    """Return the memory of one GPU of an instance."""
    served, tp = BYTES[config.trainer.publish_dtype], config.engine.tensor_parallel
    return Memory(
        engine_weights=shapes.parameters * served / tp,
        engine_kv=config.kv_tokens and config.kv_tokens * kv_bytes_per_token(shapes, dtype_bytes=served, tp=tp),
    )


def kv_bytes_per_token(shapes: Shapes, *, dtype_bytes: int, tp: int = 1) -> float:
    """Return the size of one token's keys and values in all layers, on one of `tp` GPUs; a KV head is not divided."""
    return 2 * shapes.layers * shapes.kv_width * dtype_bytes / min(tp, max(shapes.kv_heads, 1))


@dataclass(frozen=True, slots=True)
class StepTime:
    """Lower bounds of the time of a training step, in seconds."""

    decode_s: float  # decoding all answers, with the best batch size of the instances
    train_s: float
    longest_s: float  # the longest answer alone, shared by K + 1 steps

    @property
    def limit_s(self) -> float:
        return max(self.decode_s, self.train_s, self.longest_s)


def step_time(config: Config, shapes: Shapes, *, instances: int, ranks: int) -> StepTime:
    """Estimate the step time with `instances` of `tensor_parallel` GPUs each and `ranks` training GPUs."""
    rollout, tp = config.rollout, config.engine.tensor_parallel
    served = BYTES[config.trainer.publish_dtype]
    answers = rollout.groups_per_step * rollout.group_size
    length = rollout.max_new_tokens / 2
    prompt = config.task.max_prompt_tokens / 2
    context = prompt + length / 2
    in_flight = (config.max_staleness + 1) * answers / instances
    batch = max(1.0, min(config.slots or inf, (config.kv_tokens or inf) / context, in_flight))
    kv = kv_bytes_per_token(shapes, dtype_bytes=served, tp=tp)
    read_s = served / tp / BANDWIDTH  # for each parameter
    decode_step_s = STEP_BASE_S + shapes.used(batch) * read_s + batch * context * kv / BANDWIDTH
    trained = answers * (prompt + length)
    return StepTime(
        decode_s=answers * length * decode_step_s / batch / instances,
        train_s=trained / training_rate(config, shapes) / ranks,
        longest_s=rollout.max_new_tokens * (STEP_BASE_S + shapes.active * read_s) / (config.max_staleness + 1),
    )


def training_rate(config: Config, shapes: Shapes) -> float:
    """Return the tokens that a training GPU computes per second. Where an adapter is trained, the weights have no
    gradients, which take a third of all operations. Of a mixture of experts, those count that a token has."""
    return FLOPS / ((4 if config.trainer.lora.rank else 6) * shapes.active)


def starts_all_on_gpus(config: Config) -> bool:
    """Return whether the run starts all its servers and ranks, and all on GPUs; only then are times estimated."""
    all_here = config.num_managed and not config.engine.urls
    return bool(all_here) and config.engine.device != "cpu" and config.trainer.device != "cpu"


def lines(config: Config, shapes: Shapes) -> list[tuple[str, str]]:
    """Return (topic, text) lines for the plan of `dora check`."""
    found = [("memory", memory_text(config, shapes)), ("disk", copies_text(config, shapes))]
    if not starts_all_on_gpus(config):
        return found
    return [*found, ("split", time_text(config, shapes))]


def memory_text(config: Config, shapes: Shapes) -> str:
    """Return a text about the memory of an instance."""
    need = memory(config, shapes)
    kv = "KV as the server decides" if need.engine_kv is None else f"{size_text(need.engine_kv)} KV"
    per_gpu = " per GPU" if config.engine.tensor_parallel > 1 else ""
    return f"one instance: {size_text(need.engine_weights)} weights + {kv}{per_gpu}"


def copies_text(config: Config, shapes: Shapes) -> str:
    """Return a text about the copies of versions in the run folder; an adapter is small."""
    if config.engine.adapters:
        return "a copy of every adapter is kept in the run folder"
    each, keep = shapes.parameters * BYTES[config.trainer.publish_dtype], config.weights.keep
    kept = min(config.run.steps + 1, keep + config.max_staleness + 2) if keep else config.run.steps + 1
    text = f"{kept} copies of versions in the run folder, {size_text(each)} each, {size_text(kept * each)} in all"
    return text if keep else f"{text}: weights.keep = 0 keeps every version"


def time_text(config: Config, shapes: Shapes) -> str:
    """Return a text about the step time, if the run starts all on GPUs."""
    now = step_time(config, shapes, instances=config.num_managed, ranks=config.trainer.ranks)
    limits = {"decoding": now.decode_s, "training": now.train_s, "the longest answer": now.longest_s}
    tokens = config.rollout.groups_per_step * config.rollout.group_size * config.rollout.max_new_tokens / 2
    return (
        f"a step takes at least {now.limit_s:,.0f} s ({tokens / now.limit_s:,.0f} tokens of answers per second), "
        f"limited by {max(limits, key=limits.__getitem__)}: decoding {now.decode_s:,.0f} s, training "
        f"{now.train_s:,.0f} s, the longest answer {now.longest_s:,.0f} s over K + 1 steps; assumed, not measured: "
        f"H100s with {BANDWIDTH / 1e12:g} TB/s and {FLOPS / 1e12:g} TFLOP/s in training, "
        "texts of half the longest length"
    )


def size_text(num_bytes: float) -> str:
    """Return a size for people."""
    return f"{num_bytes / 2**30:,.1f} GB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MB"
