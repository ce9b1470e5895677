"""The command line: one function per command, help texts, exit codes. No logic: each command lives in its own file.

Exit codes: 0 done, 1 it failed, 2 the input cannot work, 3 the audit (of `dora audit`, or at the end of `dora run`)
found C1, C2 or C3 broken otherwise than by the strategy's design, 130 interrupted. Every error a user can meet is one
line per problem; a traceback is a bug of ours.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dora.errors import ConfigError, DoraError

app = typer.Typer(
    name="dora",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        sys.stdout.write(f"dora {version('dora-rl')}\n")
        raise typer.Exit


@app.callback()
def dora(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train a language model by reinforcement learning while it generates: several policy versions alive at once."""


Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one setting, e.g. --set rollout.max_staleness=1."),
]
ConfigPath = Annotated[Path | None, typer.Argument(metavar="CONFIG.toml", help="Settings; none: the embedded default.")]


@app.command()
def run(
    config: ConfigPath = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Go on with the run in this folder, under its own settings.")
    ] = None,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes", help="With --resume: go on although settings that alter the experiment differ."
        ),
    ] = False,
    rollout_only: Annotated[
        bool,
        typer.Option(
            "--rollout-only", help="Generate and grade the answers of all steps with version 0, train nothing."
        ),
    ] = False,
    train_only: Annotated[
        Path | None,
        typer.Option(metavar="ROLLOUT", help="Train on answers that --rollout-only wrote; start no server."),
    ] = None,
) -> None:
    """Train a policy. Without a config: the small arithmetic job on this machine's CPU."""
    from dora.cli.run import run as command

    command(
        config,
        overrides or [],
        resume=resume,
        accept_changes=accept_changes,
        rollout_only=rollout_only,
        train_only=train_only,
    )


@app.command()
def check(
    config: ConfigPath = None,
    overrides: Overrides = None,
    push: Annotated[
        bool,
        typer.Option(
            "--push",
            help="Also have each server load the model from the version store, once. Not while others use the servers.",
        ),
    ] = False,
) -> None:
    """Validate everything, reach every server, print the plan. Changes nothing."""
    from dora.cli.check import check as command

    command(config, overrides or [], push=push)


@app.command()
def status(
    url: Annotated[str, typer.Argument(help="Address of a run's status endpoint.")] = "http://127.0.0.1:8421",
) -> None:
    """Show how a run is doing."""
    from dora.cli.status import status as command

    command(url)


#: Options may stand anywhere on the line, not only before the address.
instances = typer.Typer(no_args_is_help=True, rich_markup_mode=None, context_settings={"allow_interspersed_args": True})
app.add_typer(instances, name="instances")

Instance = Annotated[str, typer.Argument(metavar="ID|URL", help="An instance's number or address.")]


@instances.callback()
def at(
    context: typer.Context,
    url: Annotated[str, typer.Argument(metavar="STATUS_URL", help="Address of a run's status endpoint.")],
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Holds the run's token; without it, DORA_STATUS_TOKEN does.")
    ] = None,
) -> None:
    """The servers of a running job: list, add, drain, remove."""
    context.obj = (url, token_file)


@instances.command(name="list")
def show_instances(context: typer.Context) -> None:
    """Every instance: what it holds and does, and what was asked of it."""
    from dora.cli.instances import show

    show(context.obj[0])


@instances.command()
def add(context: typer.Context, instance: Instance) -> None:
    """Have a server take part.

    A new one by its address, a drained one by its number or address.
    """
    _request(context, "add", instance)


@instances.command()
def drain(context: typer.Context, instance: Instance) -> None:
    """Give it no more work.

    What runs there moves to peers that have room, or ends there.
    """
    _request(context, "drain", instance)


@instances.command()
def remove(context: typer.Context, instance: Instance) -> None:
    """Drain it, then let it leave the run.

    It is ended if the run started it, and left running if not.
    """
    _request(context, "remove", instance)


def _request(context: typer.Context, verb: str, instance: str) -> None:
    from dora.cli.instances import request

    url, token_file = context.obj
    request(url, verb, instance, token_file=token_file)


@app.command()
def audit(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder.")],
    deep: Annotated[
        bool,
        typer.Option(
            "--deep", help="Also recompute log-probs of kept trajectories under their version and the next one."
        ),
    ] = False,
) -> None:
    """Prove from the journal that C1, C2 and C3 held."""
    from dora.cli.audit import audit as command

    command(folder, deep=deep)


@app.command()
def simulate(
    workload: Annotated[
        Path | None, typer.Argument(metavar="WORKLOAD.toml|CONFIG.toml", help="None: a built-in example.")
    ] = None,
    recorded: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="A finished run: its own lengths, latencies and rates.")
    ] = None,
    strategy: Annotated[str, typer.Option(help="One or more of rollout.strategy, with commas.")] = "",
    k: Annotated[str, typer.Option(help="max_staleness of dora, one or more.")] = "",
    split: Annotated[str, typer.Option(help="Devices that roll out, one or more; 'best' searches them.")] = "",
    instances: Annotated[str, typer.Option(help="Fleet sizes, one or more; the trainer keeps its devices.")] = "",
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the workload, e.g. fleet.push_fixed_s=10."),
    ] = None,
    rules: Annotated[str, typer.Option(help="The orchestrator's, dora or paper, or both.")] = "",
    ablate: Annotated[bool, typer.Option("--ablate", help="Also without each of the orchestrator's rules.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0, 1, ...")] = 1,
    steps: Annotated[int | None, typer.Option(min=2, help="Length of the job.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write every result there.")] = None,
    pictures: Annotated[Path | None, typer.Option(metavar="DIR", help="Draw them there, as SVG.")] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="At most 2 without it.")] = None,
) -> None:
    """Simulate a job in virtual time; lists sweep.

    Under the controller's own decision core.
    """
    from dora.cli.simulate import simulate as command

    command(
        workload,
        recorded=recorded,
        overrides=overrides or [],
        strategies=[name for name in strategy.split(",") if name],
        staleness=_numbers(k, "--k"),
        splits=_numbers(split.removeprefix("best"), "--split"),
        best_split=split == "best",
        instances=_numbers(instances, "--instances"),
        rules=[name for name in rules.split(",") if name],
        ablate=ablate,
        seeds=seeds,
        steps=steps,
        json=json,
        pictures=pictures,
        processes=processes,
    )


