"""Pushes the model to each server once, as a run does: publishes it in the version store and has each server load it.

This detects stores that another host cannot see or another user cannot read, and can time the pushes. Invariant:
afterwards each server has its former weights and label, and the disk is unchanged. Servers that hold other weights
than the model's are therefore skipped: their weights could not be restored. The caller sets the umask of a run
(`set_umask`).
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dora.app.build import enter_pushing
from dora.app.opening import open_store, publish_model
from dora.config.schema import Config
from dora.controller.published import Published
from dora.core.ids import FIRST_VERSION
from dora.engine.api import InferenceEngine, PushStage
from dora.engine.errors import PushFailed
from dora.engine.paths import map_path
from dora.errors import ConfigError, RemoteError
from dora.journal.run_folder import RunFolder
from dora.node.lease import hold
from dora.sim.fitting import TimedPush

#: Largest number of servers to which pushes at the same time are timed.
AT_ONCE: Final = 8
#: Number of times that pushes are timed, alone and at the same time; each is two pushes.
REPEATS: Final = 2


@dataclass(frozen=True, slots=True)
class Held:
    """A server and the weights that it holds before the push."""

    url: str
    field: str  # the setting that names the server
    label: str
    is_model: bool  # its weights are those of model.path

    @property
    def problem(self) -> str:
        """Why nothing is pushed to it, if `is_model` is False."""
        return (
            f"{self.field}: {self.url} holds other weights ('{self.label}') than model.path: nothing was pushed, since "
            "they could not be restored; start it with model.path"
        )


async def push_once(config: Config, *, model: Path, engine: InferenceEngine, servers: Sequence[Held]) -> None:
    """Push to every server; ConfigError with a line for each that could not load the model."""
    async with _trial(config, model=model, engine=engine) as trial:
        problems = [problem for held in servers for problem in await trial.problems(held)]
    if problems:
        raise ConfigError(*problems)


async def time_pushes(
    config: Config, *, model: Path, engine: InferenceEngine, servers: Sequence[Held]
) -> tuple[list[TimedPush], int]:
    """Push to the first server alone, then to up to `AT_ONCE` servers at the same time; return the times, and the bytes
    of the version.

    ConfigError with a line for each server that could not load the model.
    """
    several = servers[:AT_ONCE]
    async with _trial(config, model=model, engine=engine) as trial:
        for group in [several[:1]] * REPEATS + ([several] * REPEATS if len(several) > 1 else []):
            found = await asyncio.gather(*(trial.problems(held, together=len(group)) for held in group))
            if problems := [problem for one in found for problem in one]:
                raise ConfigError(*problems)
        return trial.pushes, trial.num_bytes


@asynccontextmanager
async def _trial(config: Config, *, model: Path, engine: InferenceEngine) -> AsyncIterator[_Trial]:
    """Publish the model in a store that is deleted at the end."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(_folder(config))
        store = await asyncio.to_thread(open_store, config, folder, model, stack)
        stack.callback(store.close)
        manifest = await asyncio.to_thread(publish_model, store, model)
        label = Published(folder.run_id, files={FIRST_VERSION: manifest.files}).label(FIRST_VERSION)
        lease = folder.lease(0)
        stack.enter_context(hold(lease))
        pushing = await enter_pushing(stack, config, engine, logs=folder.logs, lease=lease)
        yield _Trial(config, pushing, store.folder(FIRST_VERSION), label, manifest.num_bytes)


@dataclass(frozen=True, slots=True)
class _Trial:
    config: Config
    engine: InferenceEngine
    folder: Path
    label: str
    num_bytes: int  # of the version
    pushes: list[TimedPush] = field(default_factory=list)  # that succeeded

    async def problems(self, held: Held, *, together: int = 1) -> list[str]:
        """Push the version, then restore the label; return what went wrong. `together`: servers pushed to meanwhile."""
        if not held.is_model:
            return [held.problem]
        try:
            await self._push(held.url, self.label, together=together)
        except PushFailed as err:
            return [f"{held.field}: {held.url}: {err}{self._remedy(err)}{await self._changed(held)}"]
        try:
            await self._push(held.url, held.label, together=together)
        except PushFailed as err:
            return [f"{held.field}: {held.url} loaded the version, but its label was not restored: {err}; restart it"]
        return []

    async def _push(self, url: str, label: str, *, together: int) -> None:
        timeout_s, live = self.config.engine.push_timeout_s, self.config.rules.in_flight
        begun: dict[PushStage, float] = {}

        def on_stage(stage: PushStage) -> None:
            begun.setdefault(stage, time.monotonic())

        since = time.monotonic()
        await self.engine.push(url, folder=self.folder, label=label, timeout_s=timeout_s, live=live, on_stage=on_stage)
        took_s, load_s = time.monotonic() - since, begun["verify"] - begun["load"]
        self.pushes.append(TimedPush(together, load_s, took_s - load_s))

    def _remedy(self, err: PushFailed) -> str:
        if err.stage != "update" or self.config.weights.transfer != "disk":
            return ""
        seen = map_path(self.folder, self.config.engine.path_map)
        return (
            f"; it must be able to read {seen}: mount the folder there, set engine.path_map to where it is mounted, "
            "choose a folder that both can see (weights.memory_folder, run.folder), or set weights.transfer to "
            "distributed"
        )

    async def _changed(self, held: Held) -> str:
        try:
            label = await self.engine.label(held.url)
        except RemoteError:
            return "; it no longer answers"
        return "" if label == held.label else f"; it now holds '{label}': restart it"


@contextmanager
def _folder(config: Config) -> Iterator[RunFolder]:
    """Create a temporary run folder where a run would; delete it at the end, with the parents created for it."""
    parents = [config.run.folder.absolute(), *config.run.folder.absolute().parents]
    made = [path for path in parents if not path.exists()]
    folder = RunFolder.create(config.run.folder, name=f"{config.run.name}-check", group=config.run.group)
    try:
        yield folder
    finally:
        shutil.rmtree(folder.root, ignore_errors=True)
        with suppress(OSError):  # another run now uses it
            for path in made:
                path.rmdir()
