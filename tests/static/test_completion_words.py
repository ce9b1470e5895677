"""What shells complete is generated from the command line and the schema, and is up to date."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dora.cli.words import PATH, render
from dora.completion.complete import SHELLS, script, words
from dora.config.load import load
from dora.config.schema import Config

ROOT = Path(__file__).parents[2]


def test_the_generated_file_is_up_to_date() -> None:
    assert (ROOT / PATH).read_text() == render(), "run: python -m dora.cli.words"


def test_it_has_every_key_that_a_configuration_may_have() -> None:
    def keys(table: dict, prefix: str) -> set[str]:
        found = set()
        for name, value in table.items():
            items = value[0] if isinstance(value, list) and value and isinstance(value[0], dict) else value
            found |= (
                keys(items, f"{prefix}{name}{'.0' if items is not value else ''}.")
                if isinstance(items, dict) and f"{prefix}{name}" not in words()["settings"]
                else {f"{prefix}{name}"}
            )
        return found

    written = keys(json.loads(load(None, environ={}).model_dump_json()), "")
    assert written - {*words()["settings"]} == set()
    secrets = [
        f"{section}.{name}"
        for section, outer in Config.model_fields.items()
        for name, field in outer.annotation.model_fields.items()  # type: ignore[union-attr]
        if field.exclude
    ]
    assert secrets
    assert not {*secrets} & {*words()["settings"]}


def test_every_value_that_it_offers_is_one_that_the_key_may_have() -> None:
    """The values of a key are those of its type, so that a wrong one is refused by name."""
    entries = words()["settings"]
    assert entries["rollout.strategy"]["values"][:2] == ["dora", "sync"]
    assert entries["task.shuffle"]["values"] == ["true", "false"]
    assert entries["run.steps"]["values"] == []


def test_completing_imports_next_to_nothing() -> None:
    """A shell waits for it at every Tab."""
    code = (
        "import sys; sys.argv = ['dora', '--complete', 'bash', 'dora run --set rollout.', '=']; import dora.__main__; "
    )
    code += (
        "dora.__main__.main(); print([m for m in ('typer', 'pydantic', 'asyncio', 'dora.errors') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "rollout.strategy=" in result.stdout
    assert result.stdout.endswith("[]\n")


def test_a_terminal_may_lack_characters_of_a_meaning() -> None:
    line = "dora run --set objective.loss.ra"
    result = subprocess.run(
        [sys.executable, "-m", "dora", "--complete", "bash", line, ""],
        env={"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "objective.loss.ratio=\tbypass: x is k = ?/?" in result.stdout


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_each_shell_asks_dora(shell: str) -> None:
    assert f"--complete {shell}" in script(shell)


def test_the_script_for_bash_is_clean() -> None:
    checker = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
    assert checker is not None
    path = ROOT / "dora/completion/dora.bash"
    result = subprocess.run([checker, "--shell=bash", path], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
