"""A publication beside training: how long the trainer stands, and how long until the version is in the store.

The weights are changed right before, by work that the GPU has only been given, so that a copy that did not wait for it
would differ. Then micro-batches are trained until the version is in the store. An update after the first of them has to
wait until the weights are written. The published tensors are compared with the weights, bit by bit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial

import torch
from clients.steps import Reports, timed
from result import Row, number
from safetensors import safe_open

from dora.trainer.checkpointing import Mode
from dora.trainer.model import Policy
from dora.transport.messages import VersionWritten
from on_gpu.cases import Case, Place
from on_gpu.models import DTYPE, SHAPES, Repeated, answers_of, order_for, trainer_of
from on_gpu.roofline import ROOFLINE, TO_HOST, TO_STORE

PUBLISH_S = 120.0


def cases(part: str, *, tiny: bool) -> list[Case]:
    sizes = (("tiny", 512),) if tiny else (("1.7B", 16_384), ("8B", 8_192))
    return [ROOFLINE] + [
        Case(
            f"{model}: a publication",
            partial(publish, model, tokens),
            folder_bytes=5 * SHAPES[model].parameters,  # the folder that is read, and the version
        )
        for model, tokens in sizes
    ]


def publish(model: str, tokens: int, place: Place) -> Iterator[Row]:
    answers = answers_of(model, tokens)
    reports = Reports()
    mode: Mode = "full" if model == "8B" else "selective"
    with trainer_of(model, order_for(model, place, tokens=tokens, mode=mode), reports=reports) as trainer:
        shards = Policy.shards(trainer._policy)  # before they are gathered
        micro_batch = Repeated(trainer, answers)
        micro_batch()
        before_s = statistics.median(timed(micro_batch) for _ in range(place.repeats))
        for shard in shards.values():
            shard.mul_(1.001)
        trainer.start()
        moments: list[float] = []  # when the weights may change again
        assert trainer._publisher._written is not None
        trainer._publisher._written.add_done_callback(lambda _: moments.append(time.perf_counter()))
        meanwhile = [timed(micro_batch)]
        next_update = time.perf_counter()
        while reports.when(VersionWritten) is None and time.perf_counter() < next_update + PUBLISH_S:
            meanwhile.append(timed(micro_batch))
        trainer._publisher.close()
        in_store = reports.when(VersionWritten)
        assert in_store is not None
        [folder] = (place.folder / "memory").glob("v*")
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e9
        rates = [row.figure for row in map(place.find, (TO_HOST, TO_STORE)) if row is not None and row.figure]
        ceiling_s, in_store_s = sum(size / rate for rate in rates), in_store - trainer.publish_from
        what, meanwhile_s = f"{model}, a version of {number(size)} GB", statistics.median(meanwhile)
        micro = f"a micro-batch before, {number(before_s)} s"
        yield Row(f"{what}: training stands", trainer.publish_s, "s", micro, trainer.publish_s / before_s)
        yield Row(f"{what}: an update after the next micro-batch waits", max(0.0, moments[0] - next_update), "s")
        copied = f"a copy to the host and one file written, {number(ceiling_s)} s"
        yield Row(f"{what}: until it is in the store", in_store_s, "s", copied, in_store_s / ceiling_s)
        yield Row(f"{what}: a micro-batch meanwhile", meanwhile_s, "s", micro, meanwhile_s / before_s, "ratio <= 1.1")
        differing = 0
        for path in folder.glob("*.safetensors"):
            with safe_open(path, framework="pt") as opened:
                differing += sum(
                    not torch.equal(opened.get_tensor(name), shards[name].to(getattr(torch, DTYPE)).cpu())
                    for name in opened.keys()  # noqa: SIM118
                )
        yield Row(f"{what}: tensors that differ from the weights", differing, "", bar="figure <= 0")
