"""The file operations that durability depends on.

Journal, token store, version store and checkpoints write through these functions, so that a test can record the
operations (`observed`) and reconstruct every folder that a crash could leave. They guarantee:

- `append`, `write_new`, `wrote`: the operating system has the bytes, which survive the end of this process, but not a
  power failure. After an OSError, `append` leaves the file as it was.
- `sync`: the bytes of a file are on the disk. `sync_folder`: the names in a folder are.
- `rename`, `make_folder`, `remove`: take effect at once, and are on the disk after `sync_folder` of the parent.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Literal

from dora import foreign
from dora.errors import DoraError

#: Longest line that holds a sample: an answer of a million tokens takes 60 MB.
MAX_TRAJECTORY_BYTES: Final = 64 << 20
#: Longest line of other files of rows: a row with counts for thousands of steps and many lanes has some 10 KB.
MAX_ROW_BYTES: Final = 1 << 20
#: Bound on the lines of a LineFile that wait for space: a step takes kilobytes, and the journal gives up after minutes.
MAX_KEPT_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation that is about to be done; with `wrote`, other code has just done it."""

    kind: Literal[
        "append", "write", "wrote", "sync", "sync_folder", "rename", "make_folder", "remove", "truncate", "link"
    ]
    path: Path
    data: bytes = b""  # append, write
    target: Path | None = None  # rename, link
    size: int = 0  # truncate


#: Called before each operation; it may raise OSError in its place. Only tests set it.
_observer: Callable[[Operation], None] | None = None


@contextmanager
def observed(by: Callable[[Operation], None]) -> Iterator[None]:
    """Call `by` before every operation of this process."""
    global _observer
    _observer, before = by, _observer
    try:
        yield
    finally:
        _observer = before


def _show(operation: Operation) -> None:
    if _observer is not None:
        _observer(operation)


def append(file: IO[bytes], path: Path, data: bytes) -> None:
    """Append all of `data`, or nothing, to an unbuffered file opened for appending."""
    _show(Operation("append", path, data))
    left = memoryview(data)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        if len(left) < len(data):
            truncate(path, os.fstat(file.fileno()).st_size - (len(data) - len(left)))
        raise


def write_new(path: Path, data: bytes) -> None:
    """Write a new file; FileExistsError if there is one, even a link."""
    _show(Operation("write", path, data))
    with path.open("xb") as file:
        file.write(data)


def wrote(path: Path) -> None:
    """Report that other code has written this file."""
    _show(Operation("wrote", path))


def sync(path: Path, descriptor: int | None = None) -> None:
    """Wait until the bytes of a file are on the disk."""
    _show(Operation("sync", path))
    if descriptor is not None:
        os.fdatasync(descriptor)
        return
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def sync_folder(path: Path) -> None:
    """Wait until the entries of a folder are on the disk."""
    _show(Operation("sync_folder", path))
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(path: Path, target: Path) -> None:
    """Rename, atomically within a file system. Replaces a file; OSError if `target` is a folder that is not empty."""
    _show(Operation("rename", path, target=target))
    path.rename(target)


def make_folder(path: Path, *, mode: int = 0o777, exist_ok: bool = False) -> None:
    """Create a folder and its parents."""
    if not path.is_dir():
        _show(Operation("make_folder", path))
    path.mkdir(mode=mode, parents=True, exist_ok=exist_ok)


def make_parents(folder: Path, name: str) -> None:
    """Create the folders of a relative name within a folder; FileNotFoundError, and nothing is created, if that has
    been deleted."""
    for parent in reversed(Path(name).parents[:-1]):
        (folder / parent).mkdir(exist_ok=True)


def remove(path: Path) -> None:
    """Remove a file, or a folder with its contents. A missing path is not an error."""
    if not os.path.lexists(path):
        return
    _show(Operation("remove", path))
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def truncate(path: Path, size: int) -> None:
    """Cut a file to `size` bytes."""
    _show(Operation("truncate", path, size=size))
    os.truncate(path, size)


def replace(path: Path, data: bytes) -> None:
    """Replace the contents of a file; after a crash or an OSError it has either the old or the new ones."""
    written = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        write_new(written, data)
        sync(written)
        rename(written, path)
    except OSError:
        with suppress(OSError):
            remove(written)
        raise
    sync_folder(path.parent)


class LineFile:
    """A file of lines, appended whole. Lines for which the disk has no space are kept and written with later lines.

    `sync` may be called from another thread than the rest.
    """

    def __init__(self, path: Path, *, is_known: Callable[[bytes], bool] = lambda line: True) -> None:
        """Open a file for appending. First remove a line that a crash has torn, and lines for which `is_known` is
        false."""
        self.path = path
        self.num_dropped = 0  #: lines that were left out
        self._kept = bytearray()
        self._syncing = threading.Lock()  # held during a sync, so that the file is not closed
        self._is_synced = True
        if path.exists():
            self.num_dropped = drop_lines(path, is_known=is_known)
            self._file = path.open("ab", buffering=0)
            self._is_synced = False  # a killed process may have left lines that are not synced
        else:
            self._file = path.open("ab", buffering=0)
            append(self._file, path, b"")
            sync_folder(path.parent)

    def write(self, lines: bytes) -> None:
        """Append lines; DoraError if that fails for a reason other than a full disk."""
        self._kept += lines
        if not self._kept:
            return
        try:
            append(self._file, self.path, bytes(self._kept))
        except OSError as err:
            if not is_full(err) or len(self._kept) > MAX_KEPT_BYTES:
                raise DoraError(f"{self.path}: cannot be written: {err.strerror}") from err
        else:
            self._kept.clear()
            self._is_synced = False

    def sync(self) -> None:
        """Wait until what was written is on the disk, or the disk proves full; DoraError if it fails otherwise."""
        with self._syncing:
            if self._is_synced or self._file.closed:
                return
            self._is_synced = True  # a write after this line sets it to False again
            try:
                sync(self.path, self._file.fileno())
            except OSError as err:
                self._is_synced = False
                if not is_full(err):
                    raise DoraError(f"{self.path}: cannot be synced: {err.strerror}") from err

    def close(self) -> None:
        """Write what was kept, wait until all is on the disk, and close. Errors are ignored, as the journal has all."""
        if self._file.closed:
            return
        with suppress(DoraError):
            self.write(b"")
        with suppress(DoraError):
            self.sync()
        with self._syncing:
            self._file.close()


def drop_lines(path: Path, *, is_known: Callable[[bytes], bool]) -> int:
    """Remove the torn last line of a file, and all lines that are not known; return the number of removed lines.

    If a crash interrupts this, either all of these lines are removed or none.
    """
    dropped = kept = end = seen = 0
    for line in foreign.read_lines(path, max_bytes=MAX_TRAJECTORY_BYTES):
        seen += len(line)
        if is_known(line):
            kept += len(line)
            end = end if dropped else kept
        else:
            dropped += 1
    dropped += seen < foreign.size_of(path)
    if dropped and kept == end:
        truncate(path, end)
    elif dropped:
        written = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
        with written.open("xb") as copy:
            copy.writelines(line for line in foreign.read_lines(path, max_bytes=MAX_TRAJECTORY_BYTES) if is_known(line))
        wrote(written)
        sync(written)
        rename(written, path)
        sync_folder(path.parent)
    return dropped


def is_full(err: OSError) -> bool:
    """Return whether the error means that a file system or a quota is full; there may be space again later."""
    return err.errno in (errno.ENOSPC, errno.EDQUOT)
