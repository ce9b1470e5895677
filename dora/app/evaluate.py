"""What an evaluation is: the run of a configuration that trains nothing (`run.steps` = 0), on sets chosen from it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from dora.app.export import stored_version, with_weights
from dora.config.schema import Config, EvalSetConfig, RunConfig
from dora.core.ids import VersionId
from dora.errors import ConfigError
from dora.journal.run_folder import RunFolder
from dora.weights.store import VersionStore

#: Maximum number of answers whose text is kept, if the configuration does not keep more.
MAX_KEPT: Final = 1_000


class NamedVersion(NamedTuple):
    """A version of a run."""

    run: RunFolder
    version: VersionId
    store: VersionStore

    @property
    def folder(self) -> Path:
        """Its folder in the store."""
        return self.store.folder(self.version)

    def with_weights(self) -> Path:
        """Return a folder with its weights, which are made if it is an adapter alone."""
        return with_weights(self.run, self.version, self.store)


def run_named(name: str) -> tuple[RunFolder, str] | None:
    """Return the run that RUN or RUN@VERSION names, and VERSION or ""; None if it does not name a run."""
    run, _, version = name.rpartition("@")
    if RunFolder(Path(name)).journal.is_file():
        run, version = name, ""
    elif not run or not RunFolder(Path(run)).journal.is_file():
        return None
    return RunFolder.open(Path(run)), version


def version_named(name: str) -> NamedVersion | None:
    """Return the version that RUN or RUN@VERSION names; None if it does not name a run."""
    if (named := run_named(name)) is None:
        return None
    folder, version = named
    if version and not version.isdecimal():
        raise ConfigError(f"--model {name}: {version!r} is not the number of a version; write it as RUN@VERSION")
    chosen, store = stored_version(folder, VersionId(int(version)) if version else None, option=f"--model {name}")
    if damaged := store.differing(chosen):
        raise ConfigError(f"--model {name}: {damaged} does not match its checksum: version {chosen} is damaged")
    return NamedVersion(folder, chosen, store)


def evaluation_of(config: Config, *, samples: int | None = None, prompts: int | None = None) -> Config:
    """Return a configuration without steps as that of an evaluation.

    `samples`: answers per prompt. Greedy sets are then sampled at `rollout.temperature`, as their answers would all be
    equal. `prompts`: largest number per set. Without held-out sets, the task's sources are scored.
    """
    sets = config.eval.sets or _sets_of_task(config)
    chosen = [_adapted(one, samples=samples, prompts=prompts, temperature=config.rollout.temperature) for one in sets]
    num_answers = sum(one.prompts * one.samples for one in chosen)
    kept = max(config.log.trajectories_per_step, min(num_answers, MAX_KEPT))
    return config.model_copy(
        update={
            "run": evaluation_name(config.run),
            "eval": config.eval.model_copy(update={"sets": tuple(chosen)}),
            "log": config.log.model_copy(update={"trajectories_per_step": kept}),
        }
    )


def evaluation_name(run: RunConfig) -> RunConfig:
    """Return the settings with the name of an evaluation, which is not taken for a run of the same name."""
    return run.model_copy(update={"name": f"{run.name.removesuffix('-eval')}-eval"})


def _sets_of_task(config: Config) -> list[EvalSetConfig]:
    """Return a set for each source of the task, sampled as in training."""
    names: dict[str, None] = {}
    for index, source in enumerate(config.task.sources):
        name = source.label or source.name or (source.path.name if source.path is not None else source.kind)
        names[name if name not in names else f"{name}-{index}"] = None
    return [
        EvalSetConfig(name=name, source=source, temperature=config.rollout.temperature)
        for name, source in zip(names, config.task.sources, strict=True)
    ]


def _adapted(one: EvalSetConfig, *, samples: int | None, prompts: int | None, temperature: float) -> EvalSetConfig:
    number = one.samples if samples is None else samples
    update = {
        "samples": number,
        "prompts": one.prompts if prompts is None else prompts,
        "temperature": one.temperature or (temperature if samples is not None and samples > 1 else 0.0),
    }
    return one.model_copy(update=update)


def overrides_of(*, model: str | Path | None, urls: Sequence[str], of_task: bool) -> list[str]:
    """Return the settings, as `key=value`, that every evaluation has, and those that these options stand for."""
    found = ["status.port=0", "engine.instances=0", "nodes.expected=0"] if urls else ["status.port=0"]
    if of_task:
        found.append("eval.sets=[]")  # they may be of another task
    if urls:
        found.append(f"engine.urls={json.dumps(list(urls))}")
    if model is not None:
        found += [f"model.path={json.dumps(str(model))}", 'model.revision=""', 'model.adapter=""']
    return found
