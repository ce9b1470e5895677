"""AdamW's moments on the device, in 8 bits and on the host: time and memory of a step, and the same update.

The updates are compared where the moments are in float32, on the device and on the host: the same gradients, three
updates, the largest difference of a weight as a share of what three updates can move it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from clients.steps import LEARNING_RATE, one_rank
from result import Row, number

from dora.trainer.forecast import Outline
from dora.trainer.meshes import make_mesh
from dora.trainer.model import Policy
from dora.trainer.optimizer import ShardOptimizer, moment_bytes
from on_gpu.cases import Case, Place, count_peak, free, peak_of
from on_gpu.models import DTYPE, RandomPolicy, Repeated, answers_of, order_for, trainer_of

UPDATES = 3
STATES = {"device": "on the device", "8bit": "in 8 bits", "host": "on the host"}


def cases(part: str, *, tiny: bool) -> list[Case]:
    model, tokens = ("tiny", 512) if tiny else ("1.7B", 8_192)
    return [
        Case(f"{model}: updates with moments on the host", partial(compare, model)),
        *(Case(f"{model}, moments {where}", partial(step, model, tokens, state)) for state, where in STATES.items()),
    ]


def compare(model: str, place: Place) -> Iterator[Row]:
    order = order_for(model, place, tokens=2_048)
    with one_rank(place.device):
        policy = RandomPolicy(Path(order.model_path), mesh=make_mesh(place.device), dtype=getattr(torch, DTYPE))
        shards = policy.shards()
        start = {name: shard.to("cpu", copy=True) for name, shard in shards.items()}
        ends = []
        for state in ("device", "host"):
            for name, shard in shards.items():
                shard.copy_(start[name])
            chosen = order_for(model, place, tokens=2_048, optimizer_state=state).settings
            optimizer = ShardOptimizer(shards, chosen, model=policy.model, group=policy.sharding.get_group())
            for seed in range(UPDATES):
                optimizer.update(gradients_like(policy, seed=seed), learning_rate=LEARNING_RATE)
            ends.append({name: shard.to("cpu", copy=True) for name, shard in shards.items()})
            del optimizer
            free()
    largest = max(float((ends[0][name] - ends[1][name]).abs().max()) for name in start)
    moved = max(float((ends[0][name] - start[name]).abs().max()) for name in start)
    yield Row(
        f"{model}: largest difference of a weight after {UPDATES} updates, host beside device",
        largest / (LEARNING_RATE * UPDATES),
        "of learning rate x updates",
        f"largest change, {number(moved / (LEARNING_RATE * UPDATES))}",
        bar="figure <= 1e-3",  # a weight of 1 is rounded to 4e-4 of that
    )


def gradients_like(policy: Policy, *, seed: int) -> dict[str, torch.Tensor]:
    """Return random gradients, the same for the same seed."""
    generator = torch.Generator(policy.device).manual_seed(seed)
    return {
        name: torch.randn(shard.shape, device=shard.device, generator=generator)
        for name, shard in policy.shards().items()
    }


def step(model: str, tokens: int, state: str, place: Place) -> Iterator[Row]:
    answers, what = answers_of(model, tokens), f"{model}, moments {STATES[state]}"
    order = order_for(model, place, tokens=tokens, optimizer_state=state)
    with trainer_of(model, order) as trainer:
        micro_batch = Repeated(trainer, answers)
        micro_batch()
        count_peak(place.device)
        micro_batch()
        peak_gb = peak_of(place.device) / 1e9
        for _ in range(2):  # the first one warms up
            micro_batch(closes=True)
        on_device = f"{model}, moments {STATES['device']}: clip and update"
        yield place.beside(f"{what}: clip and update", trainer.update_s, "s", on_device, called="on the device")
        outline = Outline(
            Path(order.model_path),
            dtype=getattr(torch, DTYPE),
            moments=moment_bytes(optimizer="adamw", optimizer_state=state),
        )
        forecast_gb = outline.forecast(tokens=tokens, longest=max(answers.lengths), ranks=1).total / 1e9
        yield Row(f"{what}: memory of a micro-batch", peak_gb, "GB", f"forecast, {number(forecast_gb)} GB",
                  peak_gb / forecast_gb)  # fmt: skip
