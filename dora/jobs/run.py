"""A run as an object: a description of where it is, whose every answer is read from the run folder.

Invariant: nothing is in memory that would be missing after a restart of the kernel; `attach` gives an equal object.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections import deque
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import psutil

from dora.app.saved_status import WITHOUT_NOTICE, ended_without_notice, read_saved, read_status
from dora.config.load import dump
from dora.config.schema import Config
from dora.errors import ConfigError, DoraError, RunFailed
from dora.files import MAX_ROW_BYTES, MAX_TRAJECTORY_BYTES
from dora.jobs.html import picture
from dora.jobs.rows import Rows, read_rows
from dora.jobs.settings import Source, as_overrides, configuration
from dora.jobs.start import last_words, reap, start
from dora.journal.run_folder import RunFolder
from dora.node.holder import Holder, find_process, note_holder, read_holder
from dora.node.lease import hold
from dora.observe.sentence import ENDED
from dora.status.records import Bounds, Records

_T = TypeVar("_T")

#: Number of samples that `Run.samples` returns unless it is asked for more.
SAMPLES: Final = 50
#: Time between two looks at whether a process has ended.
_POLL_S: Final = 0.05
#: What the curves of a notebook are drawn from.
_DRAWN: Final = Bounds(rows=300, size=1 << 20)


@dataclass(frozen=True, slots=True)
class Run:
    """A run, going on or ended."""

    folder: Path  #: absolute
    pid: int | None = None  #: of its process on this host; None if it was only loaded
    started: int | None = None  #: when that process began, in seconds after its host

    # -- what it does -------------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether its process is alive."""
        return self._process() is not None

    def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait for the end of the run and return its last status; RunFailed if it failed or was killed.

        KeyboardInterrupt (an interrupt of the cell) stops the run as `stop` does. TimeoutError if it still goes on.
        """
        try:
            self._await_end(timeout_s)
        except KeyboardInterrupt:
            self.stop()
            raise
        return self._ended()

    def stop(self) -> dict[str, Any]:
        """Stop the run cleanly, as Ctrl-C does, and return its last status. It can be resumed.

        This waits for the trainer's checkpoint; KeyboardInterrupt meanwhile ends the run at once.
        """
        if (process := self._process()) is not None:
            _signal(process)
            try:
                self._await_end()
            except KeyboardInterrupt:
                _signal(process)
                raise
        return self.status()

    def _await_end(self, timeout_s: float | None = None) -> None:
        """Wait until the process has ended. (psutil would wait for a zombie, which PID 1 may never reap.)"""
        deadline = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
        while self.is_running:
            if (left_s := deadline - time.monotonic()) <= 0:
                raise TimeoutError(f"{self.folder}: still runs after {timeout_s:g} s")
            time.sleep(min(left_s, _POLL_S))

    def _process(self) -> psutil.Process | None:
        if self.pid is None or self.started is None:
            return None
        return find_process(self.pid, self.started, lock=RunFolder(self.folder).lock)

    def _ended(self) -> dict[str, Any]:
        now = self.status()
        if now["phase"] == "failed" or now["reason"] == WITHOUT_NOTICE:
            raise RunFailed(now["sentence"])
        return now

    # -- what it shows ------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return what `dora status` shows, as plain data (docs/PYTHON.md). A run that has not got so far has only
        `run_id`, `phase`, `sentence` and `reason`."""
        folder, is_running = self._open(), self.is_running
        if not self._has_status(folder):
            return _before_status(folder, is_running=is_running)
        now = _blocking(read_status(self.folder))
        if self.pid is not None and not is_running and now.phase not in ENDED:
            now = ended_without_notice(now)
        found: dict[str, Any] = msgspec.to_builtins(now)
        return found

    def _has_status(self, folder: RunFolder) -> bool:
        """Return whether there is a status of this process, and not only of the one before a resume."""
        if self.pid is None or self.started is None:
            return folder.status.exists() or not folder.output.exists()
        writer = read_saved(self.folder).holder if folder.status.exists() else None
        return writer is not None and writer.is_process(self.pid, self.started)

    def metrics(self) -> Rows:
        """Return a row for each trained step (docs/METRICS.md)."""
        return Rows(row for row in self._rows() if row.get("kind") == "step")

    def held_out(self) -> Rows:
        """Return a row for each held-out set of each evaluated version."""
        return Rows(row for row in self._rows() if row.get("kind") == "evaluation")

    def _rows(self) -> Rows:
        return Rows(read_rows(self._open().metrics, max_bytes=MAX_ROW_BYTES))

    def samples(self, last: int | None = SAMPLES) -> Rows:
        """Return the last of the answers that were kept, newest last. `last`: None returns all."""
        rows = read_rows(self._open().trajectories, max_bytes=MAX_TRAJECTORY_BYTES)
        return Rows(deque(rows, maxlen=last))

    def _open(self) -> RunFolder:
        if not self.folder.is_dir():
            raise ConfigError(f"{self.folder}: no such run folder; was it deleted?")
        return RunFolder(self.folder)

    def _repr_html_(self) -> str:
        """Return the sentence and small curves, for a notebook."""
        try:
            sentence = self.status()["sentence"]
            rows = msgspec.json.decode(Records(self._open(), bounds=_DRAWN).steps())["rows"]
        except (DoraError, OSError) as err:
            sentence, rows = str(err), []
        return picture(sentence, folder=self.folder, rows=rows)


