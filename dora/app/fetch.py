"""Fetches what a configuration names on the Hugging Face hub, before a folder or a process exists.

Invariant: the configuration that comes out names commits, and everything that a run reads at these commits is in the
cache, so that neither the run nor a resume asks the hub for anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dora.adapter_files import adapter_folder
from dora.app.estimate import size_text
from dora.config.schema import Config, SourceConfig
from dora.errors import ConfigError
from dora.extras import require_extra
from dora.hub import Checkout, Hub, Repo, in_daemon_thread, is_identifier
from dora.model_files import MAX_SMALL_BYTES, ModelFolders, is_small, used_names
from dora.seed.policy import model_folder
from dora.tasks import data_sets
from dora.tasks.sources import repository

#: Shows a line to the user, or text that replaces the one shown before.
Show = Callable[[str], None]

#: Downloads below this size are not worth a line.
_SMALL: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Needed:
    """What a run reads of a repository."""

    snapshot: Checkout
    names: list[str]

    @property
    def missing(self) -> list[str]:
        """The files that are not here yet."""
        return self.snapshot.missing(self.names)

    def __str__(self) -> str:
        size = size_text(self.snapshot.num_bytes(self.missing))
        here = len(self.names) - len(self.missing)
        return f"{self.snapshot.repo}: {size} in {len(self.missing)} files" + (
            f" ({here} more are here)" if here else ""
        )


async def fetch(config: Config, *, tell: Show, show: Show = lambda text: None) -> Config:
    """Download what a run reads; return the configuration with commits. `show`: progress."""

    def download() -> Config:
        hub = Hub(_Lines(tell, show))
        found, needed = _look(config, hub)
        for one in needed:
            hub.download(one.snapshot, one.names)
        return found

    return await asyncio.wrap_future(in_daemon_thread(download))


async def look(config: Config) -> tuple[Config, list[Needed]]:
    """Return the configuration with commits, and what would be downloaded. Only small files are downloaded."""

    def ask() -> tuple[Config, list[Needed]]:
        found, needed = _look(config, Hub(lambda repo, done, total: None))
        return found, [one for one in needed if one.missing]

    return await asyncio.wrap_future(in_daemon_thread(ask))


async def fetch_models(config: Config, *, tell: Show) -> ModelFolders:
    """Download the models alone; return their folders."""

    def download() -> ModelFolders:
        hub = Hub(_Lines(tell, lambda text: None))
        for repo in _models(config):
            one = _of_model(hub.open(repo), hub)
            hub.download(one.snapshot, one.names)
        return model_folders(config)

    return await asyncio.wrap_future(in_daemon_thread(download))


def at_recorded_commits(config: Config, recorded: Config) -> Config:
    """Return the configuration of a resume; of what it names without a revision, it has the commit of the run."""
    commits = {(repo.field, repo.id): repo.revision for repo in _repositories(recorded)}
    unpinned = [repo for repo in _repositories(config) if not repo.revision]
    return _pinned(config, {repo.field: commits.get((repo.field, repo.id), "") for repo in unpinned})


def fetch_small(config: Config) -> Config:
    """Download the small files of the models alone; return the configuration with the models' commits."""
    hub = Hub(lambda repo, done, total: None)
    for repo in _models(config):
        _of_model(hub.open(repo), hub)
    return _pinned(config, {repo.field: hub.open(repo).repo.revision for repo in _models(config)})


def fetch_rows(source: SourceConfig, *, field: str, tell: Show) -> None:
    """Download the files of a source, if it is a data set of the hub."""
    if (repo := repository(source, field=field)) is not None:
        require_extra("datasets", field=f"{field}.kind")
        hub = Hub(_Lines(tell, lambda text: None))
        needed = _of_data(hub.open(repo), source, hub, field=field)
        hub.download(needed.snapshot, needed.names)


def fetch_model(name: str, *, tell: Show) -> Path:
    """Return the folder of a model; if `name` is an id on the hub, download it."""
    if not is_identifier(name, "model"):
        return model_folder(name)
    hub = Hub(_Lines(tell, lambda text: None))
    one = _of_model(hub.open(Repo(name, "model", "", "--model")), hub)
    hub.download(one.snapshot, one.names)
    return one.snapshot.folder


def model_folders(config: Config) -> ModelFolders:
    """Return the folders, which are here."""
    model, objective = config.model, config.objective
    field = "objective.kl_reference"
    reference = (
        model_folder(objective.kl_reference, revision=objective.kl_revision, field=field)
        if objective.kl_reference and config.run.steps
        else None
    )
    adapter = adapter_folder(model.adapter) if model.adapter else None
    return ModelFolders(model_folder(model.path, revision=model.revision), reference, adapter)


