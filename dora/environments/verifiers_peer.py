"""A task set of verifiers, in the Python that has it: its configuration, its rows, and its server.

Read at verifiers 0.4, in which everything is below `verifiers.v1`. `main` is a program of its own, which either writes
the rows of a task set into a file, or serves its rollouts (verifiers_tasks.py).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any, Final

from dora.errors import ConfigError, one_line
from dora.functions import describe

#: The name of the environment variable in which the server finds the key of the sessions. Programs that it starts do
#: not see it: verifiers leaves out variables with API_KEY in their name.
KEY: Final = "SESSIONS_API_KEY"
#: Tasks of a task set that has no end.
ENDLESS_TASKS: Final = 10_000
#: Most tasks of a task set, and most bytes of all of them as JSON: they are read before the run begins.
MAX_TASKS: Final = 1 << 20
MAX_BYTES: Final = 1 << 30
#: Of so many tasks, one is held out.
HELD_OUT_OF: Final = 10


def main() -> None:
    """Do what the command line says: `rows` or `serve`, with their settings as JSON."""
    what, settings = sys.argv[3], json.loads(sys.argv[4])
    (_write_rows if what == "rows" else _serve)(**settings)


# --- the task set --------------------------------------------------------------------------------------------------


def environment_of(name: str, options: Mapping[str, Any], *, limit_s: float) -> Any:
    """Return verifiers' environment (`verifiers.v1.Env`) of a task set, whose rollouts are conversations of the policy.

    `limit_s`: of setting up a rollout, and of what follows its last turn. ConfigError if this Python cannot have it.
    """
    _require_packages()
    from verifiers.v1.utils import loaders

    given, name = name, _importable(name)
    with _errors(name):
        _require_known(name, loaders)
        if name != given and (found := loaders.import_taskset(name).__file__) != str(Path(given).resolve()):
            raise ConfigError(f"environment.name: {given} would be imported as {name}, which is {found}; rename it")
        kind = loaders.env_config_type(name)
        roles = [role for role, field in kind.model_fields.items() if _is_agent(field.default)]
        if len(roles) != 1:
            raise ConfigError(
                f"environment.name: task set '{name}' is played by {len(roles)} agents ({', '.join(roles)}); only "
                "those that one agent plays are trained"
            )
        harness = loaders.default_harness_id(name)
        agent = {
            "harness": {"id": "null" if harness == "bash" else harness},
            "runtime": {"type": "subprocess"},
            "timeout": {"setup": limit_s, "finalize": limit_s, "scoring": limit_s},
        }
        config = loaders.resolve_env_config({"taskset": {**options, "id": name}, roles[0]: agent})
        environment = loaders.load_environment(config)
        if type(environment.taskset).task_type().NEEDS_CONTAINER:
            raise ConfigError(f"environment.name: task set '{name}' needs containers, which are not supported")
        return environment


def _require_packages() -> None:
    """Raise ConfigError unless this Python has verifiers and `uv`, which verifiers starts programs with."""
    try:
        import aiohttp  # noqa: F401
        import msgspec  # noqa: F401
        import verifiers.v1.serve  # noqa: F401
    except ImportError as err:
        try:
            has = f"verifiers {version('verifiers')}, which cannot be used"
        except PackageNotFoundError:
            has = "no package verifiers"
        raise ConfigError(
            f"environment.python: {sys.executable} has {has} ({one_line(err)}); install there: verifiers>=0.4 uv "
            "msgspec"
        ) from err
    # Programs of a virtual environment are found where its interpreter is, also if it is not activated.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    if shutil.which("uv") is None:
        raise ConfigError(f"environment.python: {sys.executable} has no uv, which verifiers needs; install uv there")


def _importable(name: str) -> str:
    """Return the id of a task set that may be a file. Its folder, or the working directory, can be imported from, also
    by the programs that verifiers starts."""
    file = Path(name)
    if is_file := name.endswith(".py"):
        if not file.is_file():
            raise ConfigError(f"environment.name: {name}: no such file")
        if not file.stem.isidentifier() or not file.stem.islower():
            raise ConfigError(f"environment.name: {name}: a task set is imported, so name its file in lower case")
    folder = str(file.parent.resolve()) if is_file else os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), folder)))
    return file.stem if is_file else name


def _require_known(name: str, loaders: Any) -> None:
    try:
        loaders.taskset_class(name)
    except ModuleNotFoundError as err:
        cause = err.__cause__
        if not isinstance(cause, ModuleNotFoundError) or cause.name == name.replace("-", "_").lower():
            raise ConfigError(
                f"environment.name: {sys.executable} has no task set '{name}'; install its package there, or name its "
                "file"
            ) from err
        raise cause from None  # it imports something that is not there


def _is_agent(default: object) -> bool:
    from verifiers.v1.configs.agent import AgentConfig

    return isinstance(default, AgentConfig)


@contextmanager
def _errors(name: str) -> Iterator[None]:
    """Turn whatever verifiers or the task set raises into a ConfigError."""
    from pydantic import ValidationError

    try:
        yield
    except ConfigError:
        raise
    except ValidationError as err:
        first = err.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"] if part != "taskset")
        known = [field for field in _fields(name) if field != "id"]
        meant = get_close_matches(place, known, n=1) or sorted(known)
        told = f"; it has {', '.join(meant)}" if first["type"] == "extra_forbidden" and meant else ""
        raise ConfigError(f"environment.options.{place}: task set '{name}' refuses it: {first['msg']}{told}") from err
    except Exception as err:  # code of the user
        raise ConfigError(f"environment.name: task set '{name}' cannot be loaded ({describe(err)})") from err


def _fields(name: str) -> list[str]:
    from verifiers.v1.utils.loaders import taskset_config_type

    return [*taskset_config_type(name).model_fields]


# --- its rows ------------------------------------------------------------------------------------------------------


def _write_rows(name: str, options: dict[str, Any], split: str, path: str) -> None:
    """Write the tasks of a split into a file, one line of JSON each, and print {"rows": N}, or {"refused": TEXT}."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a task set prints
    try:
        answer: dict[str, Any] = {"rows": _written(name, options, split, Path(path))}
    except ConfigError as err:
        answer = {"refused": str(err)}
    replies.write(json.dumps(answer))
    replies.flush()
    os._exit(0)  # threads of a task set do not matter any more


