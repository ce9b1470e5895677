"""The adapters of the embedded engine by name, as in SGLang 0.5.23.

Traps of SGLang that are kept: an unload waits until no request of the adapter is live, and all later loads and unloads
wait for it; loads and unloads finish even if their caller has gone; /generate loads a name again that was unloaded,
from the folder that it had. One is not: SGLang dies of a matrix of another shape when the adapter is first used, and
here its load is refused. Invariant: a place belongs to one load, from its first byte until no live request has it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from dora.embedded.generation import LoadedAdapter
from dora.embedded.scheduler import AdapterPlaces, Scheduler
from dora.errors import ConfigError


class AdapterRefused(Exception):
    """A call about an adapter cannot be carried out; nothing has changed."""


class NamedAdapters:
    """Those that are loaded. Its methods run in the event loop."""

    def __init__(self, batcher: Scheduler) -> None:
        self._batcher = batcher
        self._loaded: dict[str, LoadedAdapter] = {}
        self._paths: dict[str, str] = {}  # of every adapter that was ever loaded, by name
        self._numbers = itertools.count(1)
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()  # loads and unloads that have begun

    @property
    def paths(self) -> dict[str, str]:
        """The folders of the loaded adapters, by name."""
        return {name: adapter.path for name, adapter in self._loaded.items()}

    async def find(self, name: str) -> LoadedAdapter:
        """Return a loaded adapter, or load it again. The caller submits its request before it awaits anything."""
        self._places()
        if name not in self._loaded:
            if name not in self._paths:
                raise AdapterRefused(f"Got LoRA adapter that has never been loaded: {name}")
            try:
                await self.load(name, self._paths[name])
            except AdapterRefused as err:
                if name not in self._loaded:
                    raise AdapterRefused(f"Failed to implicitly load LoRA adapter {name}: {err}") from err
        if (found := self._loaded.get(name)) is None:
            raise AdapterRefused(f"The following requested LoRA adapters are not loaded: {name}")
        return found

    async def load(self, name: str, path: str) -> None:
        await self._to_its_end(self._load(name, path))

    async def unload(self, name: str) -> None:
        await self._to_its_end(self._unload(name))

    def close(self) -> None:
        for change in self._changes:
            change.cancel()

    def _places(self) -> AdapterPlaces:
        if (places := self._batcher.model.adapters) is None:
            raise AdapterRefused("LoRA is not enabled: start the server with --max-lora-rank and --lora-target-modules")
        return places

    async def _to_its_end(self, change: Coroutine[Any, Any, None]) -> None:
        running = asyncio.create_task(change, name="change adapters")
        self._changes.add(running)
        running.add_done_callback(self._changes.discard)
        await asyncio.shield(running)

    async def _load(self, name: str, path: str) -> None:
        places = self._places()
        async with self._changing:
            if name in self._loaded:
                raise AdapterRefused(f"Failed to load LoRA adapter {name} because it is already loaded")
            free = sorted(set(range(places.room.count)) - {adapter.place for adapter in self._loaded.values()})
            if not free:
                raise AdapterRefused(
                    f"Failed to load LoRA adapter {name}: all {places.room.count} places are taken; unload one, or "
                    "start the server with more --max-loras-per-batch"
                )
            try:
                matrices = await asyncio.to_thread(places.read, Path(path))
            except ConfigError as err:
                raise AdapterRefused(f"Failed to load LoRA adapter {name}: {err}") from err
            await self._batcher.between_steps(lambda: places.put(free[0], matrices), on_thread=True)
            number = next(self._numbers)
            self._loaded[name] = LoadedAdapter(number=number, name=name, path=path, place=free[0])
            self._paths[name] = path

    async def _unload(self, name: str) -> None:
        self._places()
        async with self._changing:
            if (adapter := self._loaded.pop(name, None)) is None:
                loaded = ", ".join(self._loaded) or "none"
                raise AdapterRefused(f"LoRA with name {name} does not exist; loaded: {loaded}")
            await self._batcher.released(adapter)
