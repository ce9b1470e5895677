"""`dora simulate`: simulates a workload, a configuration or a finished run, and prints a table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dora.app.simulate import from_file, from_run
from dora.cli.output import say, show_progress, writing
from dora.errors import ConfigError
from dora.sim.measure import Result
from dora.sim.pictures import draw
from dora.sim.report import notes, rows, table
from dora.sim.sweep import as_json, cases, run
from dora.sim.workload import checked, with_overrides


def simulate(
    path: Path | None,
    *,
    recorded: Path | None,
    overrides: Sequence[str],
    strategies: Sequence[str],
    staleness: Sequence[int],
    splits: Sequence[int],
    instances: Sequence[int],
    rules: Sequence[str],
    ablate: bool,
    seeds: int,
    steps: int | None,
    wide: bool,
    json: Path | None,
    pictures: Path | None,
    processes: int | None,
    learn: Path | None,
    checkpoints: Path | None,
) -> None:
    """Simulate every combination and print the table. `learn`: a configuration whose policy learns meanwhile;
    `checkpoints`: where that is saved."""
    if instances and min(instances) < 1:
        raise ConfigError(f"--instances {min(instances)}: a fleet has at least one instance")
    if path is not None and recorded is not None:
        raise ConfigError(f"--from {recorded}: a finished run needs no other file; omit {path}")
    workload, note = from_run(recorded) if recorded is not None else from_file(path)
    if overrides:
        workload = with_overrides(workload, overrides)
    if steps is not None:
        workload = checked(workload.with_changes(job={"steps": steps}), origin="--steps")
    found = cases(
        workload,
        strategies=strategies,
        staleness=staleness,
        splits=splits,
        instances=instances,
        seeds=range(seeds),
        rules=rules,
        ablate=ablate,
    )
    if learn is not None and (pictures is not None or wide or processes is not None):
        raise ConfigError("--learn: is not valid with --pictures, --wide and --processes")
    if learn is None and checkpoints is not None:
        raise ConfigError("--checkpoints: is of --learn; a simulation without it takes seconds")
    _require_writable(json, pictures)
    say(*note.splitlines())
    if learn is not None:
        from dora.cli.learn import learn_all  # imports torch

        learn_all(found, config=learn, json=json, checkpoints=checkpoints)
        return
    processes = processes or min(2, os.cpu_count() or 1)
    results: list[Result] = []
    for result in run(found, processes=processes):
        results.append(result)
        show_progress(f"{len(results)} of {len(found)} simulations")
    show_progress("")
    summary = rows(results)
    lines = [table(summary, wide=wide), *([] if wide else notes(summary))]
    say(*(line for text in lines for line in text.split("\n")))
    if pictures is not None:
        drawn = draw(summary, found)
        with writing("--pictures", pictures):
            for name, picture in drawn.items():
                (pictures / f"{name}.svg").write_text(picture, encoding="utf-8")
    if json is not None:
        with writing("--json", json):
            json.write_bytes(as_json(results))


def _require_writable(json: Path | None, pictures: Path | None) -> None:
    """Raise ConfigError now, not after the last simulation, if the outputs cannot be written."""
    if pictures is not None:
        with writing("--pictures", pictures):
            pictures.mkdir(parents=True, exist_ok=True)
    if json is not None:
        with writing("--json", json):
            json.touch()
