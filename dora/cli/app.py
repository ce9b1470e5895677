"""Defines the command line: commands, options, help texts and exit codes. Each command is implemented in its own file;
the options of `dora environments`, of `dora instances`, of commands that run one process of a run, of those before the
first run, and of those that need a workload are in environment_commands.py, instance_commands.py, processes.py,
start_commands.py and workload_commands.py.

Exit codes: 0 success, 1 failure, 2 invalid input, 3 the audit (in `dora audit`, or at the end of `dora run`) found a
violation of C1, C2 or C3 that is not by design of the strategy, 130 interrupted. Errors are printed as one line per
problem; a traceback is a bug.
"""

from __future__ import annotations

import errno
import io
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from dora.cli.environment_commands import environments
from dora.cli.folder_commands import folders
from dora.cli.instance_commands import instances
from dora.cli.job_options import Answer, ConfigPath, Data, Model, Overrides, Prompt, Reward, TrustFolder, with_shorthand
from dora.cli.output import say, say_preparing, tell, tolerate_lost_output
from dora.cli.processes import processes
from dora.cli.start_commands import start
from dora.cli.usage import UsageError, describe, is_request_for_help
from dora.cli.workload_commands import workloads
from dora.errors import ConfigError, DoraError, InvariantViolation

#: Errors of the operating system that a program cannot prevent, but a user may be able to fix.
_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE}
#: Distributions on the index that install a package `dora`.
_NAMESAKES = ("dora-rs", "dora-search")

app = typer.Typer(
    name="dora",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        say(f"dora {version('dora-rl')}")
        raise typer.Exit


@app.callback()
def dora(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Reinforcement learning of language models, with several policy versions served at once."""
    from dora.log import show_warnings

    show_warnings()
    _warn_of_namesakes()


def _warn_of_namesakes() -> None:
    """Warn about a distribution of others that installs a folder `dora` too: the last one installed has replaced
    files."""
    from importlib.metadata import PackageNotFoundError, distribution

    for name in _NAMESAKES:
        with suppress(PackageNotFoundError):
            distribution(name)
            tell(f"{name} is installed here too, in the same folder `dora`; install dora-rl in its own environment")


Into = Annotated[
    Path | None, typer.Option(hidden=True, metavar="DIR", help="Use the run folder that dora.run has reserved.")
]


@app.command()
def run(
    config: ConfigPath = None,
    model: Model = None,
    data: Data = None,
    prompt: Prompt = None,
    answer: Answer = None,
    reward: Reward = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Continue the run in this folder, with its own configuration.")
    ] = None,
    or_continue: Annotated[
        bool,
        typer.Option(
            "--continue",
            help="Continue the newest run of this run.name in run.folder, as --resume does, or start it if there is "
            "none. One that has reached its end is left alone. For schedulers, which repeat a command after a failure.",
        ),
    ] = False,
    accept_changes: Annotated[
        bool,
        typer.Option("--accept-changes", help="With --resume: allow changes of settings that alter the experiment."),
    ] = False,
    trust_folder: TrustFolder = False,
    rollout_only: Annotated[
        bool,
        typer.Option(
            "--rollout-only", help="Generate and grade the answers of all steps with version 0, without training."
        ),
    ] = False,
    train_only: Annotated[
        Path | None,
        typer.Option(metavar="ROLLOUT", help="Train on the answers written by --rollout-only, without servers."),
    ] = None,
    into: Into = None,
) -> None:
    """Train a policy. Without a configuration file: the small arithmetic example, on this machine's CPU."""
    tolerate_lost_output()
    say_preparing()
    from dora.cli.run import run as command

    if resume is not None and any((data, prompt, answer, reward)):
        raise ConfigError("--resume: a run keeps its own data and reward; omit --data, --prompt, --answer and --reward")
    command(
        config,
        with_shorthand(config, overrides, model=model, data=data, prompt=prompt, answer=answer, reward=reward),
        resume=resume,
        or_continue=or_continue,
        accept_changes=accept_changes,
        trust_folder=trust_folder,
        rollout_only=rollout_only,
        train_only=train_only,
        into=into,
    )


@app.command(name="eval")
def evaluate(
    config: ConfigPath = None,
    overrides: Overrides = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL|RUN[@VERSION]",
            help="Model to score, as in model.path, or a run folder: its newest version, or version RUN@VERSION. "
            "Without CONFIG.toml, a run is scored as its own configuration says.",
        ),
    ] = None,
    urls: Annotated[
        list[str] | None,
        typer.Option("--url", metavar="URL", help="Server to use, into which the model is loaded. May be repeated."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Answers per prompt. With more than one, greedy sets get rollout.temperature."),
    ] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Largest number of prompts per set.")] = None,
    data: Data = None,
    prompt: Prompt = None,
    answer: Answer = None,
    reward: Reward = None,
    of_task: Annotated[
        bool,
        typer.Option(
            "--task", help="Score prompts of task.sources, also if there are held-out sets. Implied by --data."
        ),
    ] = False,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Continue this evaluation, or show its results if it has ended.")
    ] = None,
    trust_folder: TrustFolder = False,
    into: Into = None,
) -> None:
    """Score a model on the held-out sets of a configuration, without training.

    Prints the score of each set, and writes them into results.json of a run folder.
    """
    say_preparing()
    from dora.cli.evaluate import evaluate as command
    from dora.cli.evaluate import resume as continue_evaluation

    settings = with_shorthand(config, overrides, model=None, data=data, prompt=prompt, answer=answer, reward=reward)
    tolerate_lost_output()
    if resume is None:
        command(
            config,
            settings,
            model=model,
            urls=urls or [],
            samples=samples,
            prompts=prompts,
            of_task=of_task or data is not None,
            trust_folder=trust_folder,
            into=into,
        )
    elif of_task or any((config, model, urls, samples, prompts, data, prompt, answer, reward)):
        raise ConfigError("--resume: an evaluation keeps its own configuration; omit CONFIG.toml and other options")
    else:
        continue_evaluation(resume, settings, trust_folder=trust_folder)


