"""Streamed = whole: the trainer against the plain one, for every order, split, packing and number of ranks and updates.

    python -m tests.trainer.whole    the full product (tests/trainer/test_whole.py takes pairwise combinations)

One process per rank plays all cases of a world size.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dora.core.ids import StepId
from dora.trainer import model
from dora.trainer.meshes import make_mesh
from dora.trainer.model import Policy
from dora.trainer.packing import Layout
from dora.trainer.step import Trainer
from dora.transport.messages import Configure, StepDone
from dora.weights.checkpoints import folder_of
from dora.weights.fence import raise_fence
from tests.trainer.conftest import (
    GROUP_SIZE,
    SETTINGS,
    Answer,
    PlainTrainer,
    chain_of,
    in_history,
    make_batch,
    make_groups,
    make_model_folder,
    mini_batches,
)
from tests.trainer.publishing import KeptVersions, make_saver

ROOT: Final = Path(__file__).parents[2]
WORLD_SIZES: Final = (1, 2, 4)
TIMEOUT_S: Final = 600, 20  # of a world size: to start, and for each case
#: Of a weight, in float32 against float64.
TOLERANCE: Final = 1e-5
#: Two steps of four groups, the second of mixed staleness.
STEPS: Final = [
    make_groups(4, version=0, seed=11),
    [*make_groups(1, version=0, seed=12), *make_groups(3, version=1, seed=13)],
]
#: Values of each property of a case, except the world size.
FACTORS: Final = {
    "order": ("committed", "reversed", "shuffled"),
    "split": ("whole", "uneven", "single"),
    "packing": ("packed", "small", "padded"),
    "gathered": (True, False),
    "updates": (1, 2, 4),
}


@dataclass(frozen=True)
class Case:
    """How the steps are trained."""

    order: str  # of the answers of an update
    split: str  # of an update into waves
    packing: str  # of a micro-batch into passes
    gathered: bool  # weights stay gathered during an update
    updates: int


def product() -> list[Case]:
    """Return all cases."""
    return [Case(*values) for values in itertools.product(*FACTORS.values())]


def pairwise() -> list[Case]:
    """Return few cases that have every pair of values of two properties."""
    cases = product()
    missing = {pair for case in cases for pair in _pairs(case)}
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(missing & _pairs(case)))
        missing -= _pairs(best)
        chosen.append(best)
    return chosen


def _pairs(case: Case) -> set[Any]:
    return set(itertools.combinations(asdict(case).items(), 2))


# ---- how a step is streamed -----------------------------------------------------------------------------------------


def waves(case: Case, answers: list[Answer], *, world_size: int) -> Iterator[tuple[int, list[list[Answer]], bool]]:
    """Yield (update, answers of each rank, whether it closes the update)."""
    rng = np.random.default_rng(5)
    for update, part in enumerate(mini_batches(answers, case.updates)):
        if case.order == "reversed":
            part = part[::-1]
        elif case.order == "shuffled":
            part = [part[i] for i in rng.permutation(len(part))]
        found = list(_split(case, part, world_size=world_size))
        for index, wave in enumerate(found):
            yield update, wave, index == len(found) - 1


def _split(case: Case, answers: list[Answer], *, world_size: int) -> Iterator[list[list[Answer]]]:
    if case.split == "whole":
        yield [answers[rank::world_size] for rank in range(world_size)]
    elif case.split == "single":
        for number, answer in enumerate(answers):
            yield [[answer] if rank == number % world_size else [] for rank in range(world_size)]
    else:  # all on the last rank, then most on the first, then nothing at all
        yield [*([[]] * (world_size - 1)), answers[:3]]
        yield [answers[3 + 3 * (world_size - 1) :], *(answers[3 + 3 * i : 6 + 3 * i] for i in range(world_size - 1))]
        yield [[]] * world_size


# ---- one rank -------------------------------------------------------------------------------------------------------


class Reports:
    """In place of a connection: keeps the messages."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


class Rank:
    """A trainer of one case."""

    def __init__(self, case: Case, folder: Path, *, checkpoints: str = "checkpoints", resume_from: str = "") -> None:
        model.GATHERED_BYTES = 2**31 if case.gathered else 0
        self.case, self.rank, self.world_size = case, dist.get_rank(), dist.get_world_size()
        settings = msgspec.structs.replace(
            SETTINGS, updates=case.updates, micro_batch_tokens=40 if case.packing == "small" else 1000
        )
        order = Configure(
            run_id="whole",
            model_path=str(folder / "model"),
            settings=settings,
            memory_root="",
            durable_root="",
            checkpoints=str(folder / checkpoints),
            resume_from=(resume_from,) if resume_from else (),
            may_start_over=False,
            chain=chain_of(0),
            epoch=0,
            fence=str(folder / "epoch"),
        )
        self.reports = Reports()
        policy = Policy(folder / "model", mesh=make_mesh("cpu"), dtype=torch.float32)
        self.versions = KeptVersions(policy)
        self.trainer = Trainer(
            order,
            end=self.reports,  # type: ignore[arg-type]
            policy=policy,
            layout=Layout(padded=case.packing == "padded"),
            publisher=self.versions,  # type: ignore[arg-type]
            saver=make_saver(order),
        )

    def train(self, step: int, answers: list[Answer], *, first: int = 0, end: int | None = None) -> None:
        """Train the waves `first` ... `end` of a step."""
        planned = list(waves(self.case, answers, world_size=self.world_size))
        for index, (update, wave, closes) in list(enumerate(planned))[first:end]:
            batch = make_batch(wave[self.rank], step=step, index=index, last=index == len(planned) - 1)
            batch = msgspec.structs.replace(batch, update=update, closes=closes)
            self.trainer.train(in_history(batch))

    @property
    def metrics(self) -> list[dict[str, float]]:
        return [message.metrics for message in self.reports.sent if isinstance(message, StepDone)]


