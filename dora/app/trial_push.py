"""One push to each server, as a run makes it: the model is published as a version in the store that a run would use,
and each server loads it from there. What another host cannot see, or another user may not read, shows here.

Invariant: afterwards each server holds the weights that it held, under their former label, and the disk is as it was.
So only servers that hold the model's weights already are given them: others could not be given back theirs. The umask
is that of a run (`set_umask`), so that others may read what they may read of a run.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dora.app.build import enter_pushing
from dora.app.inputs import model_bytes
from dora.app.settings import SPARE_VERSIONS
from dora.config.schema import Config
from dora.controller.published import Published
from dora.core.ids import FIRST_VERSION
from dora.engine.api import InferenceEngine
from dora.engine.errors import PushFailed
from dora.engine.paths import map_path
from dora.errors import ConfigError, RemoteError
from dora.journal.run_folder import RunFolder
from dora.node.lease import hold
from dora.weights.store import VersionStore, choose_memory_root, claim


@dataclass(frozen=True, slots=True)
class Held:
    """A server, and what it holds before the push."""

    url: str
    field: str  # what a user would change about it
    label: str
    is_model: bool  # its weights are those of model.path


async def push_once(config: Config, *, model: Path, engine: InferenceEngine, servers: Sequence[Held]) -> None:
    """ConfigError with a line for each server that could not take the model from the store."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(_folder(config))
        store = await asyncio.to_thread(_open_store, config, folder, model, stack)
        files = await asyncio.to_thread(_publish, store, model)
        label = Published(folder.run_id, files={FIRST_VERSION: files}).label(FIRST_VERSION)
        lease = folder.lease(0)
        stack.enter_context(hold(lease))
        pushing = await enter_pushing(stack, config, engine, logs=folder.logs, lease=lease)
        trial = _Trial(config, pushing, store.folder(FIRST_VERSION), label)
        problems = [problem for held in servers for problem in await trial.problems(held)]
    if problems:
        raise ConfigError(*problems)


@dataclass(frozen=True, slots=True)
class _Trial:
    config: Config
    engine: InferenceEngine
    folder: Path
    label: str

    async def problems(self, held: Held) -> list[str]:
        """Give it the version, and its former label back."""
        if not held.is_model:
            return [
                f"{held.field}: {held.url} holds other weights ('{held.label}') than model.path: nothing was pushed, "
                "since they could not be given back; start it with model.path"
            ]
        try:
            await self._push(held.url, self.label)
        except PushFailed as err:
            return [f"{held.field}: {held.url}: {err}{self._remedy(err)}{await self._left_behind(held)}"]
        try:
            await self._push(held.url, held.label)
        except PushFailed as err:
            return [f"{held.field}: {held.url} took the version, but not its former label again: {err}; restart it"]
        return []

    async def _push(self, url: str, label: str) -> None:
        timeout_s, live = self.config.engine.push_timeout_s, self.config.rules.in_flight
        await self.engine.push(url, folder=self.folder, label=label, timeout_s=timeout_s, live=live)

    def _remedy(self, err: PushFailed) -> str:
        if err.stage != "update" or self.config.weights.transfer != "disk":
            return ""
        seen = map_path(self.folder, self.config.engine.path_map)
        return (
            f"; it has to read {seen}: mount the folder there, say with engine.path_map where it lies, name one that "
            "both see (weights.memory_folder, run.folder), or set weights.transfer to distributed"
        )

    async def _left_behind(self, held: Held) -> str:
        try:
            label = await self.engine.label(held.url)
        except RemoteError:
            return "; it does not answer any more"
        return "" if label == held.label else f"; it holds '{label}' now: restart it"


@contextmanager
def _folder(config: Config) -> Iterator[RunFolder]:
    """As a run's, where a run's would be; it is deleted again, with the parents that were made for it."""
    parents = [config.run.folder.absolute(), *config.run.folder.absolute().parents]
    made = [path for path in parents if not path.exists()]
    folder = RunFolder.create(config.run.folder, name=f"{config.run.name}-check", group=config.run.group)
    try:
        yield folder
    finally:
        shutil.rmtree(folder.root, ignore_errors=True)
        with suppress(OSError):  # another run has begun in it
            for path in made:
                path.rmdir()


def _open_store(config: Config, folder: RunFolder, model: Path, stack: AsyncExitStack) -> VersionStore:
    root = choose_memory_root(
        config.weights.memory_folder,
        run_id=folder.run_id,
        needed_bytes=(config.max_staleness + 1 + SPARE_VERSIONS) * 2 * model_bytes(model),
        fallback=folder.versions,
        group=config.run.group,
    )
    if root != folder.versions:
        stack.enter_context(claim(root))
    store = VersionStore(memory_root=root, durable_root=folder.versions)
    stack.callback(store.close)
    return store


def _publish(store: VersionStore, model: Path) -> dict[str, str]:
    staged = store.stage(FIRST_VERSION)
    for path in sorted(path for path in model.iterdir() if path.is_file()):
        shutil.copyfile(path, staged / path.name)
    return dict(store.seal(FIRST_VERSION, staged).files)