def _before_status(folder: RunFolder, *, is_running: bool) -> dict[str, Any]:
    """Describe a run that has no status yet; if it has ended, its output says why."""
    phase, reason, sentence = "starting", "", "Starting: the configuration, the model and the prompts are being read."
    if not is_running:
        said = last_words(folder.output)
        phase, reason = ("failed", " ".join(said)) if said else ("interrupted", f"see {folder.output}")
        sentence = f"{phase.capitalize()} while starting: {reason.rstrip('.')}."
    return {"run_id": folder.run_id, "phase": phase, "sentence": sentence, "reason": reason}


def _signal(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):  # it has just ended
        process.send_signal(signal.SIGINT)


def _blocking(work: Coroutine[Any, Any, _T]) -> _T:
    """Await in a thread of its own, as a notebook has an event loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


# -- making one -------------------------------------------------------------------------------------------------------


def run(config: Source = None, /, **settings: Any) -> Run:
    """Start a run in a process of its own and return at once.

    `config`: a configuration file, or its tables; None is the CPU example. Each setting is a --set: `run__steps=8`, or
    `run={"steps": 8}`. ConfigError if the configuration is invalid.
    """
    folder = reserve(configuration(config, settings))
    return start_run(folder, ["run", str(folder.config), "--into", str(folder.root)])


def resume(folder: str | Path | Run, /, **settings: Any) -> Run:
    """Continue a stopped or failed run in a process of its own and return at once, as `dora run --resume` does."""
    earlier = RunFolder.open(_path(folder))
    overrides = ["status.port=0", *as_overrides(settings)]
    sets = [argument for override in overrides for argument in ("--set", override)]
    with hold(earlier.lock):  # a process that is refused must not become the holder
        pass
    return start_run(earlier, ["run", "--resume", str(earlier.root), *sets])


def reserve(config: Config) -> RunFolder:
    """Create the folder for a new run, with its configuration."""
    folder = RunFolder(RunFolder.reserve(config.run.folder, name=config.run.name).root.resolve())
    try:
        folder.config.write_text(dump(config), encoding="utf-8")
    except OSError as err:
        raise ConfigError(f"run.folder: cannot write {folder.config}: {err.strerror}") from err
    return folder


def start_run(folder: RunFolder, arguments: list[str]) -> Run:
    """Start the command that fills the folder; `arguments` name it."""
    pid = start(arguments, output=folder.output)
    holder = Holder.of(pid)
    note_holder(folder.lock, holder)  # the process does so too, once it has imported what it needs
    reap(pid)
    return Run(folder.root, holder.pid, holder.started)


def attach(folder: str | Path, /) -> Run:
    """Return the run whose last process was on this host, such as one started before a restart of the kernel."""
    path = _path(folder)
    if not path.is_dir():
        raise ConfigError(f"{path}: no such run folder")
    if path.stat().st_uid != os.geteuid():
        raise ConfigError(f"{path}: belongs to another user; dora.load reads a run folder")
    holder = read_holder(RunFolder(path).lock)
    if holder is None:
        raise ConfigError(f"{path}: does not say which process it belongs to; dora.load reads a run folder")
    if not holder.is_here:
        raise ConfigError(f"{path}: its process is on {holder.host}; attach there, or read the folder with dora.load")
    return Run(path, holder.pid, holder.started)


def load(folder: str | Path, /) -> Run:
    """Return the run in a folder for reading: one that has ended, of any host."""
    path = _path(folder)
    if not RunFolder(path).output.exists():  # a run that Python started may have ended before it had a journal
        RunFolder.open(path)
    return Run(path)


def _path(folder: str | Path | Run) -> Path:
    return folder.folder if isinstance(folder, Run) else Path(folder).resolve()
