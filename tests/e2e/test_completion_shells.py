"""Completion in real shells, in a terminal: what appears after a Tab."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dora.completion.complete import script

#: Shell -> how it is started without the user's own settings.
START = {"bash": ["--norc", "--noprofile", "-i"], "zsh": ["-f", "-i"]}


class Terminal:
    """A shell at a terminal."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.child, self._terminal = pty.fork()
        if self.child == 0:
            os.chdir(folder)
            os.environ.update(PATH=f"{folder}:{os.environ['PATH']}", PS1="$ ", TERM="dumb", HOME=str(folder))
            os.execvp(command[0], command)
        self.shown = ""

    def type(self, text: str, *, until: str) -> None:
        """Type; return when the text has appeared after it."""
        seen = len(self.shown)
        os.write(self._terminal, text.encode())
        deadline = time.monotonic() + 30
        while until not in self.shown[seen:]:
            ready, _, _ = select.select([self._terminal], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, self.shown
            self.shown += os.read(self._terminal, 4096).decode(errors="replace")

    def close(self) -> None:
        os.close(self._terminal)
        os.waitpid(self.child, 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a program `dora`, the scripts, and a file to complete."""
    program = tmp_path / "dora"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m dora "$@"\n')
    program.chmod(0o755)
    for shell in ("bash", "zsh", "fish"):
        (tmp_path / f"script.{shell}").write_text(script(shell))
    (tmp_path / "a_model_folder").mkdir()
    return tmp_path


@contextmanager
def at(shell: str, folder: Path) -> Iterator[Terminal]:
    if (found := shutil.which(shell)) is None:
        pytest.skip(f"{shell} is not installed")
    terminal = Terminal([found, *START[shell]], folder)
    try:
        terminal.type("PS1='> '\n", until="> ")
        if shell == "zsh":
            terminal.type(
                "autoload -U compinit; compinit -D; unsetopt beep; echo compinit-$((1+1))\n", until="compinit-2"
            )
        terminal.type(f"source ./script.{shell}; echo loaded-$((1+1))\n", until="loaded-2")
        yield terminal
    finally:
        terminal.close()


@pytest.mark.parametrize("shell", START)
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("dora chec", "dora check "),
        ("dora run --set rollout.strat", "rollout.strategy="),
        ("dora run --set rollout.strategy=one", "rollout.strategy=one_step_off"),
        ("dora run --set=task.sources.4.kind=par", "task.sources.4.kind=parquet"),
        ("dora run --resume a_mod", "a_model_folder/"),
        ("dora run --set model.path=a_mod", "model.path=a_model_folder/"),
        ("./dora run --rew", "--reward "),
    ],
)
def test_a_tab_completes(shell: str, typed: str, completed: str, folder: Path) -> None:
    with at(shell, folder) as terminal:
        terminal.type(f"{typed}\t", until=completed)


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("dora chec", "check\tValidate a configuration, contact its servers, print the plan."),
        ("dora run --set rollout.strategy=one", "rollout.strategy=one_step_off"),
        ("dora run --resume a_mod", "a_model_folder/"),
        ("dora run --set model.path=a_mod", "model.path=a_model_folder/"),
    ],
)
def test_fish_completes(typed: str, completed: str, folder: Path) -> None:
    if (fish := shutil.which("fish")) is None:
        pytest.skip("fish is not installed")
    line = f"source script.fish; complete -C '{typed}'"
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder)}
    result = subprocess.run(
        [fish, "--no-config", "-c", line], capture_output=True, text=True, check=True, cwd=folder, env=environment
    )
    assert completed in result.stdout
