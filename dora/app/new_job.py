"""A configuration for a new job: what its data look like, what it can run on, and the file that `dora init` writes.

Invariant: the file loads, its model and prompts open as in a run, and above each of its keys is what the key means.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from dora.app.fetch import Show, fetch_rows, fetch_small
from dora.app.inputs import open_inputs
from dora.config.keys import commented
from dora.config.load import load
from dora.config.presets import PRESETS
from dora.config.schema import Config, ModelConfig, SourceConfig, TaskConfig
from dora.config.shorthand import reward_of, source_of
from dora.errors import ConfigError
from dora.model_config import limits_of
from dora.model_files import require_sound
from dora.node.cuda import num_devices
from dora.seed.policy import SHIPPED, model_folder
from dora.tasks.prompts import render
from dora.tasks.sources import Row, Source, open_source
from dora.tasks.tokenizer import Tokenizer, load_tokenizer

_FIELD: Final = "task.sources.0"
#: Number of rows that are looked at.
LOOKED: Final = 1_000
#: Names of columns, best first.
_PROMPTS: Final = ("prompt", "question", "problem", "messages", "instruction", "input", "query", "task", "text")
_ANSWERS: Final = ("answer", "solution", "final_answer", "target", "expected", "output", "label", "response")
#: An answer that math-verify compares better than `exact`.
_MATHEMATICAL: Final = re.compile(r"\s*[-+$]?[\d.,/%\s]*\d[\d.,/%\s]*|.*(####|\\boxed|\\frac|\$).*", re.DOTALL)
_SMALLEST_LIMIT: Final = 256
_LARGEST_LIMIT: Final = 4_096
_ANY_LENGTH: Final = 1 << 30
_REASONING: Final = "Reason step by step and put the final answer in \\boxed{}."


def preset_for(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the preset for this machine, and the number of its GPUs that torch can use."""
    devices = Path("/dev")
    if not [*devices.glob("nvidia[0-9]*"), *devices.glob("kfd"), *devices.glob("dxg")]:
        return "laptop", 0
    count = num_devices(environ)
    return ("8-gpu" if count >= 8 else "1-gpu" if count else "laptop"), count


@dataclass(frozen=True, slots=True)
class NamedModel:
    """The model that was named."""

    name: str
    folder: Path
    tokenizer: Tokenizer

    @classmethod
    def open(cls, name: str) -> NamedModel:
        fetch_small(Config(model=ModelConfig(path=name)))
        folder = model_folder(name)
        require_sound(folder)
        return cls(name, folder, load_tokenizer(folder))


@dataclass(frozen=True, slots=True)
class NamedData:
    """The rows that were named, as far as they were looked at."""

    given: Mapping[str, str]  # settings of the source
    source: Source
    rows: Sequence[Row]

    @classmethod
    def open(cls, name: str, *, tell: Show = lambda line: None) -> NamedData:
        given = source_of(name)
        config = SourceConfig.model_validate(given)
        fetch_rows(config, field=_FIELD, tell=tell)
        source = open_source(config, field=_FIELD, seed=0, split="train")
        rows = []
        for index in range(min(source.num_rows or LOOKED, LOOKED)):
            with suppress(ConfigError):  # a run leaves a few out
                rows.append(source.row(index))
        return cls(given, source, rows or [source.row(0)])

    @property
    def columns(self) -> list[str]:
        """The columns of any row, in order of first mention."""
        return [*dict.fromkeys(str(name) for row in self.rows for name in row)]

    def require(self, column: str, *, option: str) -> str:
        """Return the column; ConfigError if no row has it."""
        if column and column not in self.columns:
            raise ConfigError(f"{option}: {self.source.name} has no column '{column}'; it has {self._named()}")
        return column

    def prompt_column(self) -> str:
        """Guess the column of the prompt: by its name, or the only one that has text in all but a few rows."""
        others = {name: sum(not isinstance(row.get(name), str | list) for row in self.rows) for name in self.columns}
        texts = [name for name, count in others.items() if 100 * count <= len(self.rows)]
        found = _named(_PROMPTS, texts) or (texts[0] if len(texts) == 1 else None)
        if found is None:
            raise ConfigError(f"--prompt: none of the columns looks like a prompt; name one of {self._named()}")
        return found

    def answer_column(self, *, prompt: str) -> str:
        """Guess the column of the right answer by its name; "" if there is none."""
        return _named(_ANSWERS, [name for name in self.columns if name != prompt]) or ""

    def reward(self, *, answer: str) -> str:
        """Guess what scores answers; "" if there are none to compare with."""
        texts = [str(row.get(answer)) for row in self.rows]
        mathematical = sum(_MATHEMATICAL.fullmatch(text) is not None for text in texts)
        return "" if not answer else "math" if mathematical > 0.8 * len(texts) else "exact"

    def _named(self) -> str:
        return ", ".join(self.columns)


