"""The cells of the evidence and their results, one JSON line each.

A cell is one run of the harness or one live run. Its settings are those of launch/configs/learning-cpu.toml and the
overrides given here. Invariant: a file of results has at most one line for each cell, and only of the profile (the
digest of these settings) with which it was begun.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from dora.config.load import load, read_toml
from dora.config.schema import Config

ROOT: Final = Path(__file__).parents[2]
PROFILE: Final = ROOT / "launch" / "configs" / "learning-cpu.toml"
RESULTS: Final = ROOT / "bench" / "results" / "learning"
LAGS: Final = RESULTS / "lags.jsonl"
LIVE: Final = RESULTS / "live.jsonl"

#: Name -> overrides of `[objective]`. Bands and caps are the defaults; see docs/CONFIG.md.
CORRECTIONS: Final[dict[str, tuple[str, ...]]] = {
    "none": ("weight=none",),
    "tis": ("weight=tis",),
    "mis": ("weight=none", "mis=token"),
    "icepop": ("weight=icepop",),
    "opsm": ("weight=none", "opsm=1e-4"),
}
#: The correction that the preset of an objective brings.
PRESET: Final = "preset"
OBJECTIVES: Final = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "dppo")


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run of the harness."""

    objective: str
    correction: str
    staleness: int  # K
    updates: int  # M
    seed: int

    def config(self) -> Config:
        """Return the settings of the run."""
        run = [f"run.seed={self.seed}", f"trainer.updates={self.updates}", f"objective.preset={self.objective}"]
        objective = [f"objective.{override}" for override in CORRECTIONS.get(self.correction, ())]
        return load(PROFILE, [*run, *objective], environ={})


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one run of the harness showed."""

    cell: Cell
    heldout: list[tuple[int, float]]  # (version, mean reward)
    area: float  # under `heldout`, divided by the number of steps
    metrics: dict[str, list[float]]  # of every step; see METRICS
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
        """Settings beside those of the profile."""
        instances = max(4, self.staleness + 1)  # `dora` needs K + 1
        bound = [f"rollout.max_staleness={self.staleness}", f"engine.instances={instances}"]
        bound = bound if self.strategy == "dora" else []
        return [f"run.seed={self.seed}", f"rollout.strategy={self.strategy}", "objective.preset=grpo", *bound]


class LiveResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one live run showed; seconds count from the end of step 0."""

    cell: LiveCell
    heldout: list[tuple[int, float]]  # (version, mean reward)
    published: list[float]  # seconds at which version 0, 1, ... was trained; 0 for both of these
    staleness: list[float]  # mean of every step
    profile: str
    commit: str
    machine: str


Kind = TypeVar("Kind", Result, LiveResult)

#: Metrics of the trainer that a result keeps.
METRICS: Final = (
    "all/reward_mean", "all/mismatch_k3", "all/ess", "all/log_ratio_abs_mean", "all/log_ratio_abs_max", "all/entropy",
    "all/tis_capped_frac", "all/response_len_mean", "grad_norm", "step_tokens",
)  # fmt: skip


def corrections(seeds: int) -> list[Cell]:
    """GRPO, one update per version: K against corrections. Without staleness, they are the same run."""
    return [
        Cell("grpo", correction, staleness, 1, seed)
        for seed in range(seeds)
        for staleness in (0, 16, 8, 2, 4, 1)
        for correction in (CORRECTIONS if staleness else ("tis",))
    ]


def objectives(seeds: int) -> list[Cell]:
    """Every objective as its preset has it, with 1 and 4 updates per version."""
    return [
        Cell(objective, "tis" if objective == "grpo" else PRESET, staleness, updates, seed)
        for seed in range(seeds)
        for updates in (1, 4)
        for staleness in (0, 8, 2)
        for objective in OBJECTIVES
    ]


def live_cells(seeds: int) -> list[LiveCell]:
    """The strategies whose learning is compared per second as well."""
    kinds = [("sync", 0), ("dora", 2), ("dora", 8), ("periodic", 0), ("partial", 0)]
    return [LiveCell(strategy, staleness, seed) for seed in range(seeds) for strategy, staleness in kinds]


def profile() -> str:
    """Return a digest of the settings that PROFILE gives, whatever its comments and descriptions."""
    given = read_toml(PROFILE)
    for source in given["task"]["sources"]:
        source.pop("description", None)
    return hashlib.blake2b(msgspec.json.encode(given, order="sorted"), digest_size=8).hexdigest()


def read(path: Path, kind: type[Kind]) -> list[Kind]:
    """Return the results in a file; a last line that an interruption has cut is left out."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [msgspec.json.decode(line, type=kind) for line in lines]


def append(path: Path, result: Result | LiveResult) -> None:
    """Add a result, after the last whole line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = path.read_bytes() if path.exists() else b""
    whole = kept[: kept.rfind(b"\n") + 1]
    with path.open("r+b" if kept else "wb") as file:
        file.truncate(len(whole))
        file.seek(len(whole))
        file.write(msgspec.json.encode(result) + b"\n")
