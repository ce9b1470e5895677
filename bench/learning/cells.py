"""The cells of the sweep and of the live runs, and their results, one JSON line each.

A cell is one run of the lag harness or one live run. Its settings are those of a file in launch/configs (that of its
task, or that of live runs) and the overrides given here. Invariant: a file of results has at most one line for each
cell, and only of the profile (the digest of its file) with which it was begun.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final, Literal, TypeVar

import msgspec

from dora.config.load import load, read_toml
from dora.config.schema import Config

ROOT: Final = Path(__file__).parents[2]
CONFIGS: Final = ROOT / "launch" / "configs"
RESULTS: Final = ROOT / "bench" / "results" / "learning"
SWEEP: Final = RESULTS / "sweep.jsonl"
LIVE: Final = RESULTS / "live.jsonl"

Task = Literal["sums", "tail"]
#: Name -> configuration: sums of 10 to 24 numbers; sums of 2 to 52, whose answers differ thirtyfold in length.
TASKS: Final[dict[Task, Path]] = {"sums": CONFIGS / "learning-cpu.toml", "tail": CONFIGS / "learning-tail.toml"}
#: The configuration of live runs.
LIVE_CONFIG: Final = CONFIGS / "learning-live.toml"
#: Name -> overrides of `[objective]`. Bands and caps are the defaults; see docs/CONFIG.md.
CORRECTIONS: Final[dict[str, tuple[str, ...]]] = {
    "none": ("weight=none",),
    "tis": ("weight=tis",),
    "mis": ("weight=none", "mis=token"),
    "icepop": ("weight=icepop",),
    "opsm": ("weight=none", "opsm=1e-4"),
}
#: Objective -> the correction of its preset.
OBJECTIVES: Final = {"grpo": "tis", "dr_grpo": "tis", "dapo": "tis", "gspo": "none", "cispo": "none", "dppo": "none"}
#: Objectives over k = π/μ, which a second weight would correct twice.
OVER_K: Final = frozenset({"gspo", "cispo", "dppo"})
#: Learning rates that are tried, times that of the task's file, by M: smaller ones where a step has more updates.
RATES: Final[dict[Task, dict[int, tuple[float, ...]]]] = {
    "sums": {1: (0.5, 1.0, 2.0), 4: (0.25, 0.5, 1.0)},
    "tail": {1: (2.0, 4.0, 8.0, 16.0), 4: (1.0, 2.0, 4.0, 8.0)},
}
#: Steps of a run. Later ones of `tail` are dear: most groups are then right as a whole, and replaced.
STEPS: Final[dict[Task, int]] = {"sums": 24, "tail": 30}
#: Objective -> one with the same gradient as long as π = π_o = μ, so without staleness and with one update.
ON_POLICY: Final = {"gspo": "grpo", "cispo": "dapo", "dppo": "dapo"}
#: The seed with which learning rates are tuned; results have seeds from 0.
TUNING_SEED: Final = 100
UPDATES: Final = (1, 4)  # M
SEEDS: Final = 5
#: Pairs that the second round repeats with all seeds; `FORMER` is always one of them.
BEST: Final = 6
#: Objective and correction that are used without `[objective]`.
DEFAULT: Final = ("dr_grpo", "tis")
#: Those that were used without `[objective]` before the sweep.
FORMER: Final = ("dapo", "tis")
#: Pairs of the third round: those, and the best of another objective.
HALVED: Final = (FORMER, DEFAULT, ("cispo", "opsm"))


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run of the harness."""

    task: Task
    objective: str
    correction: str
    staleness: int  # K
    updates: int  # M
    rate: float  # times the learning rate of the task's file
    seed: int

    def config(self) -> Config:
        """Return the settings of the run."""
        path = TASKS[self.task]
        rate = self.rate * load(path, environ={}).trainer.learning_rate
        run = [f"run.seed={self.seed}", f"run.steps={STEPS[self.task]}"]
        run += [f"trainer.updates={self.updates}", f"trainer.learning_rate={rate}"]
        objective = [f"preset={self.objective}", *CORRECTIONS[self.correction]]
        return load(path, [*run, *(f"objective.{override}" for override in objective)], environ={})


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one run of the harness showed."""

    cell: Cell
    heldout: list[tuple[int, float]]  # (version, mean reward)
    area: float  # under `heldout`, divided by the number of steps
    metrics: dict[str, float]  # means of all steps; see METRICS
    seconds: float
    profile: str
    commit: str
    machine: str


class LiveCell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One live run."""

    strategy: str
    staleness: int  # K; of strategies that bound it
    seed: int

    @property
    def overrides(self) -> list[str]:
        """Settings beside those of the file."""
        bound = [f"rollout.max_staleness={self.staleness}"] if self.strategy == "dora" else []
        return [f"run.seed={self.seed}", f"rollout.strategy={self.strategy}", *bound]


class LiveResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one live run showed; seconds count from when its ranks were ready."""

    cell: LiveCell
    heldout: list[tuple[int, float]]  # (version, mean reward)
    published: list[float]  # seconds at which version 0, 1, ... was trained; 0 for version 0
    staleness: list[float]  # mean of every step
    profile: str
    commit: str
    machine: str


def on_policy(task: Task, objective: str, updates: int, rate: float, seed: int) -> Cell:
    """Return the run of an objective without staleness: one for all objectives with the same gradient."""
    objective = ON_POLICY.get(objective, objective) if updates == 1 else objective
    return Cell(task, objective, OBJECTIVES[objective], 0, updates, rate, seed)


Kind = TypeVar("Kind", bound=msgspec.Struct)

#: Metrics of the trainer that a result keeps.
METRICS: Final = (
    "all/reward_mean", "all/mismatch_k3", "all/ess", "all/log_ratio_abs_mean", "all/log_ratio_abs_max", "all/entropy",
    "all/tis_capped_frac", "all/response_len_mean", "grad_norm", "step_tokens",
)  # fmt: skip


def tuning() -> list[Cell]:
    """Every objective as its preset has it, without staleness, at each learning rate: as many runs for each."""
    return list(
        dict.fromkeys(
            on_policy(task, objective, updates, rate, TUNING_SEED)
            for updates in UPDATES
            for task in TASKS
            for rate in RATES[task][updates]
            for objective in OBJECTIVES
        )
    )


def rates(results: Sequence[Result]) -> dict[tuple[Task, str, int], float]:
    """Return the best learning rate of each task, objective and M, by the area of the runs that tune it."""
    areas = {result.cell: result.area for result in results}
    return {
        (task, objective, updates): max(
            RATES[task][updates],
            key=lambda rate: areas.get(on_policy(task, objective, updates, rate, TUNING_SEED), 0.0),
        )
        for updates in UPDATES
        for task in TASKS
        for objective in OBJECTIVES
    }


def kinds() -> list[tuple[str, str]]:
    """Return all pairs of an objective and a correction."""
    return [
        (objective, correction)
        for objective in OBJECTIVES
        for correction in CORRECTIONS
        if objective not in OVER_K or correction not in ("tis", "icepop")
    ]


def first_round(results: Sequence[Result]) -> list[Cell]:
    """All pairs with K = 4, and their objectives without staleness, with one seed."""
    best = rates(results)
    found = []
    for updates in UPDATES:
        for task in TASKS:
            for objective, correction in kinds():
                rate = best[task, objective, updates]
                found.append(on_policy(task, objective, updates, rate, 0))
                found.append(Cell(task, objective, correction, 4, updates, rate, 0))
    return list(dict.fromkeys(found))


def ranked(results: Sequence[Result]) -> list[tuple[str, str]]:
    """Return the pairs by their area with K = 4 in the first round, over that of the best pair: the mean of both tasks
    and both M, as far as they were run."""
    areas = {
        (cell.objective, cell.correction, cell.task, cell.updates): result.area
        for result in results
        if (cell := result.cell) in set(first_round(results)) and cell.staleness
    }
    most = {
        (task, updates): max((area for (_, _, t, m), area in areas.items() if (t, m) == (task, updates)), default=1.0)
        for task in TASKS
        for updates in UPDATES
    }
    scores: dict[tuple[str, str], float] = {}
    for kind in kinds():
        found = [areas[*kind, *where] / best for where, best in most.items() if (*kind, *where) in areas]
        scores[kind] = fmean(found) if found else 0.0
    return sorted(scores, key=lambda kind: -scores[kind])


def repeated(results: Sequence[Result]) -> list[tuple[str, str]]:
    """Return the pairs of the second round."""
    best = [kind for kind in ranked(results) if kind != FORMER]
    return [FORMER, *best[: BEST - 1]]


def second_round(results: Sequence[Result]) -> Iterator[Cell]:
    """The best pairs, without staleness and with K = 2 and 4, with all seeds."""
    best = rates(results)
    for seed in range(SEEDS):
        for updates in UPDATES:
            for task in TASKS:
                for objective, correction in repeated(results):
                    rate = best[task, objective, updates]
                    yield on_policy(task, objective, updates, rate, seed)
                    for staleness in (2, 4) if updates == 1 else (4,):
                        yield Cell(task, objective, correction, staleness, updates, rate, seed)


def third_round(results: Sequence[Result]) -> Iterator[Cell]:
    """The pairs of `HALVED` on the task with a tail at half the rate that was tuned: whether a rate that is the best
    without staleness is too large with it."""
    best = rates(results)
    for seed in range(SEEDS):
        for updates in UPDATES:
            for objective, correction in HALVED:
                rate = best["tail", objective, updates] / 2
                yield on_policy("tail", objective, updates, rate, seed)
                yield Cell("tail", objective, correction, 4, updates, rate, seed)


def live_cells(seeds: int) -> list[LiveCell]:
    """The strategies whose learning is compared per second as well."""
    kinds = [("sync", 0), ("periodic", 0), ("dora", 1), ("dora", 3)]
    return [LiveCell(strategy, staleness, seed) for seed in range(seeds) for strategy, staleness in kinds]


def profile(path: Path) -> str:
    """Return a digest of the settings that a file gives, whatever its comments and descriptions."""
    given = read_toml(path)
    for source in given["task"]["sources"]:
        source.pop("description", None)
    return hashlib.blake2b(msgspec.json.encode(given, order="sorted"), digest_size=8).hexdigest()


def with_objective(path: Path) -> str:
    """Return a digest of the settings that a file gives, and of its objective, whether the file gives that or not.

    Policies without experts replay no choice of experts.
    """
    given = [profile(path), load(path, environ={}).objective.model_dump(mode="json", exclude={"router_replay"})]
    return hashlib.blake2b(msgspec.json.encode(given, order="sorted"), digest_size=8).hexdigest()


def read(path: Path, kind: type[Kind]) -> list[Kind]:
    """Return the results in a file; a last line that an interruption has cut is left out."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [msgspec.json.decode(line, type=kind) for line in lines]


def append(path: Path, result: msgspec.Struct) -> None:
    """Add a result, after the last whole line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = path.read_bytes() if path.exists() else b""
    whole = kept[: kept.rfind(b"\n") + 1]
    with path.open("r+b" if kept else "wb") as file:
        file.truncate(len(whole))
        file.seek(len(whole))
        file.write(msgspec.json.encode(result) + b"\n")
