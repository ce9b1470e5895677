"""Runs and evaluations side by side: settings that differ, figures, curves, and paired differences of held-out scores.

Invariant: the folders are only read, also while their runs go on. A difference is given only where both have been asked
the same prompts, which the journals tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from dora.app.held_out import HeldOut, SetFacts
from dora.app.saved_status import read_status
from dora.config.changes import flat, is_operational
from dora.config.load import read_toml
from dora.controller.recorder import read_rows
from dora.errors import ConfigError, DoraError
from dora.journal.run_folder import RunFolder
from dora.observe.estimates import Interval, difference
from dora.observe.snapshot import Snapshot

#: Points of one curve.
MAX_POINTS: Final = 500
#: Largest number in a curve: larger ones are of no run, and may fit neither a float nor JSON.
MAX_NUMBER: Final = 2**53
#: Curves over steps, by what rows of kind `step` call their values.
CURVES: Final = {
    "reward_all_mean": "Reward in training",
    "tokens_per_s": "Tokens sampled per second",
    "staleness_mean": "Staleness of trained groups",
    "response_len_mean": "Length of trained answers",
}
UNSET: Final = "unset"

#: (steps trained, minutes since the run began, value)
Point = tuple[float, float, float]


class VersionScore(msgspec.Struct, frozen=True):
    """A mean reward, and the version that has it."""

    mean: float
    version: int


class HeldOutRow(msgspec.Struct, frozen=True):
    """The scores of a run on one held-out set."""

    name: str
    final: VersionScore
    best: VersionScore


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """One run or evaluation."""

    run_id: str
    folder: str
    phase: str
    steps: int
    hours: float
    num_tokens: int  #: sampled
    trained_tokens_per_s: float  #: over the whole run
    staleness: float | None
    idle_share: float | None  #: of the trainer, without the first step
    held_out: list[HeldOutRow]
    curves: dict[str, list[Point]]  #: by heading


class DifferingSetting(msgspec.Struct, frozen=True):
    """A setting that differs, with its value in each run as JSON."""

    key: str
    values: list[str]
    alters_experiment: bool  #: it may affect what is learned


class Difference(msgspec.Struct, frozen=True):
    """The score of a run minus that of the first one, prompt by prompt."""

    name: str  #: of the held-out set
    run: int  #: index of the run
    versions: tuple[int, int]  #: of the first run, of this run: the last that each evaluated
    prompts: int
    mean: float
    interval: Interval


class Comparison(msgspec.Struct, frozen=True):
    """All that is shown."""

    runs: list[RunRow]
    settings: list[DifferingSetting]
    differences: list[Difference]
    not_paired: list[str]  #: why scores have no difference


async def compare(paths: Sequence[Path]) -> Comparison:
    """Compare run folders; the first one is what the others are compared with."""
    folders = [RunFolder.open(path) for path in paths]
    if len({folder.root for folder in folders}) < len(folders):
        raise ConfigError("dora compare: a folder is given twice")
    configs = [dict(flat(read_toml(folder.config))) for folder in folders]
    runs = [_row(path, folder, await read_status(path)) for path, folder in zip(paths, folders, strict=True)]
    differences, not_paired = _paired(folders)
    return Comparison(runs, [*_settings(configs)], differences, not_paired)


def _settings(configs: Sequence[Mapping[str, str]]) -> Iterator[DifferingSetting]:
    """Yield the keys whose values differ, those that alter the experiment first."""
    keys = dict.fromkeys(key for config in configs for key in config)
    found = [DifferingSetting(key, [c.get(key, UNSET) for c in configs], not is_operational(key)) for key in keys]
    yield from sorted((one for one in found if len({*one.values}) > 1), key=lambda one: not one.alters_experiment)


def _row(path: Path, folder: RunFolder, now: Snapshot) -> RunRow:
    scores: dict[str, list[VersionScore]] = {}
    for score in now.scores:
        if score.mean is not None:
            scores.setdefault(score.name, []).append(VersionScore(score.mean, score.version))
    return RunRow(
        run_id=now.run_id,
        folder=str(path),
        phase=now.phase,
        steps=now.steps_trained,
        hours=now.uptime_s / 3600,
        num_tokens=now.num_tokens,
        trained_tokens_per_s=now.num_trained_tokens / max(now.uptime_s, 1e-9),
        staleness=now.staleness_mean,
        idle_share=now.trainer.mean_idle_share,
        held_out=[HeldOutRow(name, own[-1], max(own, key=lambda one: one.mean)) for name, own in scores.items()],
        curves=_curves(folder),
    )


def _curves(folder: RunFolder) -> dict[str, list[Point]]:
    """Return the curves by heading, held-out rewards first."""
    held_out: dict[str, list[Point]] = {}
    others: dict[str, list[Point]] = {}
    for row in read_rows(folder.metrics):
        if row["kind"] == "evaluation":
            _add(held_out, f"Held-out reward: {row.get('name')}", row.get("version"), row.get("at"), row.get("mean"))
        elif row["kind"] == "step":
            step = row.get("step")
            for name, heading in CURVES.items():
                _add(others, heading, step + 1 if isinstance(step, int) else None, row.get("at"), row.get(name))
    return {heading: _thinned(points) for heading, points in (held_out | others).items()}


def _add(curves: dict[str, list[Point]], heading: str, step: Any, at: Any, value: Any) -> None:
    """Add a point, unless others have written something else into the row."""
    if all(isinstance(number, int | float) and abs(number) <= MAX_NUMBER for number in (step, at, value)):
        curves.setdefault(heading, []).append((step, round(at / 60, 3), value))


def _thinned(points: Sequence[Point]) -> list[Point]:
    stride = -(-len(points) // MAX_POINTS) or 1
    return [point for i, point in enumerate(points) if i % stride == 0 or i == len(points) - 1]


# -- held-out scores, prompt by prompt --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Scored:
    """The last evaluation of a run."""

    held_out: HeldOut

    @property
    def version(self) -> int:
        return self.held_out.versions[-1]

    def named(self, name: str) -> SetFacts | None:
        return next((one for one in self.held_out.sets if one.name == name), None)

    def rewards(self, chosen: SetFacts) -> list[list[float]]:
        return self.held_out.rewards(self.held_out.versions[-1], chosen)


def _paired(folders: Sequence[RunFolder]) -> tuple[list[Difference], list[str]]:
    """Return the differences to the first run, and why there are no others."""
    scored = [_scored(folder) for folder in folders]
    differences: list[Difference] = []
    not_paired = [one for one in scored if isinstance(one, str)]
    first = scored[0]
    if isinstance(first, str):
        return [], not_paired
    for index, other in enumerate(scored[1:], start=1):
        for facts in first.held_out.sets if isinstance(other, _Scored) else ():
            assert isinstance(other, _Scored)
            found = _difference(first, other, facts, index=index)
            if isinstance(found, Difference):
                differences.append(found)
            else:
                not_paired.append(f"{folders[index].root.name}: {found}")
    return differences, not_paired


def _scored(folder: RunFolder) -> _Scored | str:
    try:
        held_out = HeldOut(folder)
    except DoraError as err:
        return str(err)
    if held_out.versions:
        return _Scored(held_out)
    if held_out.sets:
        return f"{folder.root.name}: no evaluation has ended"
    return f"{folder.root.name}: has no held-out sets; dora eval --model {folder.root} scores it"


def _difference(first: _Scored, other: _Scored, facts: SetFacts, *, index: int) -> Difference | str:
    same = other.named(facts.name)
    if same is None:
        return f"has no held-out set '{facts.name}'"
    if same.digest != facts.digest:
        return f"'{facts.name}' has other prompts than in the first run"
    before, after = first.rewards(facts), other.rewards(same)
    if (found := difference(before, after)) is None:
        return f"'{facts.name}' has no prompt that both have graded answers to"
    prompts = sum(bool(a and b) for a, b in zip(before, after, strict=True))
    return Difference(facts.name, index, (first.version, other.version), prompts, *found)