@app.command()
def check(
    config: ConfigPath = None,
    model: Model = None,
    data: Data = None,
    prompt: Prompt = None,
    answer: Answer = None,
    reward: Reward = None,
    overrides: Overrides = None,
    push: Annotated[
        bool,
        typer.Option(
            "--push",
            help="Also push the model to each server once. This interrupts other users of the servers.",
        ),
    ] = False,
    measure: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also start all servers and measure their decoding, prefill and pushes, for some minutes, and write "
            "them into this new workload file. The servers must be idle.",
        ),
    ] = None,
    recorded: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="DIR", help="With --measure: lengths, trainer and graders are those of this finished run."
        ),
    ] = None,
    sample: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="With --measure: also sample a group of answers to each of N prompts, for their lengths.",
        ),
    ] = 0,
    drift: Annotated[
        bool,
        typer.Option(
            "--drift",
            help="Instead, run some steps at learning rate 0, and compare the log-probs of engine and trainer in each.",
        ),
    ] = False,
    nodes: Annotated[
        bool,
        typer.Option(
            "--nodes", help="Instead, wait for the nodes, and report what they have and how fast versions reach them."
        ),
    ] = False,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERxMEMORY",
            help="Instead, plan for GPUs that are not here, such as 8x80GB: memory, split and step time.",
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the findings to this file.")] = None,
) -> None:
    """Validate a configuration, contact its servers, print the plan.

    Nothing is changed.
    """
    from dora.cli.check import check as command
    from dora.cli.check import check_drift, check_nodes, check_plan

    if sum((push, drift, nodes, gpus is not None)) > 1:
        raise ConfigError("--push, --drift, --nodes and --gpus exclude each other; choose one")
    instead = nodes or drift or gpus is not None
    if json is not None and instead:
        raise ConfigError("--json: is not valid with --drift, --nodes and --gpus")
    if (measure is not None or recorded is not None or sample) and instead:
        raise ConfigError("--measure, --from and --sample: are not valid with --drift, --nodes and --gpus")
    settings = with_shorthand(config, overrides, model=model, data=data, prompt=prompt, answer=answer, reward=reward)
    if nodes:
        check_nodes(config, settings)
    elif gpus is not None:
        check_plan(config, settings, gpus=gpus)
    elif drift:
        check_drift(config, settings)
    else:
        command(config, settings, push=push, measure=measure, recorded=recorded, sample=sample, json=json)


app.add_typer(environments, name="environments")
app.add_typer(folders)  # without a name: as if they were defined here
app.add_typer(instances, name="instances")
app.add_typer(processes)
app.add_typer(start)
app.add_typer(workloads)


def main() -> None:
    """Run the command line; print errors as one line per problem, and their excerpt; exit with their code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # the terminal may lack a character of a name or of a curve
    try:
        code = app(standalone_mode=False, prog_name="dora")
    except UsageError as err:
        if is_request_for_help(err):
            err.show()
            raise SystemExit(2) from None
        _end(ConfigError(describe(err)), code=2)
    except ConfigError as err:
        _end(err, code=2)
    except DoraError as err:
        _end(err, code=1)
    except (OSError, ExceptionGroup) as err:
        if (fault := _fault(err)) is None:
            raise
        _end(fault, code=1)
    if code:  # of `typer.Exit`
        raise SystemExit(code)


def _fault(err: Exception) -> DoraError | None:
    """Return an error that says what the operating system refused; None if the exception may be a bug."""
    if isinstance(err, ExceptionGroup):
        faults = [_fault(one) for one in err.exceptions]
        return None if None in faults else faults[0]
    if isinstance(err, OSError) and err.errno in _FAULTS:
        return DoraError(f"{err.filename}: {err.strerror}" if err.filename else str(err.strerror))
    return None


def _end(err: DoraError, *, code: int) -> None:
    excerpt = err.excerpt if isinstance(err, InvariantViolation) else ()
    tell(*str(err).split("\n"), *(f"    {line}" for line in excerpt))
    raise SystemExit(code)
