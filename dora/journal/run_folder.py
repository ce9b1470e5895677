"""The one place that knows the paths inside a run folder.

Invariant: a run folder is made once, empty, under a name no other run has; that name is the run id. Nothing outside
this file joins a path below it. Called by `dora run` (create), and by resume, audit and export (open).
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import time
from pathlib import Path

from dora.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9._-]+")


class RunFolder:
    """Paths of one run; folders exist from the start, files are made by whoever writes them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.toml"  #: the resolved configuration, secrets left out
        self.journal = root / "journal.msgpack"  #: events and decisions (writer.py)
        self.tokens = root / "tokens.bin"  #: tokens and log-probs by trajectory (tokens.py)
        self.metrics = root / "metrics.jsonl"  #: one line per step and per evaluation
        self.trajectories = root / "trajectories.jsonl"  #: a sample of trajectories with text (deep.py)
        self.log = root / "log.jsonl"
        self.status_token = root / "status-token"  #: drawn for the run, readable for its owner alone
        self.lease = root / "lease"  #: locked by the run while it lives; its children watch it
        self.checkpoints = root / "checkpoints"  #: of the trainer
        self.versions = root / "versions"  #: the durable version store
        self.rollouts = root / "rollouts"  #: whole steps written by --rollout-only, read by --train-only
        self.logs = root / "logs"  #: what child processes print

    @property
    def run_id(self) -> str:
        """`<name>-<YYYYmmdd-HHMMSS>`: the folder's name, and the prefix of its weight labels."""
        return self.root.name

    def process_log(self, name: str) -> Path:
        """Where the output of child process `name` goes."""
        return self.logs / f"{name}.log"

    @classmethod
    def create(cls, parent: Path, *, name: str) -> RunFolder:
        """A new run folder under `parent`. Its id names weights on servers and in shared memory too, so that runs with
        other parents must not share it: hence a few random digits after the time."""
        if not _NAME.fullmatch(name) or name.startswith("."):
            raise ConfigError(f"run.name: {name!r} cannot name a folder; use letters, digits, '-', '_' and '.'")
        run_id = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        try:
            parent.mkdir(parents=True, exist_ok=True)
            folder = cls(_make_unique(parent, run_id))
            for path in (folder.checkpoints, folder.versions, folder.rollouts, folder.logs):
                path.mkdir()
        except OSError as err:
            raise ConfigError(f"run.folder: cannot create {parent / run_id}: {err.strerror}") from err
        return folder

    @classmethod
    def require_possible(cls, parent: Path) -> None:
        """ConfigError if `create` could make nothing in `parent`, as far as can be said without trying."""
        there = next(folder for folder in (parent, *parent.absolute().parents) if folder.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise ConfigError(f"run.folder: cannot create {parent}: {there} is no folder that can be written")

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of an earlier run."""
        folder = cls(path.resolve())
        if not path.exists():
            raise ConfigError(f"{path}: there is no such run folder")
        if not path.is_dir():
            raise ConfigError(f"{path}: is a file; give the run folder that holds it")
        missing = [file.name for file in (folder.config, folder.journal) if not file.is_file()]
        if missing:
            raise ConfigError(f"{path}: is not a run folder, it has no {' and no '.join(missing)}")
        return folder


def _make_unique(parent: Path, run_id: str) -> Path:
    for number in itertools.count(1):
        root = parent / (run_id if number == 1 else f"{run_id}-{number}")
        try:
            root.mkdir()
        except FileExistsError:
            continue
        return root
    raise AssertionError("count never ends")
