"""The differences between two configurations of one run, key by key, and which of them alter the experiment."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dora.config.schema import Config

#: Keys and sections that decide where a run takes place, how fast it is and who watches it, but not what is learned.
OPERATIONAL: Final = (
    "run.name",
    "run.folder",
    "run.group",
    "run.steps",
    "run.no_progress_s",
    "rollout.watchdog_s",
    "engine",
    "weights",
    "nodes",
    "status",
    "log",
    "tracking",
    "task.graders",
    "task.grader_memory_mb",
    "environment.python",
    "environment.command",
    "environment.hosts",
    "environment.episodes_per_host",
    "environment.start_timeout_s",
    "environment.memory_mb",
    "environment.cores",
    "trainer.ranks",
    "trainer.parallel",
    "trainer.min_ranks",
    "trainer.command",
    "trainer.address",
    "trainer.threads",
    "trainer.micro_batch_tokens",
    "trainer.activation_checkpointing",
    "trainer.copies",
    "trainer.probe_every",
    "trainer.compile",
    "trainer.start_timeout_s",
    "trainer.stop_timeout_s",
    "trainer.checkpoint_every",
)


@dataclass(frozen=True, slots=True)
class Change:
    """One key whose value differs."""

    key: str  # dotted
    before: str  # as JSON
    after: str

    @property
    def alters_experiment(self) -> bool:
        """Whether the change may affect what is learned."""
        return not is_operational(self.key)

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.after}"


def is_operational(key: str) -> bool:
    """Return whether a dotted key is one of OPERATIONAL, or in one of its sections."""
    return any(key == name or key.startswith(f"{name}.") for name in OPERATIONAL)


def changes(before: Config, after: Config) -> list[Change]:
    """Return every key whose value differs, in the order of the schema, without secrets."""
    old, new = dict(flat(before.model_dump(mode="json"))), dict(flat(after.model_dump(mode="json")))
    keys = dict.fromkeys([*old, *new])
    return [Change(k, old.get(k, "unset"), new.get(k, "unset")) for k in keys if old.get(k) != new.get(k)]


def flat(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of nested tables as JSON, by dotted key."""
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from flat(value, f"{key}.")
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            yield from flat({str(i): item for i, item in enumerate(value)}, f"{key}.")
        else:
            yield key, json.dumps(value, default=str)  # TOML has dates, too
