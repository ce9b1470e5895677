"""Defines the commands before a first run: a new configuration, the schema, and completion in a shell."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dora.cli.job_options import Answer, Data, Model, Prompt, Reward
from dora.cli.output import hand_out
from dora.errors import ConfigError

start = typer.Typer(rich_markup_mode=None)


@start.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")] = Path("job.toml"),
    model: Model = None,
    data: Data = None,
    prompt: Prompt = None,
    answer: Answer = None,
    reward: Reward = None,
    preset: Annotated[
        str | None,
        typer.Option(help="What the job runs on: laptop, 1-gpu, 8-gpu or many (default: by the GPUs of this machine)."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing: guess what is not given.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a configuration for a job of your own, from five questions or from options."""
    from dora.cli.init import init as command

    command(
        file, model=model, data=data, prompt=prompt, answer=answer, reward=reward, preset=preset, yes=yes, force=force
    )


@start.command()
def config(
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of a configuration file, for editors.")
    ] = False,
) -> None:
    """Describe the configuration to a program."""
    if not schema:
        raise ConfigError("dora config: give --schema; docs/CONFIG.md describes every setting")
    import json

    from dora.config.json_schema import json_schema

    hand_out(json.dumps(json_schema(), indent=2) + "\n")


@start.command(name="completion")
def shell_script(
    shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
) -> None:
    """Print a script that completes commands, options, settings and their values in a shell.

    The first lines of the script say where to save it.
    """
    from dora.completion.complete import SHELLS, script

    if shell not in SHELLS:
        raise ConfigError(f"dora completion {shell}: expected {', '.join(SHELLS)}")
    hand_out(script(shell))
