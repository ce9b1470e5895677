"""A version that arrives from other nodes: what of it has come, from whom, and whether it is right.

Files come one after another, each in pieces from its start, so that the first `num_bytes` of a file can be passed on
while the rest is under way. A source is believed nothing, and the manifest comes from elsewhere. Invariant: bytes count
only after the checksum of their piece was verified, a file is complete only with the checksum of the manifest, and no
more than the manifest's `num_bytes` are written. If a source fails, the next continues at the missing piece. One whose
file does not fit is not asked for that file again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from socket import SHUT_RDWR
from typing import Final, NoReturn, TypeVar
from urllib.parse import quote, urlsplit

import xxhash

from dora import files
from dora.weights.store import Manifest, StoreError, clear_errors

#: P, the size of a piece. D receivers in a row have S bytes after S/B + D P/B + c S/P seconds, with bandwidth B, and c
#: lost for a piece (1 ms): least for P = sqrt(c S B / D), or 1 to 15 MiB for 1 GiB, 0.1 to 1 GB/s, and D from 32 to 5.
PIECE_BYTES: Final = 4 << 20
PIECE_CHECKSUM: Final = "X-Piece-Checksum"  # header: XXH3, 128 bits, hex
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class VersionSource:
    """A node that has a version, or receives it."""

    url: str  # http://host:port
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    piece_bytes: int = PIECE_BYTES
    piece_s: float = 60.0  # to send or to receive a piece: less than 70 kB/s is a failure
    wait_s: float = 20.0  # until a piece that is asked for has arrived; below `piece_s`, in which the asker gives up
    idle_s: float = 10.0  # for a connection, and until a request on it is complete
    attempts: int = 16  # failures of all sources together
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
        running.exception()  # asyncio logs one that nobody has looked at
        raise


class ArrivingFile:
    """A file whose first `num_bytes` are on this machine. Only one thread at a time takes pieces."""

    def __init__(self, path: Path, *, checksum: str) -> None:
        """Create the file; an error if there is one, even a link."""
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_new(path, b"")
        self.path = path
        self.size: int | None = None  #: None before the first piece
        self.num_bytes = 0
        self.refused: set[str] = set()  #: URLs of sources whose file does not fit
        self._checksum = checksum
        self._givers: set[str] = set()  # URLs of the sources of these bytes
        self._hasher = xxhash.xxh3_128()

    def take(self, piece: memoryview, *, size: int, max_size: int, giver: str) -> None:
        """Append a verified piece; HTTPException, and the file starts again, if it does not fit the manifest."""
        self._givers.add(giver)
        if not 0 <= size <= max_size or self.size not in (None, size):
            self._start_again()
        with self.path.open("r+b") as file:
            file.seek(self.num_bytes)
            file.write(piece)
        self._hasher.update(piece)
        self.size = size
        self.num_bytes += len(piece)
        if self.num_bytes == size and self._hasher.hexdigest() != self._checksum:
            self._start_again()

    def _start_again(self) -> NoReturn:
        givers, self._givers = self._givers, set()
        if len(givers) == 1:  # with more, nobody knows whose bytes are wrong, until one of them gives the whole file
            self.refused |= givers
        self.num_bytes, self.size = 0, None
        self._hasher.reset()
        files.truncate(self.path, 0)
        raise HTTPException(f"the file, with bytes of {' and '.join(sorted(givers))}, does not fit the manifest")


class SourceLink(HTTPConnection):
    """A connection to a source, open from piece to piece. `receive` blocks; `break_off` ends it from another thread."""

    def __init__(self, source: VersionSource, *, limits: RelayLimits) -> None:
        address = urlsplit(source.url)
        if address.scheme != "http" or not address.hostname:
            raise HTTPException("an address is http://host:port")
        super().__init__(address.hostname, address.port, timeout=limits.idle_s)
        self.source = source
        self._is_broken_off = False

    def connect(self) -> None:
        super().connect()
        self.sock.settimeout(None)  # what takes too long is broken off
        if self._is_broken_off:
            raise TimeoutError

    def break_off(self) -> None:
        self._is_broken_off = True
        with suppress(OSError, AttributeError):  # it is not connected
            self.sock.shutdown(SHUT_RDWR)

    def receive(self, path: str, *, start: int, buffer: memoryview) -> tuple[memoryview, int]:
        """Return the verified piece from `start` on, which fills the buffer or ends the file, and the file's size."""
        asked = f"bytes={start}-{start + len(buffer) - 1}"
        self.request("GET", path, headers={"Authorization": f"Bearer {self.source.key}", "Range": asked})
        with self.getresponse() as answer:
            if answer.status not in (206, 416):
                raise HTTPException("the key is refused" if answer.status == 401 else f"HTTP status {answer.status}")
            given = answer.getheader("Content-Range", "")
            size = int(given.rpartition("/")[2])
            stop = max(start, min(start + len(buffer), size))
            expected = f"bytes {start}-{stop - 1}/{size}" if stop > start else f"bytes */{size}"
            if (given, answer.length) != (expected, stop - start):
                raise HTTPException("other bytes than those asked for")
            piece = buffer[: stop - start]
            is_whole = answer.readinto(piece) == len(piece)
            if not is_whole or xxhash.xxh3_128_hexdigest(piece) != answer.getheader(PIECE_CHECKSUM):
                raise HTTPException("a damaged piece")
        return piece, size


