"""`dora init`: asks about a job, looks at its data, and writes its configuration."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from dora.app.new_job import NamedData, NamedModel, NewJob, first_rows, preset_for
from dora.cli.output import require_no_folder, say, write_file
from dora.config.presets import PRESETS
from dora.config.shorthand import REWARDS, reward_of
from dora.errors import ConfigError, one_line

T = TypeVar("T")
#: Characters of a value that a shown row has.
_SHOWN = 70


def init(
    file: Path,
    *,
    model: str | None,
    data: str | None,
    prompt: str | None,
    answer: str | None,
    reward: str | None,
    preset: str | None,
    yes: bool,
    force: bool,
) -> None:
    require_no_folder(file)
    if os.path.lexists(file) and not force:
        raise ConfigError(f"{file}: exists; --force replaces it")
    if preset is not None and preset not in PRESETS:
        raise ConfigError(f"--preset {preset}: expected {', '.join(PRESETS)}")
    asks = not yes and sys.stdin.isatty()
    chosen = _answer("model", "Model: a folder, seed, or an id of the hub", model, None, NamedModel.open, asks=asks)
    what = "Data: a .jsonl or .parquet file, or an id of the hub"
    rows = _answer("data", what, data, None, partial(NamedData.open, tell=say), asks=asks)
    _show(rows)
    prompt = _column("prompt", "Column of the prompt", prompt, rows, rows.prompt_column, asks=asks)
    guessed = rows.answer_column(prompt=prompt)
    answer = _column("answer", "Column of the right answer (- for none)", answer, rows, lambda: guessed, asks=asks)
    what = f"Reward: {', '.join(REWARDS)}, FILE.py:function or a URL"
    reward = _answer("reward", what, reward, rows.reward(answer=answer) or None, _reward, asks=asks)
    job = NewJob(
        model=chosen, data=rows, prompt=prompt, answer=answer, reward=reward, preset=preset or _preset_of_machine()
    )
    _write(file, job.text(), force=force)
    say(f"wrote {file}; next: {_next(file, job.preset)}")


def _answer(
    option: str, question: str, given: str | None, guess: str | None, read: Callable[[str], T], *, asks: bool
) -> T:
    """Return what was given, or else answered, as `read` takes it. At a terminal, a wrong answer is asked for again."""
    if given is not None:
        return read(given)
    if not asks:
        if guess is None:
            raise ConfigError(f"--{option}: is needed where no question can be asked")
        say(f"{option}: {guess} (guessed; --{option} changes it)")
        return read(guess)
    while True:
        try:
            shown = question if guess is None else f"{question} [{guess}]"
            text = input(f"{one_line(shown)}: ").strip() or guess
        except EOFError:
            raise ConfigError(f"--{option}: no answer was given") from None
        if text is None:
            continue
        try:
            return read(text)
        except ConfigError as err:
            say(*str(err).splitlines())


def _column(
    option: str, question: str, given: str | None, rows: NamedData, guess: Callable[[], str], *, asks: bool
) -> str:
    """Return the column given as an option or in answer to the question; without a terminal, the guess."""

    def read(name: str) -> str:
        return rows.require("" if name == "-" else name, option=f"--{option}")

    if given is not None:
        return read(given)
    try:
        found: str | None = guess() or "-"
    except ConfigError:
        if not asks:
            raise
        found = None
    return _answer(option, question, None, found, read, asks=asks)


def _reward(text: str) -> str:
    term = reward_of(text)
    file = term.get("name", "").rpartition(":")[0]
    if file.endswith(".py") and not Path(file).is_file():
        raise ConfigError(f"--reward: {file}: no such file")
    return text


def _preset_of_machine() -> str:
    preset, count = preset_for(os.environ)
    say(f"preset: {preset} ({count or 'no'} GPU{'' if count == 1 else 's'} here; --preset changes it)")
    return preset


def _show(data: NamedData) -> None:
    size = "" if data.source.num_rows is None else f", {data.source.num_rows:,} rows"
    say(f"{data.source.name}: columns {', '.join(data.columns)}{size}")
    for index, row in enumerate(first_rows(data)):
        say(f"  row {index}")
        say(*(f"    {name}: {_cut(one_line(value))}" for name, value in row.items()))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _write(file: Path, text: str, *, force: bool) -> None:
    if force:
        write_file(file, lambda new: new.write(text.encode()))
        return
    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(text)
    except FileExistsError:
        raise ConfigError(f"{file}: exists; --force replaces it") from None
    except OSError as err:
        raise ConfigError(f"{file}: cannot be written ({err.strerror})") from err


def _next(file: Path, preset: str) -> str:
    gpus = PRESETS[preset].gpus
    plan = f"dora check {file} --gpus {gpus} (a plan, anywhere), " if gpus else ""
    return f"{plan}dora check {file}, then dora run {file}"
