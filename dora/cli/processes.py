"""Defines the hidden commands, which DORA starts itself: servers, ranks, senders, trackers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

processes = typer.Typer(rich_markup_mode=None)

WorkloadPath = Annotated[Path, typer.Argument(metavar="WORKLOAD.toml", help="Workload file.")]
TimeScale = Annotated[float, typer.Option(min=1e-3, help="Seconds of the workload per second of the wall clock.")]
Seed = Annotated[int, typer.Option(help="Seed of the answers, as in `dora simulate`.")]


@processes.command(hidden=True)
def pace_servers(
    workload: WorkloadPath,
    model: Annotated[Path, typer.Option()],
    first: Annotated[int, typer.Option()],
    count: Annotated[int, typer.Option()],
    time_scale: TimeScale,
    seed: Seed,
) -> None:
    """Run one process of paced servers; started by `pace`."""
    from dora.cli.pace import serve_paced as command

    command(workload, model=model, first=first, count=count, seed=seed, time_scale=time_scale)


@processes.command(hidden=True)
def pace_environment(workload: WorkloadPath, time_scale: TimeScale, seed: Seed) -> None:
    """Run the environment of a paced run; started by its controller."""
    from dora.cli.pace import call_paced as command

    command(workload, seed=seed, time_scale=time_scale)


@processes.command(hidden=True)
def pace_ranks(workload: WorkloadPath, time_scale: TimeScale) -> None:
    """Run all ranks of a paced trainer; started by `pace`."""
    from dora.cli.pace import train_paced as command

    command(workload, time_scale=time_scale)


@processes.command(hidden=True)
def follow(folder: Path, tracker: str) -> None:
    """Log a run in a tracker while it goes on; started by the controller."""
    from dora.cli.track import follow as command

    command(folder, tracker)


@processes.command(hidden=True)
def train() -> None:
    """Run one trainer rank; started by torchrun with DORA_CONTROLLER and DORA_TOKEN in the environment."""
    from dora.cli.serve import train as command

    command()


@processes.command(hidden=True)
def send() -> None:
    """Run a sender of weights; started by the controller, which sends orders to its standard input."""
    from dora.cli.serve import send as command

    command()
