"""Defines the commands that are one process of a run: servers and nodes, and hidden ones, which DORA starts itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

processes = typer.Typer(rich_markup_mode=None)

WorkloadPath = Annotated[Path, typer.Argument(metavar="WORKLOAD.toml", help="Workload file.")]
TimeScale = Annotated[float, typer.Option(min=1e-3, help="Seconds of the workload per second of the wall clock.")]
Seed = Annotated[int, typer.Option(help="Seed of the answers, as in `dora simulate`.")]


@processes.command()
def serve(
    model: Annotated[Path, typer.Option(help="Hugging Face model folder or id, or 'seed': the shipped policy.")] = Path(
        "seed"
    ),
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to bind; 0: any free port.")] = 30_000,
    slots: Annotated[int, typer.Option(min=1, help="Number of requests decoded at the same time.")] = 64,
    kv_tokens: Annotated[int, typer.Option(min=16, help="KV capacity in tokens.")] = 65_536,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    threads: Annotated[int, typer.Option(min=1, help="Number of torch threads.")] = 1,
    min_step_ms: Annotated[
        float,
        typer.Option(
            min=0.0, max=10_000.0, help="Least duration of a decoding step in ms; 0: as fast as the device allows."
        ),
    ] = 0.0,
    draft_tokens: Annotated[
        int,
        typer.Option(min=0, max=16, help="Most tokens drafted for an answer in a step; 0: none. Answers are the same."),
    ] = 0,
    weight_version: Annotated[str, typer.Option(help="Label of the initial weights.")] = "default",
    incremental_streaming_output: Annotated[
        bool, typer.Option("--incremental-streaming-output", help="Stream only the new tokens in each chunk.")
    ] = False,
    skip_tokenizer_init: Annotated[
        bool, typer.Option("--skip-tokenizer-init", help="Accept and return token ids only, no text.")
    ] = False,
    max_queued_requests: Annotated[
        int | None, typer.Option(min=0, help="Maximum number of queued requests (default: unlimited).")
    ] = None,
    seed: Annotated[int, typer.Option(min=-(2**31), max=2**31 - 1, help="Seed for requests without one.")] = 0,
    dialect: Annotated[str, typer.Option(help="SGLang release to imitate, 0.5.18 to 0.5.23; for tests.")] = "0.5.20",
    max_lora_rank: Annotated[
        int, typer.Option(min=0, max=1024, help="Largest rank of an adapter; 0: no adapters. Needs dialect 0.5.23.")
    ] = 0,
    lora_target_modules: Annotated[
        str, typer.Option(metavar="NAME,...", help="Modules that adapters may change.")
    ] = "",
    max_loras_per_batch: Annotated[int, typer.Option(min=1, max=256, help="Number of adapters loaded at a time.")] = 8,
    routed_experts: Annotated[
        bool,
        typer.Option("--routed-experts", help="Return the choice of experts if asked for it. Needs dialect 0.5.23."),
    ] = False,
) -> None:
    """Run the embedded engine, which speaks SGLang's protocol."""
    from dora.cli.serve import serve as command

    command(
        model,
        host=host,
        port=port,
        slots=slots,
        kv_tokens=kv_tokens,
        device=device,
        dtype=dtype,
        threads=threads,
        min_step_ms=min_step_ms,
        draft_tokens=draft_tokens,
        weight_version=weight_version,
        incremental_streaming_output=incremental_streaming_output,
        skip_tokenizer_init=skip_tokenizer_init,
        max_queued_requests=max_queued_requests,
        seed=seed,
        dialect=dialect,
        max_lora_rank=max_lora_rank,
        lora_target_modules=tuple(filter(None, lora_target_modules.split(","))),
        max_loras_per_batch=max_loras_per_batch,
        routed_experts=routed_experts,
    )


@processes.command()
def node(
    controller: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT,...", help="Where the controller listens for nodes (default: DORA_CONTROLLER)."
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the run's token (default: DORA_TOKEN or DORA_TOKEN_FILE)."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of this node, the same after a restart (default: the host name).")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="Address of this node for others (default: that of the interface to the controller)."),
    ] = None,
    folder: Annotated[
        Path,
        typer.Option(metavar="DIR", help="This node's own folder for logs, and for versions without room in memory."),
    ] = Path("node"),
) -> None:
    """Join a run as a node, which gets servers or ranks.

    It ends when the run is over.
    SIGTERM has a node without ranks leave the run, once its answers have moved or ended.
    """
    from dora.cli.node import node as command

    command(controller, token_file=token_file, name=name, address=address, folder=folder)


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
