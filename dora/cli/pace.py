"""`dora pace`, and the hidden commands of its child processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import uvloop

from dora.app.pace import drive, prepare
from dora.cli.run import end
from dora.cli.serve import watch_own_lease
from dora.cli.terminal import Terminal
from dora.errors import ConfigError
from dora.node.plan import SERVE_KEY
from dora.sim.workload import load


def pace(
    path: Path, *, seed: int, time_scale: float, processes: int, folder: Path, trackers: Sequence[str] = ()
) -> None:
    if load(path).serves_adapters:
        raise ConfigError(f"{path}: adapters.use: paced servers hold one version each; set it to merged")
    paced = prepare(
        path, seed=seed, time_scale=time_scale, processes=processes, folder=folder, trackers=tuple(trackers)
    )
    end(uvloop.run(drive(paced, Terminal())))


def serve_paced(path: Path, *, model: Path, first: int, count: int, seed: int, time_scale: float) -> None:
    """Serve instances `first` to `first + count - 1`."""
    watch_own_lease()
    from dora.paced.servers import run_servers

    run_servers(
        path,
        model=model,
        first=first,
        count=count,
        seed=seed,
        time_scale=time_scale,
        api_key=os.environ.get(SERVE_KEY),
    )


def call_paced(path: Path, *, seed: int, time_scale: float) -> None:
    """Serve the environment of a paced run to the controller, over stdin and stdout."""
    from dora.paced.environment import run_environment

    run_environment(load(path), seed=seed, time_scale=time_scale)


def train_paced(path: Path, *, time_scale: float) -> None:
    """Run all ranks of the paced trainer."""
    watch_own_lease()
    from dora.paced.ranks import run_ranks

    run_ranks(load(path), address=os.environ["DORA_CONTROLLER"], token=os.environ["DORA_TOKEN"], time_scale=time_scale)
