"""Settings for kinds of hardware, from which `dora init` starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings for a kind of hardware."""

    hardware: str
    gpus: str  # for `dora check --gpus`; "": the job runs on CPUs
    values: Mapping[str, Any]


_GPU: Final = {"trainer.device": "cuda", "trainer.dtype": "bfloat16", "trainer.publish_dtype": "bfloat16"}
PRESETS: Final[Mapping[str, Preset]] = {
    "laptop": Preset(
        "a machine without a GPU, with 2 CPU cores",
        "",
        {
            "run.steps": 50,
            "rollout.max_staleness": 1,
            "rollout.groups_per_step": 4,
            "rollout.group_size": 4,
            "rollout.max_new_tokens": 256,
            "engine.instances": 2,
            "trainer.ranks": 1,
        },
    ),
    "1-gpu": Preset(
        "1 GPU of 80 GB, which two servers and the trainer share",
        "1x80GB",
        {
            "run.steps": 200,
            "rollout.max_staleness": 1,
            "rollout.groups_per_step": 16,
            "rollout.group_size": 8,
            "rollout.max_new_tokens": 1_024,
            "engine.device": "cuda",
            "engine.instances": 2,
            "engine.kv_tokens": 65_536,
            **_GPU,
            "trainer.ranks": 1,
            "trainer.micro_batch_tokens": 4_096,
        },
    ),
    "8-gpu": Preset(
        "8 GPUs of 80 GB: four SGLang servers (pip install 'dora-rl[sglang]') and four trainer ranks",
        "8x80GB",
        {
            "run.steps": 200,
            "rollout.max_staleness": 2,
            "rollout.groups_per_step": 64,
            "rollout.group_size": 8,
            "rollout.max_new_tokens": 1_024,
            "engine.kind": "sglang",
            "engine.device": "cuda",
            "engine.instances": 4,
            "engine.slots": 128,
            "engine.kv_tokens": 262_144,
            "engine.start_timeout_s": 600.0,
            **_GPU,
            "weights.keep": 4,
            "trainer.ranks": 4,
            "trainer.micro_batch_tokens": 8_192,
        },
    ),
    "many": Preset(
        "2 hosts of 8 GPUs of 80 GB, each with `dora node`: SGLang servers on one, ranks on the other",
        "16x80GB",
        {
            "run.steps": 200,
            "rollout.max_staleness": 2,
            "rollout.groups_per_step": 64,
            "rollout.group_size": 16,
            "rollout.max_new_tokens": 2_048,
            "engine.kind": "sglang",
            "engine.device": "cuda",
            "engine.slots": 128,
            "engine.kv_tokens": 262_144,
            "engine.start_timeout_s": 900.0,
            **_GPU,
            "weights.keep": 4,
            "trainer.ranks": 8,
            "trainer.address": "tcp://0.0.0.0:8424",
            "trainer.micro_batch_tokens": 16_384,
            "nodes.expected": 2,
            "nodes.gpus": 8,
            "nodes.address": "tcp://0.0.0.0:8423",
        },
    ),
}