def _numbers(text: str, option: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",") if word]
    except ValueError:
        raise ConfigError(f"{option} {text}: is not a list of whole numbers with commas") from None


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder.")],
    version: Annotated[int | None, typer.Option(help="Policy version; without it, the newest.")] = None,
    to: Annotated[Path | None, typer.Option(metavar="OUT", help="Where to; without it, DIR/export-v<version>.")] = None,
) -> None:
    """Copy a policy version out, as a Hugging Face model folder."""
    from dora.cli.export import export as command

    command(folder, version=version, to=to)


@app.command()
def serve(
    model: Annotated[Path, typer.Option(help="Hugging Face model folder, or 'seed'.")] = Path("seed"),
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 30_000,
    slots: Annotated[int, typer.Option(min=1, help="Requests decoded at the same time.")] = 64,
    kv_tokens: Annotated[int, typer.Option(min=16, help="Tokens of KV room.")] = 65_536,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    threads: Annotated[int, typer.Option(min=1, help="Torch threads.")] = 1,
    weight_version: Annotated[str, typer.Option(help="Label of the weights it starts with.")] = "default",
    incremental_streaming_output: Annotated[
        bool, typer.Option("--incremental-streaming-output", help="Stream new tokens only.")
    ] = False,
    skip_tokenizer_init: Annotated[
        bool, typer.Option("--skip-tokenizer-init", help="Token ids only, no text.")
    ] = False,
    max_queued_requests: Annotated[int | None, typer.Option(min=0, help="Maximum number of queued requests.")] = None,
    seed: Annotated[int, typer.Option(help="Of requests that bring none.")] = 0,
    dialect: Annotated[str, typer.Option(help="SGLang release to behave as, 0.5.18 to 0.5.23; for tests.")] = "0.5.20",
) -> None:
    """Serve a small model as SGLang does: the embedded engine."""
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
        weight_version=weight_version,
        incremental_streaming_output=incremental_streaming_output,
        skip_tokenizer_init=skip_tokenizer_init,
        max_queued_requests=max_queued_requests,
        seed=seed,
        dialect=dialect,
    )


WorkloadPath = Annotated[Path, typer.Argument(metavar="WORKLOAD.toml", help="What is to be answered and trained.")]
TimeScale = Annotated[float, typer.Option(min=1e-3, help="Seconds of the workload in one second of the wall clock.")]
Seed = Annotated[int, typer.Option(help="Of the answers, as in `dora simulate`.")]


@app.command()
def pace(
    workload: WorkloadPath,
    time_scale: TimeScale = 10.0,
    processes: Annotated[int, typer.Option(min=1, help="The servers share so many.")] = 4,
    seed: Seed = 0,
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Where run folders are created.")] = Path("runs"),
) -> None:
    """Run a workload live, on servers that only take their time.

    Controller, HTTP and ZeroMQ are the real ones; servers and trainer take the time that the workload's model says.
    """
    from dora.cli.pace import pace as command

    command(workload, seed=seed, time_scale=time_scale, processes=processes, folder=folder)


@app.command(hidden=True)
def pace_servers(
    workload: WorkloadPath,
    model: Annotated[Path, typer.Option()],
    first: Annotated[int, typer.Option()],
    count: Annotated[int, typer.Option()],
    time_scale: TimeScale,
    seed: Seed,
) -> None:
    """A process of paced servers, started by `pace`."""
    from dora.cli.pace import serve_paced as command

    command(workload, model=model, first=first, count=count, seed=seed, time_scale=time_scale)


@app.command(hidden=True)
def pace_ranks(workload: WorkloadPath, time_scale: TimeScale) -> None:
    """All ranks of a paced trainer, started by `pace`."""
    from dora.cli.pace import train_paced as command

    command(workload, time_scale=time_scale)


@app.command(hidden=True)
def train() -> None:
    """One trainer rank, started by torchrun; finds its run by DORA_CONTROLLER and DORA_TOKEN."""
    from dora.cli.serve import train as command

    command()


@app.command(hidden=True)
def send() -> None:
    """A sender of weights, started by the controller; takes its orders from standard input."""
    from dora.cli.serve import send as command

    command()


def main() -> None:
    """Entry point: errors become one line and an exit code."""
    try:
        app()
    except ConfigError as err:
        _end(err, code=2)
    except DoraError as err:
        _end(err, code=1)


def _end(err: DoraError, *, code: int) -> None:
    for line in str(err).splitlines():
        sys.stderr.write(f"dora: {line}\n")
    raise SystemExit(code)