def _written(name: str, options: dict[str, Any], split: str, path: Path) -> int:
    tasks = environment_of(name, options, limit_s=1.0).taskset
    if not tasks.bounded:
        tasks = tasks.take(ENDLESS_TASKS)
    count = size = 0
    with _errors(name), path.open("wb") as file:
        for index, task in enumerate(islice(tasks, MAX_TASKS + 1)):
            if split != "all" and (index % HELD_OUT_OF == 0) != (split == "eval"):
                continue
            row = json.dumps(task.data.model_dump(mode="json"), allow_nan=False).encode() + b"\n"
            count, size = count + 1, size + len(row)
            if count > MAX_TASKS or size > MAX_BYTES:
                raise ConfigError(
                    f"environment.name: task set '{name}' has more than {MAX_TASKS:,} tasks or {MAX_BYTES:,} bytes; "
                    "choose fewer by environment.options"
                )
            file.write(row)
    return count


# --- its server ----------------------------------------------------------------------------------------------------


def _serve(name: str, options: dict[str, Any], limit_s: float, address: str) -> None:
    """Serve rollouts on a ZeroMQ address until stdin ends."""
    os.dup2(1, 2)  # the host reads one stream
    import logging

    from verifiers.v1.serve import serve_env

    logging.basicConfig(level=logging.WARNING)
    config = environment_of(name, options, limit_s=limit_s).config
    serve_env(max_workers=1, address=address, config=config, death_pipe=_Parent())


class _Parent:
    """The process that has started this one, as verifiers watches it."""

    def recv(self) -> None:
        """Wait for its end."""
        while os.read(0, 1 << 16):
            pass