def play(folder: Path) -> None:
    """Play every case on this rank; rank 0 writes the results."""
    found = []
    for entry in json.loads((folder / "cases.json").read_text()):
        rank = Rank(Case(**entry), folder)
        for step, answers in enumerate(STEPS):
            rank.train(step, answers)
        found.append((rank.versions.weights, rank.metrics))
    manifests, skipped = resume_in_mid_step(folder), skip_an_update(folder)
    if dist.get_rank() == 0:
        torch.save((found, manifests, skipped), folder / "results.pt")


def resume_in_mid_step(folder: Path) -> list[str]:
    """Return the manifests of the state after two steps: uninterrupted, and resumed in the middle of the second."""
    case = Case("committed", "uneven", "small", gathered=True, updates=4)
    first = Rank(case, folder)
    first.train(0, STEPS[0])
    first.train(1, STEPS[1], end=7)  # three waves an update: two updates are made, and the third is begun
    first.trainer.save_checkpoint()
    first.train(1, STEPS[1], first=7)
    first.trainer._saver.wait()
    written = folder_of(folder / "checkpoints", step=StepId(1), chain=chain_of(1))
    second = Rank(case, folder, checkpoints="resumed", resume_from=str(written))
    second.train(1, STEPS[1])
    for rank in (first, second):
        rank.trainer.save_checkpoint()
        rank.trainer.close()
    end = folder_of(Path(), step=StepId(2), chain=chain_of(2)).name
    return [(folder / parent / end / "manifest.json").read_text() for parent in ("checkpoints", "resumed")]


def skip_an_update(folder: Path) -> tuple[dict[str, float], list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Return the metrics and weights of a step of which one update has no finite gradient, and those without it."""
    poisoned = [replace(a, rewards=[math.inf, *a.rewards[1:]]) for a in STEPS[0][:GROUP_SIZE]]
    rank = Rank(Case("committed", "whole", "packed", gathered=True, updates=4), folder)
    rank.train(0, [*poisoned, *STEPS[0][GROUP_SIZE:]])
    other = Rank(Case("committed", "whole", "packed", gathered=True, updates=3), folder)
    other.train(0, STEPS[0][GROUP_SIZE:])
    return (rank.metrics[0] if rank.metrics else {}), rank.versions.weights, other.versions.weights


def run_rank(rank: int, world_size: int, folder: Path) -> None:
    """Play on one rank of a group."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    play(folder)
    dist.destroy_process_group()


# ---- all ranks ------------------------------------------------------------------------------------------------------


@dataclass
class Results:
    """What the ranks of one world size found."""

    cases: list[tuple[list[dict[str, Tensor]], list[dict[str, float]]]]  # weights and metrics of each step
    manifests: list[str]  # see `resume_in_mid_step`
    skipped: tuple[dict[str, float], list[dict[str, Tensor]], list[dict[str, Tensor]]]  # see `skip_an_update`


def run(cases: Sequence[Case], model_path: Path, folder: Path, *, world_size: int) -> Results:
    """Play the cases in one process per rank."""
    (folder / "model").symlink_to(model_path)
    raise_fence(folder / "epoch", epoch=0)
    for parent in ("checkpoints", "resumed"):
        (folder / parent).mkdir()
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    command = [sys.executable, "-m", "tests.trainer.whole", str(folder), str(world_size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    start_s, case_s = TIMEOUT_S
    ranks = [subprocess.Popen([*command, str(rank)], env=environment, cwd=ROOT) for rank in range(world_size)]
    try:
        codes = [rank.wait(start_s + case_s * len(cases)) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * world_size
    return Results(*torch.load(folder / "results.pt", weights_only=False))


def expected(model_path: Path, *, updates: int) -> list[tuple[dict[str, Tensor], float]]:
    """Return the weights and the gradient norm of the plain trainer after each step."""
    plain = PlainTrainer(model_path)
    found = []
    for step, answers in enumerate(STEPS):
        norm = plain.step(answers, step=step, updates=updates)
        found.append(({name: p.detach().clone() for name, p in plain.parameters.items()}, norm))
    return found


def difference(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """Return the largest difference of two sets of weights."""
    return max(float((left[name].double() - right[name].double()).abs().max()) for name in right)


def main() -> int:
    """Play the full product; return exit code 1 if a case differs."""
    cases, worst = product(), 0.0
    with tempfile.TemporaryDirectory(prefix="dora-whole-") as name:
        model_path = make_model_folder(Path(name) / "model")
        plain = {updates: expected(model_path, updates=updates) for updates in FACTORS["updates"]}
        for world_size in WORLD_SIZES:
            folder = Path(name) / str(world_size)
            folder.mkdir()
            results = run(cases, model_path, folder, world_size=world_size)
            found = [
                max(difference(mine, theirs) for mine, (theirs, _) in zip(weights, plain[case.updates], strict=True))
                for case, (weights, _) in zip(cases, results.cases, strict=True)
            ]
            off, case = max(zip(found, map(str, cases), strict=True))
            sys.stdout.write(f"{world_size} ranks: {len(cases)} cases differ by {off:.2g} at most: {case}\n")
            worst = max(worst, off)
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        run_rank(int(sys.argv[3]), int(sys.argv[2]), Path(sys.argv[1]))
    else:
        sys.exit(main())