def _look(config: Config, hub: Hub) -> tuple[Config, list[Needed]]:
    """Ask first, with one deadline for all answers; then look at each repository."""
    sources = [*_sources(config)]
    for field, source in sources:
        if source.kind == "datasets":
            require_extra("datasets", field=f"{field}.kind")
    data = {field: repo for field, source in sources if (repo := repository(source, field=field)) is not None}
    models = [*_models(config)]
    commits = {repo.field: hub.open(repo).repo.revision for repo in (*models, *data.values())}
    config = _pinned(config, commits)
    needed = [_of_model(hub.open(repo), hub) for repo in models]
    needed += [_of_data(hub.open(data[field]), source, hub, field=field) for field, source in sources if field in data]
    return config, needed


def _repositories(config: Config) -> Iterator[Repo]:
    yield from _models(config)
    for field, source in _sources(config):
        if (repo := repository(source, field=field)) is not None:
            yield repo


def _models(config: Config) -> Iterator[Repo]:
    if is_identifier(config.model.path, "model"):
        yield Repo(config.model.path, "model", config.model.revision, "model.path")
    if config.run.steps and is_identifier(config.objective.kl_reference, "model"):
        yield Repo(config.objective.kl_reference, "model", config.objective.kl_revision, "objective.kl_reference")


def _sources(config: Config) -> Iterator[tuple[str, SourceConfig]]:
    for index, source in enumerate(config.task.sources if config.run.steps else ()):
        yield f"task.sources.{index}", source
    for one in config.eval.sets:
        yield f"eval.sets.{one.name}.source", one.source


def _pinned(config: Config, commits: dict[str, str]) -> Config:
    """Return the configuration with commits, by the fields that name repositories."""

    def source(field: str, given: SourceConfig) -> SourceConfig:
        commit = commits.get(f"{field}.path")
        return given if commit is None else given.model_copy(update={"revision": commit})

    model, objective, task, sets = config.model, config.objective, config.task, config.eval.sets
    return config.model_copy(
        update={
            "model": model.model_copy(update={"revision": commits.get("model.path", model.revision)}),
            "objective": objective.model_copy(
                update={"kl_revision": commits.get("objective.kl_reference", objective.kl_revision)}
            ),
            "task": task.model_copy(
                update={"sources": tuple(source(f"task.sources.{i}", one) for i, one in enumerate(task.sources))}
            ),
            "eval": config.eval.model_copy(
                update={
                    "sets": tuple(
                        one.model_copy(update={"source": source(f"eval.sets.{one.name}.source", one.source)})
                        for one in sets
                    )
                }
            ),
        }
    )


def _of_model(snapshot: Checkout, hub: Hub) -> Needed:
    """Return what is read of a model. Its small files are downloaded: one of them lists those with the weights."""
    repo, sizes = snapshot.repo, snapshot.sizes
    small = [name for name in sizes if is_small(name)]
    if "config.json" not in small:
        raise ConfigError(f"{repo.field}: {repo} has no config.json, so it is no model that can be trained")
    if (size := snapshot.num_bytes(small)) > MAX_SMALL_BYTES:
        raise ConfigError(f"{repo.field}: config and tokenizer of {repo} have {size:,} bytes, which no model needs")
    hub.download(snapshot, small)
    names = used_names(snapshot.folder, sizes, field=repo.field)
    if len(names) == len(small):
        raise ConfigError(f"{repo.field}: {repo} has no *.safetensors, the only form of weights that is read")
    if absent := [name for name in names if name not in sizes]:
        raise ConfigError(f"{repo.field}: {repo} has an index that names {absent[0]}, which is not there")
    return Needed(snapshot, names)


def _of_data(snapshot: Checkout, source: SourceConfig, hub: Hub, *, field: str) -> Needed:
    """Return what is read of a data set. Its cards are downloaded: they say which files belong to the split."""
    cards = [name for name in data_sets.CARDS if name in snapshot.sizes]
    if (size := snapshot.num_bytes(cards)) > data_sets.MAX_CARD_BYTES:
        raise ConfigError(f"{field}.path: the README of {snapshot.repo} has {size:,} bytes; it was not read")
    hub.download(snapshot, cards)
    found = data_sets.find_split(snapshot.folder, snapshot.sizes, source, field=field)
    return Needed(snapshot, [*cards, *found.names])


class _Lines:
    """Tells the user of downloads, in lines and in text that shows how far they are."""

    def __init__(self, tell: Show, show: Show) -> None:
        self._tell = tell
        self._show = show
        self._began = ""

    def __call__(self, repo: Repo, done: int, total: int) -> None:
        if total < _SMALL:
            return
        if self._began != str(repo):
            self._began = str(repo)
            self._tell(f"downloading {repo}: {size_text(total)}")
        if done < total:
            self._show(f"downloading {repo}: {size_text(done)} of {size_text(total)}")
        else:
            self._show("")
            self._began = ""