class Arrival:
    """A version on its way into a staging folder."""

    def __init__(self, manifest: Manifest, *, limits: RelayLimits) -> None:
        self.manifest = manifest
        self.files: dict[str, ArrivingFile] = {}  #: none until there is a folder for them
        self.has_ended = False
        self.scope = asyncio.timeout(None)  #: of the fetch; `stop` makes it expire
        self._limits = limits
        self._changed = asyncio.Event()  # replaced at each change
        self._failures: Counter[str] = Counter()  # by URL
        self._problems: dict[str, str] = {}  # the last one, by URL
        self._links: dict[VersionSource, SourceLink] = {}
        self._thread = ThreadPoolExecutor(1)  # of its own, as it waits for nodes that may wait for threads of this one

    def make_files(self, folder: Path) -> None:
        for name, checksum in self.manifest.files.items():
            self.files[name] = ArrivingFile(folder / name, checksum=checksum)

    async def receive(self, sources: Callable[[], Sequence[VersionSource]]) -> None:
        """Receive all files; StoreError after too many failures, or if they cannot be written."""
        buffer = memoryview(bytearray(self._limits.piece_bytes))
        try:
            for name, file in self.files.items():
                while file.num_bytes != file.size:
                    await self._receive_piece(name, self._choose(name, sources()), buffer)
                    self.tell()
        finally:
            self._thread.shutdown(wait=False)
            for link in self._links.values():
                link.close()

    def _choose(self, name: str, sources: Sequence[VersionSource]) -> VersionSource:
        usable = [source for source in sources if source.url not in self.files[name].refused]
        if not usable or self._failures.total() >= self._limits.attempts:
            told = "; ".join(f"{url}: {problem}" for url, problem in self._problems.items()) or "no node has it"
            raise StoreError(f"version {self.manifest.version}: cannot fetch {name}: {told}; check or name others")
        return min(usable, key=lambda source: self._failures[source.url])

    async def _receive_piece(self, name: str, source: VersionSource, buffer: memoryview) -> None:
        try:
            link = self._links.setdefault(source, SourceLink(source, limits=self._limits))
            async with asyncio.timeout(self._limits.piece_s):
                await in_thread(partial(self._take_piece, name, link, buffer), pool=self._thread, stop=link.break_off)
        except (OSError, HTTPException, ValueError) as err:
            if (broken := self._links.pop(source, None)) is not None:
                broken.close()
            self._failures[source.url] += 1
            told = str(err) if type(err) is HTTPException else getattr(err, "strerror", None)  # others quote the key
            self._problems[source.url] = told or f"no proper answer ({type(err).__name__})"
            await asyncio.sleep(min(5.0, self._limits.pause_s * 2.0 ** (self._failures.total() - 1)))

    def _take_piece(self, name: str, link: SourceLink, buffer: memoryview) -> None:
        version, file = self.manifest.version, self.files[name]
        piece, size = link.receive(f"/versions/{version}/{quote(name)}", start=file.num_bytes, buffer=buffer)
        max_size = self.manifest.num_bytes - sum(f.num_bytes for f in self.files.values() if f is not file)
        with clear_errors(f"cannot write {name} of version {version}"):
            file.take(piece, size=size, max_size=max_size, giver=link.source.url)

    def has(self, name: str, stop: int) -> bool:
        """Return whether the first `stop` bytes of a file, or all if these are fewer, can be passed on."""
        file = self.files.get(name)
        return file is not None and (file.num_bytes >= stop or file.num_bytes == file.size)

    async def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait until that is so, or until nothing more arrives."""
        while not (self.has_ended or is_so()):
            await self._changed.wait()

    def tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
