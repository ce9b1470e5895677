"""A copy of the policy on the device and on the host: the same log-probs to the bit, the time of a pass, the memory."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from clients.steps import one_rank, timed
from result import Row, number

from dora.core.ids import VersionId
from dora.trainer.copies import FrozenPolicy
from dora.trainer.forecast import trial_row
from dora.trainer.logprobs import logprobs
from dora.trainer.meshes import make_mesh
from on_gpu.cases import Case, Place, free
from on_gpu.models import DTYPE, SHAPES, RandomPolicy, order_for


def cases(part: str, *, tiny: bool) -> list[Case]:
    chosen = (("tiny", 512, 128),) if tiny else (("0.1B", 8_192, 1_024), ("1.7B", 8_192, 1_024))
    return [Case(f"{model}: copies", partial(compare, model, tokens, longest)) for model, tokens, longest in chosen]


@torch.no_grad()
def compare(model: str, tokens: int, longest: int, place: Place) -> Iterator[Row]:
    path = Path(order_for(model, place, tokens=tokens).model_path)
    with one_rank(place.device):
        policy = RandomPolicy(path, mesh=make_mesh(place.device), dtype=getattr(torch, DTYPE))
        row = trial_row(tokens, longest=longest, device=policy.device)
        expected_P = logprobs(policy.model, row, temperature=1.0)[0]
        policy.reshard()
        on_device_s = 0.0
        for on_host, where in ((False, "on the device"), (True, "on the host")):
            free()
            before = allocated(place.device)
            copy = FrozenPolicy(path, policy=policy, on_host=on_host)
            copy.refresh(policy, version=VersionId(0))
            compute = partial(copy.logprobs, row, temperature=1.0, fp32_head=False)
            differing = int((compute() != expected_P).sum())
            yield Row(f"{model}, a copy {where}: log-probs that differ from the policy's", differing,
                      f"of {len(expected_P):,}", bar="figure <= 0")  # fmt: skip
            seconds = statistics.median(timed(compute) for _ in range(place.repeats))
            on_device_s = on_device_s or seconds
            yield Row(f"{model}, a copy {where}: a pass of {tokens:,} tokens", seconds, "s",
                      f"on the device, {number(on_device_s)} s", seconds / on_device_s)  # fmt: skip
            copy.forget_passes()
            weights_gb = 2 * SHAPES[model].parameters / 1e9
            yield Row(f"{model}, a copy {where}: memory of the device", (allocated(place.device) - before) / 1e9, "GB",
                      f"its weights in 16 bits, {number(weights_gb)} GB")  # fmt: skip
            del copy, compute


def allocated(device: str) -> int:
    """Return the bytes of all tensors on a GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated() if device == "cuda" else 0
