"""`dora check`: validates a configuration, contacts its servers, and prints the plan.

`--gpus` plans for other GPUs instead, and `--drift` looks for drift.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop

from dora.app.check import check as check_config
from dora.app.drift_check import train_without_learning, verdict
from dora.app.gpu_plan import Gpus
from dora.app.gpu_plan import check_plan as plan
from dora.app.node_check import check_nodes as wait_for_nodes
from dora.cli.output import say
from dora.cli.run import require_steps
from dora.config.load import load
from dora.config.schema import Config
from dora.errors import ConfigError


def check(config_path: Path | None, overrides: Sequence[str], *, push: bool = False, json: Path | None = None) -> None:
    """`json`: a file for the findings."""
    found: list[dict[str, str]] = []

    def report(topic: str, text: str) -> None:
        _print(topic, text)
        found.append({"topic": topic, "text": text})

    is_all_here = uvloop.run(check_config(_load(config_path, overrides), report, push=push))
    if json is not None:
        try:
            json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
        except OSError as err:
            raise ConfigError(f"--json {json}: cannot be written: {err.strerror}") from err
    checked = "all checks passed" if is_all_here else "what can be checked before the download is right"
    say(f"{checked}; nothing was changed")


def check_plan(config_path: Path | None, overrides: Sequence[str], *, gpus: str) -> None:
    """Exit with code 1 if the run does not fit on the GPUs."""
    given = Gpus.parse(gpus)
    if not plan(_load(config_path, overrides), given, _print):
        say(f"the run DOES NOT FIT on {given}")
        raise SystemExit(1)
    say(f"the run fits on {given} by this forecast; nothing was started or measured")


def check_nodes(config_path: Path | None, overrides: Sequence[str]) -> None:
    """Exit with code 1 if a node is missing, or does not receive versions."""
    if not uvloop.run(wait_for_nodes(_load(config_path, overrides), _print)):
        say("NOT ALL NODES ARE READY; nothing was changed")
        raise SystemExit(1)
    say("all nodes are ready; nothing was changed")


def check_drift(config_path: Path | None, overrides: Sequence[str]) -> None:
    """Exit with code 1 if engine and trainer disagree."""
    found = uvloop.run(train_without_learning(_load(config_path, overrides)))
    for line in found.lines():
        say(line)
    is_flat, text = verdict(found)
    say(f"{'flat' if is_flat else 'DRIFT'}: {text}")
    if not is_flat:
        raise SystemExit(1)


def _load(config_path: Path | None, overrides: Sequence[str]) -> Config:
    return require_steps(load(config_path, overrides, environ=os.environ))


def _print(topic: str, text: str) -> None:
    say(f"{topic:<13}{text}")
