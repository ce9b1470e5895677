"""Options of several commands that stand for settings of a job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a setting, e.g. --set rollout.max_staleness=1. May be repeated."
    ),
]
ConfigPath = Annotated[
    Path | None, typer.Argument(metavar="CONFIG.toml", help="Configuration file (default: the CPU example).")
]
TrustFolder = Annotated[
    bool,
    typer.Option(
        "--trust-folder",
        help="Execute what the run folder names, even if you have not signed its configuration.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER|ID", help="The model: a folder, or an id of the hub. The same as --set model.path=..."
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|ID",
        help="The prompts: a .jsonl or .parquet file, FILE.py:function, or an id of the hub. The same as "
        "--set 'task.sources=[{kind=..., path=...}]' and, without a configuration file, --set 'eval.sets=[]'.",
    ),
]
Prompt = Annotated[
    str | None,
    typer.Option(metavar="COLUMN", help="Column of the prompt. The same as --set task.sources.0.prompt=..."),
]
Answer = Annotated[
    str | None,
    typer.Option(metavar="COLUMN", help="Column of the right answer. The same as --set task.sources.0.answer=..."),
]
Reward = Annotated[
    str | None,
    typer.Option(
        metavar="REWARD",
        help="What scores answers: math, exact, FILE.py:function or a URL. The same as "
        "--set 'task.rewards=[{kind=...}]'.",
    ),
]


def with_shorthand(
    config: Path | None,
    overrides: Sequence[str] | None,
    *,
    model: str | None,
    data: str | None,
    prompt: str | None,
    answer: str | None,
    reward: str | None,
) -> list[str]:
    """Return the `--set`s of a command line: those that options stand for come first, and so may be overridden."""
    if any(option is not None for option in (model, data, prompt, answer, reward)):
        from dora.config.shorthand import Shorthand

        given = Shorthand(model=model, data=data, prompt=prompt, answer=answer, reward=reward)
        return [*given.settings(config), *(overrides or ())]
    return [*(overrides or ())]
