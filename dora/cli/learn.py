"""`dora simulate --learn`: simulated jobs whose policies learn, and a table of what they have learned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from dora.app.learn import LearningCurve, configured, digest_of, learn
from dora.cli.output import say, show_progress, table, writing
from dora.config.schema import Config
from dora.sim.sweep import Case
from dora.sim.workload import Workload

_HEAD = ("strategy", "K", "seed", "step s", "staleness", "held out, first", "held out, last", "digest")


def learn_all(found: Sequence[Case], *, config: Path, json: Path | None, checkpoints: Path | None) -> None:
    """Simulate each case, print a table, and write the curves to `json`. In `checkpoints` each case has a folder, from
    which it goes on."""
    prepared = [(*configured(config, workload, seed=seed), seed) for workload, seed in found]
    say(f"{config}: real answers and updates; a token takes as long as {found[0][0].lengths.scale:g} of the workload")
    curves: list[LearningCurve] = []
    for number, (settings, workload, seed) in enumerate(prepared, start=1):
        case = f"{number} of {len(found)}: {workload.job.strategy}, K = {workload.rules.max_staleness}, seed {seed}"

        def show(line: str, case: str = case) -> None:
            show_progress(f"{case}: {line}")

        folder = checkpoints and checkpoints / _folder(workload, settings, seed=seed)
        with writing("--checkpoints", folder or Path()):
            curves.append(learn(workload, settings, seed=seed, show=show, folder=folder))
    show_progress("")
    say(*table([_HEAD, *map(_row, curves)]))
    if json is not None:
        with writing("--json", json):
            json.write_bytes(msgspec.json.encode(curves) + b"\n")


def _folder(workload: Workload, settings: Config, *, seed: int) -> str:
    """Return the name of a case's folder; another file or option is another case."""
    job, digest = workload.job, digest_of(workload, settings, seed=seed)
    return f"{job.strategy}-k{workload.rules.max_staleness}-seed{seed}-{digest}"


def _row(curve: LearningCurve) -> tuple[str, ...]:
    scores = [point.heldout for point in curve.points if point.heldout is not None]
    return (
        curve.strategy,
        str(curve.max_staleness),
        str(curve.seed),
        f"{curve.step_s:.4g}",
        f"{curve.staleness_mean:.2f}",
        f"{scores[0]:.3f}",
        f"{scores[-1]:.3f}",
        curve.digest[:8],
    )
