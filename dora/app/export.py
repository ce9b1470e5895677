"""Exports a policy version as a Hugging Face model folder, or its adapter, and verifies its checksums.

The weights of a version that is its adapter alone are made of the model that the run has trained.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from threading import Event
from typing import Final

from dora import foreign
from dora.adapter_files import PROOF
from dora.config.recorded import read_recorded
from dora.core.ids import VersionId
from dora.errors import ConfigError
from dora.journal.run_folder import RunFolder
from dora.seed.policy import model_folder
from dora.weights.file_plan import INDEX
from dora.weights.merging import RECIPE, Merge, has_weights
from dora.weights.store import ADAPTER, Manifest, StoreError, VersionStore, checksum_of, clear_errors

#: Files beside an adapter that only DORA reads.
_NOT_EXPORTED: Final = frozenset({RECIPE, f"{ADAPTER}/{PROOF}"})


def stored_version(run: RunFolder, version: VersionId | None, *, option: str) -> tuple[VersionId, VersionStore]:
    """Return `version` (default: the newest) and the durable store that has it; ConfigError if there is none."""
    run.require_plain(run.versions)
    store = VersionStore(memory_root=run.versions, durable_root=run.versions)
    durable = store.durable()
    if not durable:
        raise ConfigError(f"{run.versions}: no complete version; did the run end before it published one?")
    chosen = durable[-1] if version is None else version
    if chosen not in durable:
        known = f"{durable[0]} to {durable[-1]}" if len(durable) > 1 else str(durable[0])
        raise ConfigError(f"{option}: {run.versions} has {known}; weights.keep decides which are kept")
    return chosen, store


def export(
    run: RunFolder, *, version: VersionId | None, to: Path | None, adapter: bool = False
) -> tuple[VersionId, Path]:
    """Copy `version` (default: the newest) to `to` (default: the run folder); return the version and its folder.

    `adapter`: copy its adapter alone; ConfigError if the run trained none.
    """
    chosen, store = stored_version(run, version, option=f"--version {version}")
    target = to or run.root / f"export-v{chosen}{'-adapter' if adapter else ''}"
    if target.exists():
        raise ConfigError(f"{target}: already exists; choose another folder with --to")
    source, manifest = store.folder(chosen), store.manifest(chosen)
    inside = f"{ADAPTER}/"
    chosen_files = {
        name: checksum
        for name, checksum in manifest.files.items()
        if name.startswith(inside) is adapter and name not in _NOT_EXPORTED
    }
    if not chosen_files:
        raise ConfigError(f"--adapter: version {chosen} of {run.root} has none, as the run trained all weights")
    model = None if adapter or has_weights(manifest) else trained_model(run)
    what = f"--to {target}: cannot be written"
    with clear_errors(what):
        target.mkdir(parents=True)
    try:
        with clear_errors(what):
            for name, checksum in chosen_files.items():
                copy = target / name.removeprefix(inside)
                copy.parent.mkdir(parents=True, exist_ok=True)
                foreign.copy(source / name, copy)
                if checksum_of(copy) != checksum:
                    raise StoreError(f"{source / name}: does not match its checksum; version {chosen} is damaged")
            if model is not None:
                _merge(model, source, manifest, into=target)
    except BaseException:  # Ctrl-C, too: what is left would pass for a model
        shutil.rmtree(target, ignore_errors=True)
        raise
    return chosen, target


def trained_model(run: RunFolder) -> Path:
    """Return the folder of the model that a run trains; ConfigError if it is not here."""
    model = read_recorded(run.config, environ={}).model
    return model_folder(model.path, revision=model.revision)


def with_weights(run: RunFolder, version: VersionId, store: VersionStore) -> Path:
    """Return a folder of a version that has its weights; if it is an adapter alone, they are made, and kept."""
    if has_weights(store.manifest(version)):
        return store.folder(version)
    if os.path.lexists(run.merged):
        run.require_plain(run.merged)
    merged = VersionStore(memory_root=run.merged, durable_root=run.merged)
    if version not in merged.durable() or merged.differing(version):
        merged.discard(version)
        staged = merged.stage(version)
        with clear_errors(f"cannot make the weights of version {version} in {run.merged}", remove=staged):
            staged.rmdir()
            export(run, version=version, to=staged)
        merged.seal(version, staged, chain=store.manifest(version).chain)
    return merged.folder(version)


def _merge(model: Path, source: Path, manifest: Manifest, *, into: Path) -> None:
    """Write the weights of the version in the folder `source`, an adapter alone."""
    merge = Merge(model, source, manifest, into=into)
    for name in merge.names:
        merge.write(name, stop=Event())
    if (index := merge.index) is not None:
        (into / INDEX).write_bytes(index)
