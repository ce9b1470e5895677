"""Defines the commands that work in virtual or scaled time: they need a workload, not a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dora.cli.output import say_preparing
from dora.cli.processes import Seed, TimeScale, WorkloadPath
from dora.errors import ConfigError

workloads = typer.Typer(rich_markup_mode=None)

WorkloadOrConfig = Annotated[
    Path | None,
    typer.Argument(
        metavar="WORKLOAD.toml|CONFIG.toml", help="Workload or configuration file (default: a built-in example)."
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a key of the file, e.g. fleet.push_fixed_s=10. May be repeated."
    ),
]
Processes = Annotated[int | None, typer.Option(min=1, help="Worker processes (default: up to 2).")]


@workloads.command()
def simulate(
    workload: WorkloadOrConfig = None,
    recorded: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="Simulate a finished run, with its own lengths and rates."),
    ] = None,
    strategy: Annotated[str, typer.Option(help="Values of rollout.strategy, separated by commas.")] = "",
    k: Annotated[str, typer.Option(help="Values of max_staleness, separated by commas.")] = "",
    split: Annotated[
        str, typer.Option(help="Numbers of devices for rollout, separated by commas; `dora plan` searches the best.")
    ] = "",
    instances: Annotated[
        str, typer.Option(help="Numbers of instances, separated by commas; the trainer keeps its devices.")
    ] = "",
    overrides: Changes = None,
    rules: Annotated[str, typer.Option(help="Placement rules, separated by commas: dora, paper, psrl, areal.")] = "",
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Also simulate with each placement rule turned off.")
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds: 0, 1, ...")] = 1,
    steps: Annotated[int | None, typer.Option(min=2, help="Number of training steps.")] = None,
    wide: Annotated[bool, typer.Option("--wide", help="Print all columns of the table.")] = False,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all results to this file.")] = None,
    pictures: Annotated[Path | None, typer.Option(metavar="DIR", help="Write SVG pictures to this folder.")] = None,
    processes: Processes = None,
    learn: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG.toml",
            help="Also train a policy in virtual time, with the task, model and objective of this configuration.",
        ),
    ] = None,
    checkpoints: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With --learn: save progress in this folder, and resume from it."),
    ] = None,
) -> None:
    """Simulate a job in virtual time with the real decision core.

    Every combination of the listed values is simulated.
    """
    from dora.cli.simulate import simulate as command

    command(
        workload,
        recorded=recorded,
        overrides=overrides or [],
        strategies=[name for name in strategy.split(",") if name],
        staleness=_numbers(k, "--k"),
        splits=_numbers(split, "--split"),
        instances=_numbers(instances, "--instances"),
        rules=[name for name in rules.split(",") if name],
        ablate=ablate,
        seeds=seeds,
        steps=steps,
        wide=wide,
        json=json,
        pictures=pictures,
        processes=processes,
        learn=learn,
        checkpoints=checkpoints,
    )


@workloads.command()
def plan(
    workload: WorkloadOrConfig = None,
    recorded: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="DIR", help="Plan for the configuration of a finished run, with its lengths and rates."
        ),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(metavar="NUMBERxMEMORY", help="GPUs of a configuration, such as 8x80GB; they need not be here."),
    ] = None,
    overrides: Changes = None,
    strategy: Annotated[str | None, typer.Option(help="Another rollout.strategy than the file's.")] = None,
    k: Annotated[str, typer.Option(help="Values of K, separated by commas (default: 0 to max_staleness).")] = "",
    widths: Annotated[str, typer.Option(help="GPUs of a server, separated by commas (default: fleet.widths).")] = "",
    seed: Seed = 0,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the file with the best plan to FILE.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the FILE of --write.")] = False,
    processes: Processes = None,
) -> None:
    """Search the best use of given GPUs, by simulation.

    Searched are K, the GPUs of a server, the split between servers and trainer, slots and micro-batches and, if an
    adapter is trained, whether servers hold adapters side by side or get merged weights. The three best plans are
    printed, with the settings that they change.
    """
    from dora.cli.plan import plan as command

    command(
        workload,
        recorded=recorded,
        gpus=gpus,
        overrides=overrides or [],
        strategy=strategy,
        staleness=_numbers(k, "--k"),
        widths=_numbers(widths, "--widths"),
        seed=seed,
        write=write,
        force=force,
        processes=processes,
    )


def _numbers(text: str, option: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",") if word]
    except ValueError:
        raise ConfigError(f"{option} {text}: expected integers separated by commas") from None


@workloads.command()
def pace(
    workload: WorkloadPath,
    time_scale: TimeScale = 10.0,
    processes: Annotated[int, typer.Option(min=1, help="Processes to spread the servers over.")] = 4,
    seed: Seed = 0,
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Folder in which run folders are created.")] = Path(
        "runs"
    ),
    track: Annotated[
        list[str] | None, typer.Option(metavar="TRACKER", help="As in tracking.trackers. May be repeated.")
    ] = None,
) -> None:
    """Run a workload live with simulated servers and trainer.

    The controller, HTTP and ZeroMQ are real; servers and trainer take the time that the workload's model gives.
    """
    say_preparing()
    from dora.cli.pace import pace as command

    command(workload, seed=seed, time_scale=time_scale, processes=processes, folder=folder, trackers=track or [])
