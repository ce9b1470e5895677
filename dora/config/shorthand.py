"""Options of `dora run`, `check` and `eval` for a job without a file: model, data, columns and reward.

Invariant: each is nothing but the `--set`s that `settings` returns, so that it composes with a file and with other
`--set`s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from dora.config.load import as_toml, read_toml
from dora.errors import ConfigError

_FILE_KINDS: Final = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
_OTHER_FILES: Final = {".csv", ".tsv", ".txt", ".xlsx", ".gz", ".zst", ".zip", ".arrow", ".py"}
_FUNCTION: Final = re.compile(r".+:[^\W\d]\w*")
_URL: Final = re.compile(r"https?://")
#: Rewards that need no other key.
REWARDS: Final = ("math", "exact")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shorthand:
    """The options that were given; None if one was not."""

    model: str | None = None
    data: str | None = None
    prompt: str | None = None
    answer: str | None = None
    reward: str | None = None

    def settings(self, config: Path | None) -> list[str]:
        """Return the options as `--set`s. ConfigError if the file has several sources or rewards, of which an option
        could mean any."""
        given = (self.data, self.prompt, self.answer, self.reward)
        task = read_toml(config).get("task") if config is not None and any(one is not None for one in given) else None
        return [*self._settings(task if isinstance(task, dict) else {}, has_config=config is not None)]

    def _settings(self, task: dict[str, Any], *, has_config: bool) -> Iterator[str]:
        if self.model is not None:
            yield f"model.path={as_toml(self.model)}"
            if has_config:
                yield 'model.revision=""'  # the file's is that of another model
        if self.data is not None:
            _require_one(task, "sources", option="--data")
            yield f"task.sources=[{_table(source_of(self.data))}]"
            if not has_config:  # those of the default job, which ask for sums
                yield "eval.sets=[]"
        for column, given in (("prompt", self.prompt), ("answer", self.answer)):
            if given is not None:
                _require_one(task, "sources", option=f"--{column}")
                if self.data is None and not has_config:
                    raise ConfigError(f"--{column}: names a column of your data; give --data, or a configuration file")
                yield f"task.sources.0.{column}={as_toml(given)}"
        if self.reward is not None:
            _require_one(task, "rewards", option="--reward")
            yield f"task.rewards=[{_table(reward_of(self.reward))}]"


def _require_one(task: dict[str, Any], key: str, *, option: str) -> None:
    listed = task.get(key)
    if isinstance(listed, list) and len(listed) > 1:
        raise ConfigError(
            f"{option}: the configuration has {len(listed)} {key}, and {option} is for one; change the file, or use "
            f"--set task.{key}.INDEX.KEY=VALUE"
        )


def source_of(data: str) -> dict[str, str]:
    """Return the source that `--data` names."""
    if not data:
        raise ConfigError("--data: is empty; give a file, or the id of a data set on the hub")
    path = Path(data)
    if _FUNCTION.fullmatch(data) and not path.exists():
        return {"kind": "function", "name": data}
    suffix = path.suffix.lower()
    if suffix in _FILE_KINDS:
        return {"kind": _FILE_KINDS[suffix], "path": data}
    if suffix in _OTHER_FILES or path.is_file():
        raise ConfigError(
            f"--data {data}: is not a file that can be read; write .jsonl (one JSON object per line) or .parquet, or "
            "give FILE.py:function, a function that returns rows"
        )
    return {"kind": "datasets", "path": data}


def reward_of(reward: str) -> dict[str, str]:
    """Return the term that `--reward` names."""
    if reward in REWARDS:
        return {"kind": reward}
    if _URL.match(reward):
        return {"kind": "http", "url": reward}
    if _FUNCTION.fullmatch(reward):
        return {"kind": "function", "name": reward}
    near = get_close_matches(reward, REWARDS, n=1)
    meant = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(f"--reward {reward}: expected {', '.join(REWARDS)}, FILE.py:function or a URL{meant}")


def _table(values: dict[str, str]) -> str:
    return "{" + ", ".join(f"{key}={as_toml(value)}" for key, value in values.items()) + "}"
