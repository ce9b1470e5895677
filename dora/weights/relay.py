"""The relay of a node: it serves versions over HTTP, and fetches versions from other nodes into the store.

    GET /versions/<version>/manifest.json
    GET /versions/<version>/<file>          with `Range: bytes=<first>-<last>`, of at most PIECE_BYTES

Invariant: only holders of the key are served, and only files that a manifest names; of a version that is still being
fetched, pieces that have arrived, for which a request waits. What is fetched becomes visible complete, or not at all.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

import xxhash
from aiohttp import web
from aiohttp.typedefs import Handler

from dora import foreign
from dora.core.ids import VersionId
from dora.errors import ConfigError, DoraError
from dora.guard import CONNECTION_LOG, guard, knows
from dora.weights.arrival import PIECE_BYTES, PIECE_CHECKSUM, Arrival, RelayLimits, VersionSource, in_thread
from dora.weights.store import MANIFEST, Manifest, StoreError, VersionStore, clear_errors

#: Maximum number of connections. A new one closes the oldest, those without the key first.
MAX_CONNECTIONS: Final = 64
_RANGE: Final = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})")
#: Bytes written at once. A piece was just read for its checksum; sending it from memory is faster than sendfile.
_BLOCK_BYTES: Final = 1 << 18


class Relay:
    def __init__(self, store: VersionStore, *, key: str, limits: RelayLimits | None = None) -> None:
        """`key`: which others need to ask this relay."""
        if not key:
            raise ConfigError("the key of the relay is empty, so that everyone would know it: draw one")
        self._store = store
        self._key = key
        self._limits = limits or RelayLimits()
        self._arrivals: dict[VersionId, Arrival] = {}
        self._known: set[web.RequestHandler] = set()  # connections on which the key was shown

    @asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[str]:
        """Serve meanwhile, at the URL that is returned. Port 0: any free one."""
        app = web.Application(middlewares=[self._admit, guard(name=host, open_reads=False, refuse=_refuse)])
        app.router.add_get("/versions/{version:[0-9]{1,9}}/{name:.+}", self._serve)
        bounds: Any = {"keepalive_timeout": self._limits.idle_s, "lingering_time": 0.0, "shutdown_timeout": 1.0}
        runner = web.AppRunner(app, access_log=None, logger=CONNECTION_LOG, **bounds)
        await runner.setup()
        try:
            listener = await asyncio.get_running_loop().create_server(partial(self._connect, runner), host, port)
        except OSError as err:
            raise ConfigError(f"the relay cannot listen on {host}:{port}: {err.strerror}; choose another") from err
        try:
            address, port = listener.sockets[0].getsockname()[:2]
            yield f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
        finally:
            listener.close()
            await runner.cleanup()

    async def fetch(self, manifest: Manifest, sources: Callable[[], Sequence[VersionSource]]) -> None:
        """Bring a version into the store. `sources` is called before each piece; it returns the preferred one first."""
        version = manifest.version
        if version in self._arrivals:
            raise StoreError(f"version {version} is already being fetched")
        arrival = self._arrivals[version] = Arrival(manifest, limits=self._limits)
        try:
            async with arrival.scope, AsyncExitStack() as undo:
                if (staged := await in_thread(partial(self._stage, arrival, undo))) is not None:
                    await arrival.receive(sources)
                    seal = partial(self._store.seal, version, staged, chain=manifest.chain, expected=manifest)
                    await in_thread(seal)
        except TimeoutError:
            raise StoreError(f"version {version} was released while it was fetched") from None
        finally:
            del self._arrivals[version]
            arrival.has_ended = True
            arrival.tell()

    async def stop(self, version: VersionId) -> None:
        """End the fetch of a version that is released. Afterwards the store has all of it, or nothing."""
        if (arrival := self._arrivals.get(version)) is not None:
            if not arrival.scope.expired():
                arrival.scope.reschedule(0.0)
            await arrival.wait_until(lambda: False)

    def _stage(self, arrival: Arrival, undo: AsyncExitStack) -> Path | None:
        """Create the files of a version, all empty; None if the store has it already."""
        if (staged := self._store.stage_copy(arrival.manifest)) is not None:
            undo.push_async_callback(in_thread, partial(shutil.rmtree, staged, ignore_errors=True))
            with clear_errors(f"cannot stage version {arrival.manifest.version} in {staged.parent}"):
                arrival.make_files(staged)
        return staged

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
        version, name = VersionId(int(request.match_info["version"])), request.match_info["name"]
        arrival = self._arrivals.get(version)
        try:
            manifest = arrival.manifest if arrival else await in_thread(partial(self._store.manifest, version))
            if name == MANIFEST:
                return web.Response(body=manifest.encode(), content_type="application/json")
            if name not in manifest.files:
                return _refuse(404, "the version has no such file")
            found = _RANGE.fullmatch(request.headers.get("Range", ""))
            start, stop = (int(found[1]), int(found[2]) + 1) if found else (0, 0)
            if not 0 < stop - start <= PIECE_BYTES:
                return _refuse(416, f"ask for bytes=<first>-<last>, at most {PIECE_BYTES}")
            if arrival is not None:
                async with asyncio.timeout(self._limits.wait_s):
                    await arrival.wait_until(partial(arrival.has, name, stop))
            piece, headers = await in_thread(partial(self._read, version, name, start, stop))
        except TimeoutError:
            return _refuse(503, "these bytes have not arrived yet")
        except (OSError, DoraError):
            return _refuse(404, "this node does not have the version")
        return await self._send(request, piece, headers)

    def _read(self, version: VersionId, name: str, start: int, stop: int) -> tuple[bytes, dict[str, str]]:
        """Return bytes of a file, none behind its end, and the headers that describe them."""
        size, file = self._open(version, name)
        with file:
            piece = os.pread(file.fileno(), max(0, min(stop, size) - start), start)
        given = f"bytes {start}-{start + len(piece) - 1}/{size}" if piece else f"bytes */{size}"
        return piece, {"Content-Range": given, PIECE_CHECKSUM: xxhash.xxh3_128_hexdigest(piece)}

    def _open(self, version: VersionId, name: str) -> tuple[int, BufferedReader]:
        """Return the size that a file has when it is complete, and the open file."""
        arrival = self._arrivals.get(version)
        if arrival is not None and name in arrival.files and (size := arrival.files[name].size) is not None:
            with suppress(FileNotFoundError):  # it was made visible a moment ago
                return size, foreign.open_regular(arrival.files[name].path)
        folder = self._store.folder(version)
        if (folder / name).resolve() != folder.resolve() / name:
            raise StoreError(f"{folder / name} is behind a link")
        return foreign.size_of(folder / name), foreign.open_regular(folder / name)

    async def _send(self, request: web.Request, piece: bytes, headers: dict[str, str]) -> web.StreamResponse:
        response = web.StreamResponse(status=206 if piece else 416, headers=headers)
        response.content_length = len(piece)
        try:
            async with asyncio.timeout(self._limits.piece_s):
                await response.prepare(request)
                for at in range(0, len(piece) if request.method == "GET" else 0, _BLOCK_BYTES):
                    await response.write(memoryview(piece)[at : at + _BLOCK_BYTES])
        except OSError:  # the peer is gone, or too slow
            if request.transport is not None:
                request.transport.abort()
        return response


def _refuse(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=f"{text}\n")