def _named(names: Sequence[str], columns: Sequence[str]) -> str | None:
    return next((column for name in names for column in columns if column.lower() == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """The answers to all questions."""

    model: NamedModel
    data: NamedData
    prompt: str
    answer: str
    reward: str
    preset: str

    def text(self) -> str:
        """Return the configuration; ConfigError if a run could not open its model and its prompts."""
        text = f"{self._head()}\n{commented(self._values())}"
        with TemporaryDirectory() as folder:
            file = Path(folder) / "job.toml"
            file.write_text(text, encoding="utf-8")
            open_inputs(load(file, environ={}))
        return text

    def _head(self) -> str:
        hardware = PRESETS[self.preset].hardware
        lines = (f"A job for {hardware}.", "docs/CONFIG.md has all settings; those that are not here have defaults.")
        return "".join(f"# {line}\n" for line in lines)

    def _values(self) -> dict[str, Any]:
        chats = self.model.tokenizer.has_chat_template
        longest = self._longest_prompt(chats=chats)
        values = {"model.path": self.model.name, **PRESETS[self.preset].values}
        values["rollout.max_new_tokens"] = self._budget(values["rollout.max_new_tokens"], longest)
        if self.model.name not in SHIPPED:  # whose learning rate is the default
            values["trainer.learning_rate"] = 1e-6
        values |= {"task.chat_template": chats, "task.max_prompt_tokens": longest}
        if chats and self.reward == "math":
            values["task.system_prompt"] = _REASONING
        source = {**self.data.given, "prompt": self.prompt, "answer": self.answer}
        values |= {f"task.sources.0.{key}": value for key, value in source.items()}
        values |= {f"task.rewards.0.{key}": value for key, value in reward_of(self.reward).items()}
        return {**_by_section(values), "eval.sets": []}

    def _longest_prompt(self, *, chats: bool) -> int:
        """Return a limit for prompts: a power of two that those seen are within, unless they need too much memory or
        half the positions of the model."""
        task = TaskConfig(chat_template=chats, system_prompt=_REASONING if chats else "", max_prompt_tokens=_ANY_LENGTH)
        source = replace(self.data.source, prompt=self.prompt, answer=self.answer)
        longest = max(
            len(render(source, row, position=row, task=task, tokenizer=self.model.tokenizer).tokens)
            for row in range(len(self.data.rows))
        )
        limit = min(max(_SMALLEST_LIMIT, 1 << (longest - 1).bit_length()), _LARGEST_LIMIT)
        positions = limits_of(self.model.folder).positions
        return limit if positions is None else min(limit, max(1, positions // 2))

    def _budget(self, preferred: int, longest: int) -> int:
        """Return the token budget for which the model has positions."""
        positions = limits_of(self.model.folder).positions
        return preferred if positions is None else max(1, min(preferred, positions - longest))


def _by_section(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with all keys of a section together, the table of a section before the lists in it."""
    sections = dict.fromkeys(key.rpartition(".")[0] for key in values)
    return {key: value for section in sections for key, value in values.items() if key.rpartition(".")[0] == section}


def first_rows(data: NamedData, count: int = 3) -> list[Row]:
    """Return the rows that a user is shown."""
    return [*islice(data.rows, count)]
