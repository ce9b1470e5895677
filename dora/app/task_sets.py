"""Environments of others: the tasks of task sets of verifiers as files of rows, and what the hosts are given.

The Python that has a task set is not that of the run, so a program in that Python reads the tasks.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from dora.config.schema import Config, EnvironmentConfig, SourceConfig
from dora.environments.bootstrap import command_of
from dora.errors import ConfigError, one_line

#: What plays the episodes.
_TASK_SET: Final = "dora.environments.verifiers_tasks:VerifiersTask"
_OPENENV: Final = "dora.environments.openenv:OpenEnv"


def with_task_sets(stack: Any, config: Config) -> Config:
    """Return a configuration in which the tasks of verifiers are files of rows, as long as `stack` is open. ConfigError
    if they cannot be read."""
    if config.environment.kind != "verifiers":
        return config
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dora-tasks-")))
    task, evaluation, name = config.task, config.eval, Path(config.environment.name).stem
    sources = tuple(
        _as_file(source, config.environment, field=f"task.sources.{index}", path=folder / f"{name}-{index}.jsonl")
        for index, source in enumerate(task.sources if config.run.steps else ())
    )
    sets = tuple(
        one.model_copy(
            update={
                "source": _as_file(
                    one.source,
                    config.environment,
                    field=f"eval.sets.{index}.source",
                    path=folder / f"{one.name}.jsonl",
                )
            }
        )
        for index, one in enumerate(evaluation.sets)
    )
    changed = {
        "task": task.model_copy(update={"sources": sources}),
        "eval": evaluation.model_copy(update={"sets": sets}),
    }
    return config.model_copy(update=changed)


def _as_file(source: SourceConfig, environment: EnvironmentConfig, *, field: str, path: Path) -> SourceConfig:
    """Write the tasks of a source into a file, and return the source of its rows."""
    python = environment.python or sys.executable
    settings = {
        "name": environment.name,
        "options": {**environment.options, **source.options},
        "split": source.split,
        "path": str(path),
    }
    command = [*command_of(python, "dora.environments.verifiers_peer"), "rows", json.dumps(settings)]
    limit_s = environment.start_timeout_s
    try:
        done = subprocess.run(command, capture_output=True, timeout=limit_s, check=False)
    except OSError as err:
        raise ConfigError(f"environment.python: {python} cannot be started: {err.strerror}") from err
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{field}: the tasks of {environment.name} were not read within {limit_s:g} s; raise "
            "environment.start_timeout_s"
        ) from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise ConfigError(
            f"{field}: the tasks of {environment.name} cannot be read in {python} (exit code {done.returncode}: "
            f"{one_line(last)})"
        ) from None
    if "refused" in answer:
        raise ConfigError(answer["refused"])
    if not answer["rows"]:
        raise ConfigError(f"{field}: task set {environment.name} has no tasks in split '{source.split}'")
    return source.model_copy(update={"kind": "jsonl", "path": path, "options": {}, "prompt": "", "answer": ""})


def hosted(environment: EnvironmentConfig, *, model: Path, renderer: Mapping[str, Any]) -> EnvironmentConfig:
    """Return what the hosts are given: for a task set, the class that plays it, with the model's renderer; for a server
    of OpenEnv, the class that has its sessions."""
    if environment.kind == "openenv":
        options = {"url": environment.name, **environment.options}
        return environment.model_copy(update={"name": _OPENENV, "options": options})
    if environment.kind != "verifiers":
        return environment
    options = {
        "task_set": environment.name,
        "options": environment.options,
        "model": str(model.resolve()),
        "renderer": dict(renderer),
        "limit_s": environment.call_timeout_s,
    }
    return environment.model_copy(update={"name": _TASK_SET, "options": options})
