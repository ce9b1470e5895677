"""The relay of a node: it serves versions and checkpoints over HTTP, and fetches them from other nodes.

    GET /versions/<version>/<file>          with `Range: bytes=<first>-<last>`, of at most PIECE_BYTES
    GET /deltas/<base>-<version>/<file>
    GET /checkpoints/<name>/<file>

Invariant: only holders of the key are served, and only files that a manifest names, or ranks' files of checkpoints; of
what is still being fetched, pieces that have arrived. A request waits for bytes that may arrive soon. What is fetched
becomes visible complete, or not at all.

Where an adapter is trained, each node of a chain receives it from the node before, and makes the weights for itself
(weights/merging.py); what it cannot make, it receives.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog
import xxhash
from aiohttp import web
from aiohttp.typedefs import Handler

from dora import foreign
from dora.core.ids import VersionId
from dora.errors import ConfigError, DoraError
from dora.guard import CONNECTION_LOG, guard, knows
from dora.tls import TlsFiles
from dora.weights import checkpoints, delta, merging
from dora.weights.arrival import PIECE_BYTES, Arrival, RelayLimits, Sources, in_thread
from dora.weights.source import PIECE_CHECKSUM, SourceLink
from dora.weights.store import Manifest, StoreError, StoreFull, VersionLost, VersionStore

log = structlog.get_logger(__name__)

#: Maximum number of connections. A new one closes the oldest, those without the key first.
MAX_CONNECTIONS: Final = 64
#: Maximum number of deltas that are kept for others.
MAX_DELTAS: Final = 2
#: Number of versions of which it is known that they were released; who asks for an older one waits `wait_s` in vain.
MAX_RELEASED: Final = 64
DELTA_ATTEMPTS: Final = 3  #: before the whole version is fetched
_FOLDER: Final = "versions/[0-9]{1,9}|deltas/[0-9]{1,9}-[0-9]{1,9}|checkpoints/step-[0-9A-Za-z-]{1,30}"
_Made = TypeVar("_Made", Path, Path | None)
_RANGE: Final = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})")


class Relay:
    def __init__(
        self,
        store: VersionStore,
        *,
        key: str,
        checkpoints: Path | None = None,
        tls: TlsFiles | None = None,
        limits: RelayLimits | None = None,
    ) -> None:
        """`key`: which others need to ask this relay. `checkpoints`: their folder. `tls`: None for plain HTTP."""
        if not key:
            raise ConfigError("the key of the relay is empty, so that everyone would know it: draw one")
        self._store = store
        self._key = key
        self._checkpoints = checkpoints
        self._tls = tls
        self._limits = limits or RelayLimits()
        self._link_to = partial(SourceLink, idle_s=self._limits.idle_s, tls=tls.to_connect() if tls else None)
        self._changed = asyncio.Event()  # set when a piece has come, or a fetch begins or ends; then replaced
        self._fetches: dict[str, asyncio.Timeout] = {}  # by name; `stop` makes it expire
        self._arrivals: dict[str, Arrival] = {}  # what is being fetched, and the deltas that are kept
        self._deltas: list[str] = []  # kept
        self._settled: set[VersionId] = set()  # there will be no delta of it, or it is kept
        self._released: deque[str] = deque(maxlen=MAX_RELEASED)  # names of versions that will not be here again
        self._merges = True  # until weights that were made here were others than those of the version
        self._known: set[web.RequestHandler] = set()  # connections on which the key was shown

    @asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[str]:
        """Serve meanwhile, at the URL that is returned. Port 0: any free one."""
        app = web.Application(middlewares=[self._admit, guard(name=host, open_reads=False, refuse=_refuse)])
        app.router.add_get(f"/{{folder:{_FOLDER}}}/{{name:.+}}", self._serve)
        bounds: Any = {"keepalive_timeout": self._limits.idle_s, "lingering_time": 0.0, "shutdown_timeout": 1.0}
        runner = web.AppRunner(app, access_log=None, logger=CONNECTION_LOG, **bounds)
        await runner.setup()
        tls: Any = {"ssl": self._tls.to_listen(), "ssl_handshake_timeout": self._limits.idle_s} if self._tls else {}
        loop = asyncio.get_running_loop()
        try:
            listener = await loop.create_server(partial(self._connect, runner), host, port, **tls)
        except OSError as err:
            raise ConfigError(f"the relay cannot listen on {host}:{port}: {err.strerror}; choose another") from err
        try:
            address, port = listener.sockets[0].getsockname()[:2]
            yield f"http{'s' if tls else ''}://{f'[{address}]' if ':' in address else address}:{port}"
        finally:
            listener.close()
            await runner.cleanup()

    async def fetch(
        self, manifest: Manifest, sources: Sources, *, base: VersionId | None = None, model: Path | None = None
    ) -> None:
        """Bring a version into the store: if possible by its adapter and the folder `model`, else by its delta to the
        version `base`, else whole.

        `sources` is called before each piece; it returns the preferred one first.
        """
        version, name = manifest.version, f"versions/{manifest.version}"
        async with self._alone(name) as undo:
            if (staged := await _staged(partial(self._store.stage_copy, manifest), undo)) is None:
                return  # it is here
            is_made = merging.has_recipe(manifest) and merging.has_weights(manifest)
            merges = model is not None and self._merges and is_made
            has_delta = base is not None and not merges and await self._fetch_delta(manifest, sources, base, staged)
            self._settled.add(version)
            if not has_delta:
                arrival = self._begin(name, staged, manifest.files, manifest.num_bytes, undo)
                if model is not None and merges:
                    await self._merge(manifest, sources, arrival, model)
                await arrival.receive(sources, link_to=self._link_to, tell=self._tell)
            seal = partial(self._store.seal, version, staged, chain=manifest.chain, verified=manifest)
            if await in_thread(seal) != manifest:
                raise StoreError(f"cannot fetch {name}: ranks of this node have written it with other files meanwhile")

    async def _merge(self, manifest: Manifest, sources: Sources, arrival: Arrival, model: Path) -> None:
        """Receive all but the weights, and make these; those that cannot be made are left to be received."""
        stop = threading.Event()
        await arrival.receive(
            sources, link_to=self._link_to, tell=self._tell, is_wanted=lambda name: not merging.is_weights(name)
        )
        try:
            merge = await in_thread(partial(merging.Merge, model, arrival.folder, manifest))
            for name in merge.names:
                await in_thread(partial(merge.write, name, stop=stop), stop=stop.set)
                arrival.files[name].note_made()
                self._tell()
        except StoreFull:
            raise
        except StoreError as err:  # the model of a run does not change: later versions would fail too
            self._merges = False
            log.warning("versions_not_merged", version=manifest.version, reason=str(err))

    async def _fetch_delta(self, manifest: Manifest, sources: Sources, base: VersionId, staged: Path) -> bool:
        """Fill the folder `staged`. False, and the folder is empty, if there is no delta or it does not fit."""
        try:
            async with self._new_delta(manifest, base) as (old, arrival):
                await arrival.receive(sources, link_to=self._link_to, tell=self._tell)
                await in_thread(partial(delta.apply, old, arrival.folder, staged, manifest.files))
        except StoreError:
            await in_thread(partial(staged.mkdir, exist_ok=True))
            return False
        return True

    async def offer_delta(self, version: VersionId, base: VersionId) -> None:
        """Encode the delta of two versions that are here. Others may ask for it before that is done, or fails."""
        try:
            async with self._alone(f"deltas/{base}-{version}"):
                manifest = await in_thread(partial(self._store.manifest, version))
                new = await in_thread(partial(self._store.folder, version))
                async with self._new_delta(manifest, base) as (old, arrival):
                    for name, file in arrival.files.items():
                        await in_thread(partial(delta.encode, old, new, [name], arrival.folder))
                        file.note_made()
                        self._tell()
        finally:
            self._settled.add(version)
            self._tell()

    @asynccontextmanager
    async def _new_delta(self, manifest: Manifest, base: VersionId) -> AsyncIterator[tuple[Path, Arrival]]:
        """The folder of the base, and one for a delta, which is kept unless there is an error."""
        name, num_bytes = f"deltas/{base}-{manifest.version}", manifest.num_bytes + len(manifest.files) * delta.MAX_MORE
        await self._drop([kept for kept in self._deltas if kept == name])
        async with AsyncExitStack() as undo:
            old = await in_thread(partial(self._store.folder, base))
            folder = await _staged(partial(self._store.stage_delta, manifest.version), undo)
            yield old, self._begin(name, folder, dict.fromkeys(manifest.files), num_bytes, undo)
            undo.pop_all()
        self._deltas.append(name)
        await self._drop(self._deltas[:-MAX_DELTAS])

    async def fetch_checkpoint(
        self, name: str, files: Mapping[str, str], num_bytes: int, sources: Sources, *, into: Path
    ) -> None:
        """Bring these files (name -> checksum) of a checkpoint into its folder in `into`, beside those it has."""
        async with self._alone(f"checkpoints/{name}") as undo:
            if not (missing := await in_thread(partial(checkpoints.missing, into / name, files))):
                return
            staged = await _staged(partial(checkpoints.stage, into, name, num_bytes=num_bytes), undo)
            arrival = self._begin(f"checkpoints/{name}", staged, missing, num_bytes, undo)
            await arrival.receive(sources, link_to=self._link_to, tell=self._tell)
            await in_thread(partial(checkpoints.expose, staged, into / name, fence=self._store.fence))

    async def stop(self, version: VersionId) -> None:
        """End the fetch of a version that is released, and drop its deltas. The store then has all of it or nothing."""
        is_of_it = re.compile(rf"versions/{version}|deltas/[0-9]+-{version}").fullmatch
        for name in filter(is_of_it, self._fetches):
            if not self._fetches[name].expired():
                self._fetches[name].reschedule(0.0)
        while any(map(is_of_it, self._fetches)):
            await self._changed.wait()
        self._settled.discard(version)
        self._released.append(f"versions/{version}")
        await self._drop(list(filter(is_of_it, self._deltas)))

    async def _drop(self, deltas: Sequence[str]) -> None:
        for name in deltas:
            self._deltas.remove(name)
            await in_thread(partial(shutil.rmtree, self._arrivals.pop(name).folder, ignore_errors=True))

    @asynccontextmanager
    async def _alone(self, name: str) -> AsyncIterator[AsyncExitStack]:
        """The only fetch of this name, and what is to be undone after it."""
        if name in self._fetches:
            raise StoreError(f"{name} is already being fetched")
        with suppress(ValueError):
            self._released.remove(name)
        self._fetches[name] = scope = asyncio.timeout(None)
        try:
            async with scope, AsyncExitStack() as undo:
                yield undo
        except TimeoutError:
            raise StoreError(f"{name} was released meanwhile") from None
        finally:
            del self._fetches[name]
            self._tell()

    def _begin(
        self, name: str, folder: Path, checksums: Mapping[str, str | None], num_bytes: int, undo: AsyncExitStack
    ) -> Arrival:
        attempts = DELTA_ATTEMPTS if name.startswith("deltas/") else self._limits.attempts
        limits = replace(self._limits, attempts=attempts)
        arrival = self._arrivals[name] = Arrival(name, folder, checksums, num_bytes=num_bytes, limits=limits)
        undo.callback(self._tell)
        undo.callback(self._arrivals.pop, name)
        self._tell()
        return arrival

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _connect(self, runner: web.AppRunner) -> asyncio.BaseProtocol:
        """Return the protocol of a new connection, and close others if there are too many."""
        assert runner.server is not None
        open_ones = [handler for handler in runner.server.connections if handler.transport is not None]
        self._known.intersection_update(open_ones)
        excess = max(0, len(open_ones) - MAX_CONNECTIONS + 1)
        for handler in sorted(open_ones, key=self._known.__contains__)[:excess]:
            handler.force_close()
        return runner.server()

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not knows(self._key, request.headers):
            return _refuse(401, "Unauthorized")
        self._known.add(request.protocol)
        return await handler(request)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        key, name = request.match_info["folder"], request.match_info["name"]
        found = _RANGE.fullmatch(request.headers.get("Range", ""))
        start, stop = (int(found[1]), int(found[2]) + 1) if found else (0, 0)
        if not 0 < stop - start <= PIECE_BYTES:
            return _refuse(416, f"ask for bytes=<first>-<last>, at most {PIECE_BYTES}")
        try:
            async with asyncio.timeout(self._limits.wait_s):
                path, size = await self._find(key, name, stop)
            piece, headers = await in_thread(partial(self._read, key, name, path, size, start, stop))
        except TimeoutError:
            return _refuse(503, "these bytes have not arrived yet")
        except (OSError, DoraError):
            return _refuse(404, "this node does not have the file")
        return await self._send(request, piece, headers)

    async def _find(self, key: str, name: str, stop: int) -> tuple[Path, int | None]:
        """Wait until bytes of a file are here; TimeoutError if they were on their way, or here, but that has ended.

        Return its path, and the size that it will have if it is not complete.
        """
        is_on_its_way = False
        while True:
            changed, arrival = self._changed, self._arrivals.get(key)
            if arrival is None:
                if (path := await in_thread(partial(self._complete, key, name))) is not None:
                    return path, None
                if is_on_its_way or key in self._released:
                    raise TimeoutError
            elif name not in arrival.files:
                raise StoreError(f"{key} has no file {name}")
            elif (file := arrival.files[name]).has(stop):
                return file.path, file.size
            is_on_its_way = arrival is not None
            await changed.wait()

    def _complete(self, key: str, name: str) -> Path | None:
        """Return the path of a file; None if it is not here, but may be soon, StoreError if it will not be."""
        kind, _, folder = key.partition("/")
        if kind == "versions":
            try:
                path = self._store.folder(VersionId(int(folder)))
                is_named = name in self._store.manifest(VersionId(int(folder))).files
            except VersionLost:
                return None
        elif kind == "deltas" and VersionId(int(folder.partition("-")[2])) not in self._settled:
            return None
        elif kind == "checkpoints" and self._checkpoints is not None:
            path, is_named = self._checkpoints / folder, checkpoints.is_file_of(folder, name)
            if not path.exists():
                return None
        else:
            is_named = False
        if not is_named or (path / name).resolve() != path.parent.resolve() / path.name / name:
            raise StoreError(f"{key} has no file {name}, or it is behind a link")
        return path / name

    def _read(
        self, key: str, name: str, path: Path, size: int | None, start: int, stop: int
    ) -> tuple[bytes, dict[str, str]]:
        """Return bytes of a file, none behind its end, and the headers that describe them.

        TimeoutError if its fetch has just begun anew, or ended.
        """
        try:
            file = foreign.open_regular(path)
        except FileNotFoundError:  # it was made visible a moment ago
            if (visible := self._complete(key, name)) is None:
                raise TimeoutError from None
            file = foreign.open_regular(visible)
        with file:
            size = os.fstat(file.fileno()).st_size if size is None else size
            piece = os.pread(file.fileno(), max(0, min(stop, size) - start), start)
        given = f"bytes {start}-{start + len(piece) - 1}/{size}" if piece else f"bytes */{size}"
        return piece, {"Content-Range": given, PIECE_CHECKSUM: xxhash.xxh3_128_hexdigest(piece)}

    async def _send(self, request: web.Request, piece: bytes, headers: dict[str, str]) -> web.StreamResponse:
        response = web.Response(status=206 if piece else 416, headers=headers, body=piece)
        try:
            async with asyncio.timeout(self._limits.piece_s):
                await response.prepare(request)
                await response.write_eof()
        except OSError:  # the peer is gone, or too slow
            if request.transport is not None:
                request.transport.abort()
        return response


async def _staged(make: Callable[[], _Made], undo: AsyncExitStack) -> _Made:
    """Make a folder in a thread; `undo` deletes it, if it is there still."""

    def stage() -> _Made:
        if (folder := make()) is not None:
            undo.push_async_callback(in_thread, partial(shutil.rmtree, folder, ignore_errors=True))
        return folder

    return await in_thread(stage)


def _refuse(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=f"{text}\n")
