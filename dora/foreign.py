"""Files that other users may have placed: in a run folder received from others, in a model folder, in shared memory.

Invariant: only regular files are opened, opening never waits (a FIFO without a writer would block), and `read` takes no
more memory than its bound, whatever size the file claims or however it grows.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

from dora.errors import ConfigError


class ForeignFileError(ConfigError):
    """A file is not what it should be: a link, a pipe, a device, too large, or of another user."""


def open_regular(path: Path, *, follow_links: bool = False) -> BufferedReader:
    """Open a regular file for reading; its owner must be this user, root, or the owner of the folder it is in.

    `follow_links`: allow the last component to be a link, as in the caches of model hubs. FileNotFoundError if there is
    no such file, ForeignFileError if it is not acceptable, other OSErrors as the system raises them.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    # The file is checked before it is opened, and again after: opening a device can already have an effect.
    _refuse_irregular(path, path.stat() if follow_links else path.lstat())
    file = os.fdopen(os.open(path, flags), "rb")
    try:
        found = os.fstat(file.fileno())
        _refuse_irregular(path, found)
        if not follow_links:
            _refuse_owner(path, found, {os.geteuid(), 0, path.parent.stat().st_uid})
    except BaseException:
        file.close()
        raise
    return file


def read(path: Path, *, max_bytes: int, follow_links: bool = False) -> bytes:
    """Return the contents of a file of at most `max_bytes`; errors as in `open_regular`."""
    with open_regular(path, follow_links=follow_links) as file:
        return read_open(file, path, max_bytes=max_bytes)


def read_open(file: BufferedReader, path: Path, *, max_bytes: int) -> bytes:
    """Return the contents of an opened file; ForeignFileError if it has more than `max_bytes`."""
    size = os.fstat(file.fileno()).st_size
    data = file.read(max_bytes + 1) if size <= max_bytes else b""
    if max(size, len(data)) > max_bytes:
        raise ForeignFileError(f"{path}: has more than {max_bytes:,} bytes; it was not read")
    return data


def read_lines(path: Path, *, max_bytes: int) -> Iterator[bytes]:
    """Yield the complete lines of a file, without a torn last one; ForeignFileError at one longer than `max_bytes`."""
    with open_regular(path) as file:
        number = 0
        while line := file.readline(max_bytes + 1):
            number += 1
            if len(line) > max_bytes:
                raise ForeignFileError(f"{path}, line {number}: has more than {max_bytes:,} bytes; the file is damaged")
            if line.endswith(b"\n"):
                yield line


def size_of(path: Path) -> int:
    """Return the size of a regular file; errors as in `open_regular`."""
    found = path.lstat()
    _refuse_irregular(path, found)
    return found.st_size


def copy(source: Path, target: Path) -> None:
    """Copy a regular file into a new one; FileExistsError if `target` is there already, even as a link."""
    with open_regular(source) as read_from, target.open("xb") as written:
        shutil.copyfileobj(read_from, written, 1 << 20)


def require_file(path: Path, *, owners: Collection[int]) -> None:
    """ForeignFileError unless `path` is a regular file of one of these users."""
    found = path.lstat()
    _refuse_irregular(path, found)
    _refuse_owner(path, found, owners)


def require_folder(path: Path, *, owners: Collection[int]) -> None:
    """Raise ForeignFileError unless `path` is a folder (not a link to one) that belongs to one of these users."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ForeignFileError(f"{path}: is not a folder, but a link or a file; it was not read")
    _refuse_owner(path, found, owners)


def require_plain(folder: Path, *, owners: Collection[int], may_link: bool = False) -> None:
    """Raise ForeignFileError unless `folder` contains, at any depth, only regular files and folders of these users.

    `may_link`: links to files are allowed, and links to folders inside `folder`. A folder that is missing or cannot be
    listed is not an error.
    """
    pending = [folder]
    while pending:
        path = pending.pop()
        with suppress(FileNotFoundError, PermissionError):
            found = path.lstat()
            _refuse_owner(path, found, owners)
            if stat.S_ISDIR(found.st_mode):
                pending += path.iterdir()
            elif not (may_link and stat.S_ISLNK(found.st_mode) and _is_harmless(path, folder)):
                _refuse_irregular(path, found)


def _is_harmless(link: Path, folder: Path) -> bool:
    try:
        return not link.is_dir() or link.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # links that lead in a circle
        return False


def _refuse_owner(path: Path, found: os.stat_result, owners: Collection[int]) -> None:
    if found.st_uid not in owners:
        raise ForeignFileError(f"{path}: belongs to another user than its folder; it was not read")


def _refuse_irregular(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kinds = {stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(found.st_mode), "a device")
        raise ForeignFileError(f"{path}: is {kind}, not a regular file; it was not read")
