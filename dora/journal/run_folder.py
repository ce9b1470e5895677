"""The paths inside a run folder.

Invariant: a run folder is created once, empty, with a unique name, which is the run id. No other module builds paths
inside it.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from dora import files, foreign
from dora.errors import ConfigError
from dora.journal.access import restrict
from dora.journal.frames import FrameReader

_NAME = re.compile(r"[A-Za-z0-9._-]+")
_RUN_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*-\d{8}-\d{6}-[0-9a-f]{4}(-\d+)?")
#: A configuration takes 10 KB, and some more with the addresses of 64 servers.
MAX_CONFIG_BYTES: Final = 1 << 20


class RunFolder:
    """The paths of one run. The folders exist from the start."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.toml"  #: the resolved configuration without secrets
        self.journal = root / "journal.msgpack"  #: events and decisions
        self.tokens = root / "tokens.bin"  #: tokens and log-probs by trajectory
        self.metrics = root / "metrics.jsonl"  #: one line per step and per evaluation
        self.trajectories = root / "trajectories.jsonl"  #: a sample of trajectories with their text
        self.spans = root / "spans.jsonl"  #: what every rank and instance did at any time
        self.timeline = root / "timeline.jsonl"  #: the same, added up by bucket of time
        self.log = root / "log.jsonl"
        self.output = root / "output.log"  #: what the run prints, if it was started from Python
        self.status_token = root / "status-token"  #: random, readable by its owner only
        self.status = root / "status.json"  #: the last status, for `dora status DIR`
        self.results = root / "results.json"  #: of an evaluation that has ended
        self.nodes = root / "nodes.json"  #: the place of each node by its name
        self.lock = root / "lock"  #: held by the process that may write here, and says which it is
        self.fence = root / "epoch"  #: epoch of the controller whose ranks may publish and save
        self.checkpoints = root / "checkpoints"  #: of the trainer
        self.versions = root / "versions"  #: the durable version store
        self.merged = root / "merged"  #: versions with weights, made of adapters by `dora eval`; may be deleted
        self.rollouts = root / "rollouts"  #: whole steps written by --rollout-only, read by --train-only
        self.logs = root / "logs"  #: output of child processes, one file each
        self.tracking = root / "tracking"  #: a folder for each tracker

    @property
    def run_id(self) -> str:
        """The folder's name, which is also the prefix of the run's weight labels."""
        return self.root.name

    def lease(self, epoch: int) -> Path:
        """Return the lock file that this controller process's children watch; each controller process has its own."""
        return self.root.resolve() / f"lease-{epoch}-{os.getpid()}"

    def tracker(self, name: str) -> Path:
        """Return the folder of a tracker: its position, and its record if that is a file."""
        return self.tracking / name

    def remove_leases(self) -> None:
        """Remove the leases of earlier controllers and the files beside them. Only for the holder of the run lock."""
        for path in self.root.glob("lease-*"):
            path.unlink(missing_ok=True)

    @property
    def _files(self) -> tuple[Path, ...]:
        return (
            *(self.config, self.journal, self.tokens, self.metrics, self.trajectories, self.spans, self.timeline),
            *(self.log, self.output, self.status_token, self.status, self.results, self.nodes, self.lock, self.fence),
            *self.root.glob("lease-*"),
        )

    @property
    def _folders(self) -> tuple[Path, ...]:
        return (self.checkpoints, self.versions, self.rollouts, self.logs)

    @property
    def _owners(self) -> set[int]:
        return {os.geteuid(), 0, self.root.stat().st_uid}

    def _require_own_kinds(self) -> None:
        """ForeignFileError if a file or folder of the run is a link, of another kind, or of another user.

        Whoever sent or shares the folder could use it to have another file read or written.
        """
        for path in self._files:
            with suppress(FileNotFoundError):
                foreign.require_file(path, owners=self._owners)
        for path in (*self._folders, self.tracking):
            with suppress(FileNotFoundError):
                foreign.require_folder(path, owners=self._owners)

    def require_plain(self, *folders: Path, may_link: bool = False) -> None:
        """ForeignFileError if anything in these folders, at any depth, is a link, of another kind, or of another user.

        Without `folders`: in all that a run writes to. `may_link`: links to files are allowed; W&B makes some, and does
        not write through them.
        """
        for folder in folders or self._folders:
            foreign.require_plain(folder, owners=self._owners, may_link=may_link)

    def restrict(self, *, group: str | None) -> None:
        """Deny access to all but its owner and `group`."""
        for path in (self.root, *self._folders):
            if path.is_dir():
                restrict(path, group=group)

    @classmethod
    def create(cls, parent: Path, *, name: str, group: str | None = None) -> RunFolder:
        """Create a run folder under `parent`, accessible only to its owner and `group`."""
        folder = cls.reserve(parent, name=name)
        folder.fill(group=group)
        return folder

    @classmethod
    def reserve(cls, parent: Path, *, name: str) -> RunFolder:
        """Create the folder of a run that another process will `fill`, accessible only to its owner.

        Its id also names weights on servers and in shared memory, so it must differ from the ids of runs with other
        parents; that is why it ends in random digits.
        """
        if not _NAME.fullmatch(name) or name.startswith("."):
            raise ConfigError(f"run.name: {name!r} is not a valid folder name; use letters, digits, '-', '_' and '.'")
        run_id = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        try:
            parent.mkdir(parents=True, exist_ok=True)
            return cls(_make_unique(parent, run_id))
        except OSError as err:
            raise ConfigError(f"run.folder: cannot create {parent / run_id}: {err.strerror}") from err

    @classmethod
    def reserved(cls, path: Path) -> RunFolder:
        """Return a folder made by `reserve`; ConfigError if a run has begun in it, or if it has files of others."""
        found = cls(path)
        try:
            foreign.require_folder(path, owners={os.geteuid()})
            names = {entry.name for entry in path.iterdir()}
        except OSError as err:
            raise ConfigError(f"{path}: is not a reserved run folder ({err.strerror})") from err
        if not _RUN_ID.fullmatch(path.name):
            raise ConfigError(f"{path}: is not a reserved run folder: its name is not the id of a run")
        if others := names - {found.config.name, found.output.name, found.lock.name}:
            raise ConfigError(f"{path}: is not a reserved run folder: it has a {min(others)}")
        found._require_own_kinds()
        return found

    def fill(self, *, group: str | None) -> None:
        """Create the folders of a reserved run folder, and let `group` read it."""
        try:
            for path in self._folders:
                path.mkdir(mode=0o700)
            self.restrict(group=group)
            files.sync_folder(self.root.parent)
        except OSError as err:
            raise ConfigError(f"run.folder: cannot create {self.root}: {err.strerror}") from err

    @classmethod
    def newest(cls, parent: Path, *, name: str) -> Path | None:
        """Return the newest run of this name under `parent` that has begun a journal; None if there is none."""
        run_id = re.compile(rf"{re.escape(name)}-\d{{8}}-\d{{6}}-[0-9a-f]{{4}}")
        named = sorted((path for path in parent.glob("*") if run_id.fullmatch(path.name)), reverse=True)
        return next((path for path in named if _has_begun(cls(path).journal)), None)

    @classmethod
    def require_possible(cls, parent: Path) -> None:
        """Raise ConfigError if `create` would fail for `parent`, as far as is known without trying."""
        existing = next(folder for folder in (parent, *parent.absolute().parents) if folder.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigError(f"run.folder: cannot create {parent}: {existing} is not a writable folder")

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Return the folder of an earlier run; ConfigError if `path` is not one, or has files that no run writes."""
        if not path.exists():
            raise ConfigError(f"{path}: no such run folder")
        folder = cls(path.resolve())
        if not path.is_dir():
            raise ConfigError(f"{path}: is a file; give the run folder that contains it")
        folder._require_own_kinds()
        missing = [file.name for file in (folder.config, folder.journal) if not file.is_file()]
        if missing:
            raise ConfigError(f"{path}: is not a run folder: it has no {' and no '.join(missing)}")
        if folder.config.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{folder.config}: has more than {MAX_CONFIG_BYTES:,} bytes; it was not read")
        return folder


def _has_begun(journal: Path) -> bool:
    """Return whether the first frame is whole; a start that ended before has left nothing to continue."""
    try:
        return journal.is_file() and next(iter(FrameReader(journal)), None) is not None
    except OSError:  # opening the run says why it cannot be read
        return True


def _make_unique(parent: Path, run_id: str) -> Path:
    for number in itertools.count(1):
        root = parent / (run_id if number == 1 else f"{run_id}-{number}")
        try:
            root.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return root
    raise AssertionError("count never ends")
