"""A micro-batch for which memory does not suffice: the error word for word, and the same one as the error advises.

Memory is made short, so that the trainer's own allocations fail: by a tensor that takes most of a GPU, or by a limit of
the address space on a CPU.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from functools import partial

import psutil
import torch
from clients.steps import make_batch, timed
from result import Row

from dora.trainer.memory import DeviceMemoryError, train_in_memory
from on_gpu.cases import Case, Place
from on_gpu.models import answers_of, order_for, trainer_of


def cases(part: str, *, tiny: bool) -> list[Case]:
    model, tokens, lowered, room = ("tiny", 16_384, 512, 2**27) if tiny else ("0.6B", 32_768, 2_048, 32 * 2**30)
    return [
        Case(f"{model}: passes of {budget:,} tokens", partial(train, model, tokens, budget, room))
        for budget in (tokens, lowered)
    ]


def train(model: str, tokens: int, budget: int, room: int, place: Place) -> Iterator[Row]:
    answers, order = answers_of(model, tokens), order_for(model, place, tokens=budget)
    what = f"{model}, {tokens:,} tokens in passes of {budget:,}"
    with trainer_of(model, order) as trainer:
        warm, everyone = make_batch(answers, [0], step=0, index=0, last=False), list(range(len(answers)))
        trainer.train(warm)
        batch = make_batch(answers, everyone, step=0, index=1, last=False)
        held = hold_all_but(room, device=place.device)
        begun = time.perf_counter()
        try:
            with train_in_memory(batch, order.settings, torch.device(place.device)):
                yield Row(f"{what}: trained", timed(partial(trainer.train, batch)), "s")
        except DeviceMemoryError as err:
            yield Row(f"{what}: until the error", time.perf_counter() - begun, "s", str(err))
        del held


def hold_all_but(room: int, *, device: str) -> torch.Tensor | None:
    """Leave `room` bytes of the device's memory; on a GPU, as long as the tensor is held."""
    if device == "cpu":
        limit = psutil.Process().memory_info().vms + room
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        return None
    torch.cuda.empty_cache()
    return torch.empty(max(0, torch.cuda.mem_get_info()[0] - room), dtype=torch.uint8, device=device)
