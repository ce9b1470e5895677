"""A folder that arrives from other nodes: what has arrived, from which source, and whether it is correct.

Files come one after another, each in pieces from its start, so that the first `num_bytes` of a file can be passed on
while the rest is under way; the next piece is asked for before one is hashed and written. Some files may be made here
instead. A source is believed nothing, and checksums come from elsewhere. Invariant: bytes count only after the checksum
of their piece was verified, a file is complete only with its own checksum, if one is given, and no more than the
folder's `num_bytes` are written. If a source fails, or is named no more, the next continues at the missing piece. One
whose file twice did not fit is not asked for it again; the first time it may have passed on what another has made up.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar
from urllib.parse import quote

import xxhash

from dora import files
from dora.weights.source import SourceLink, VersionSource
from dora.weights.store import StoreError, clear_errors

#: P, the size of a piece. D receivers in a row have S bytes after S/B + D P/B + c S/P seconds, with bandwidth B, and c
#: lost for a piece (1 ms): least for P = sqrt(c S B / D), or 1 to 15 MiB for 1 GiB, 0.1 to 1 GB/s, and D from 32 to 5.
PIECE_BYTES: Final = 4 << 20
_MAX_STRIKES: Final = 2
_AHEAD: Final = 2  #: pieces that are asked for before one is written
_LOOK_S: Final = 1.0  #: how often it is looked whether the source of a piece is still named
Sources = Callable[[], Sequence[VersionSource]]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    piece_bytes: int = PIECE_BYTES
    piece_s: float = 60.0  # to send or to receive a piece: less than 70 kB/s is a failure
    wait_s: float = 20.0  # until a piece that is asked for has arrived; below `piece_s`, in which the asker gives up
    idle_s: float = 10.0  # for a connection, and until a request on it is complete
    attempts: int = 16  # failures of all sources together without a piece between them
    pause_s: float = 0.1  # after the first of them; doubles, up to 5 s


async def in_thread(
    call: Callable[[], _T], *, pool: Executor | None = None, stop: Callable[[], None] = lambda: None
) -> _T:
    """Run a call in a thread. If cancelled, `stop` the call and wait for its end."""
    running = asyncio.get_running_loop().run_in_executor(pool, call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop()
        await asyncio.wait({running})
        running.exception()  # asyncio logs an exception that was never retrieved
        raise


async def _while_named(source: VersionSource, sources: Sources, taking: Coroutine[Any, Any, None]) -> None:
    """Wait for a piece; end it with TimeoutError once others are named instead of its source."""
    running = asyncio.ensure_future(taking)
    try:
        while not (await asyncio.wait({running}, timeout=_LOOK_S))[0]:
            if source not in sources():
                raise TimeoutError
        running.result()
    finally:
        running.cancel()
        await asyncio.wait({running})


class ArrivingFile:
    """A file whose first `num_bytes` are on this machine. Only one thread at a time takes pieces."""

    def __init__(self, path: Path, checksum: str | None) -> None:
        self.path = path
        self.size: int | None = None  #: None before the first piece
        self.num_bytes = 0
        self.strikes: Counter[str] = Counter()  #: by URL of a source, how often a file with bytes of it did not fit
        self._checksum = checksum
        self._givers: set[str] = set()  # URLs of the sources of these bytes
        self._hasher = xxhash.xxh3_128()

    def has(self, stop: int) -> bool:
        """Return whether the first `stop` bytes, or all if these are fewer, can be passed on."""
        return self.num_bytes >= stop or self.num_bytes == self.size

    def note_made(self) -> None:
        """The whole file was made here, and is correct."""
        self.num_bytes = self.size = self.path.stat().st_size

    def take(self, piece: memoryview, *, size: int, max_size: int, giver: str) -> None:
        """Append a verified piece; HTTPException, and the file starts again, if it does not fit."""
        self._givers.add(giver)
        if not 0 <= size <= max_size or self.size not in (None, size):
            self._start_again()
        if not self.num_bytes:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("r+b" if self.num_bytes else "xb") as file:
            file.seek(self.num_bytes)
            file.write(piece)
        self._hasher.update(piece)
        if self.num_bytes + len(piece) == size and self._checksum not in (None, self._hasher.hexdigest()):
            self._start_again()
        self.size = size
        self.num_bytes += len(piece)

    def _start_again(self) -> NoReturn:
        givers = sorted(self._givers)
        self.strikes.update(givers)
        self._givers.clear()
        self._hasher.reset()
        self.num_bytes, self.size = 0, None
        files.remove(self.path)
        raise HTTPException(f"the file, with bytes of {' and '.join(givers)}, does not fit the manifest")


class Arrival:
    """A folder on its way."""

    def __init__(
        self, name: str, folder: Path, checksums: Mapping[str, str | None], *, num_bytes: int, limits: RelayLimits
    ) -> None:
        """`name`: as in URLs. `checksums`: of all files, if known. `num_bytes`: maximum of all files together."""
        self.name = name
        self.folder = folder
        self.files = {file: ArrivingFile(folder / file, checksum) for file, checksum in checksums.items()}
        self._num_bytes = num_bytes
        self._limits = limits
        self._link: SourceLink | None = None
        self._failures: Counter[str] = Counter()  # by URL
        self._num_in_vain = 0  # failures since the last piece
        self._problems: dict[str, str] = {}  # the last one, by URL

    async def receive(
        self,
        sources: Sources,
        *,
        link_to: Callable[[VersionSource], SourceLink],
        tell: Callable[[], None],
        is_wanted: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """Receive the files that are wanted and not here, and `tell` of each piece. StoreError after too many failures,
        or if a file cannot be written."""
        buffer = memoryview(bytearray(self._limits.piece_bytes))
        thread = ThreadPoolExecutor(1)  # of its own, as it waits for nodes that may wait for threads of this one
        try:
            for name, file in self.files.items():
                while is_wanted(name) and file.num_bytes != file.size:
                    source = self._choose(name, sources())
                    try:
                        if self._link is None or self._link.source != source:
                            self._close_link()
                            self._link = link_to(source)
                        async with asyncio.timeout(self._limits.piece_s):
                            take = partial(self._take_piece, name, self._link, buffer)
                            taking = in_thread(take, pool=thread, stop=self._link.break_off)
                            await _while_named(source, sources, taking)
                        self._num_in_vain = 0
                        tell()
                    except (OSError, HTTPException, ValueError) as err:
                        await self._note(err, file, source)
        finally:
            thread.shutdown(wait=False)
            self._close_link()

    def _choose(self, name: str, sources: Sequence[VersionSource]) -> VersionSource:
        strikes, attempts = self.files[name].strikes, self._limits.attempts
        usable = [source for source in sources if strikes[source.url] < _MAX_STRIKES]
        if not usable or self._num_in_vain >= attempts:
            told = "; ".join(f"{url}: {problem}" for url, problem in self._problems.items()) or "no node has it"
            raise StoreError(f"cannot fetch {self.name}/{name}: {told}; check or name others")
        return min(usable, key=lambda source: self._failures[source.url] + attempts * strikes[source.url])

    def _take_piece(self, name: str, link: SourceLink, buffer: memoryview) -> None:
        file, path, num_bytes = self.files[name], f"/{self.name}/{quote(name)}", len(buffer)
        stop = min(file.num_bytes + (1 + _AHEAD) * num_bytes, file.size or 1)  # of the first piece nothing is known
        for start in range(file.num_bytes, stop, num_bytes):
            link.ask(path, start=start, num_bytes=num_bytes)
        piece, size = link.receive(buffer)
        max_size = self._num_bytes - sum(f.num_bytes for f in self.files.values() if f is not file)
        with clear_errors(f"cannot write {self.name}/{name}"):
            file.take(piece, size=size, max_size=max_size, giver=link.source.url)

    async def _note(self, err: Exception, file: ArrivingFile, source: VersionSource) -> None:
        """Remember a failure of a source, and pause."""
        self._close_link()
        told = str(err) if type(err) is HTTPException else getattr(err, "strerror", None)
        self._problems[source.url] = told or f"no proper answer ({type(err).__name__})"
        if isinstance(err, FileNotFoundError):
            file.strikes[source.url] = _MAX_STRIKES
            return
        self._failures[source.url] += 1
        self._num_in_vain += 1
        await asyncio.sleep(min(5.0, self._limits.pause_s * 2.0 ** (self._num_in_vain - 1)))

    def _close_link(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
