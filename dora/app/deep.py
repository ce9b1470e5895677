"""Recomputes the log-probs of kept answers, which shows the version that each answer came from.

Versions and kept trajectories are first compared with what the run recorded: altered data would prove nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dora.app.export import trained_model
from dora.config.recorded import RecordedConfig
from dora.config.schema import Config
from dora.core.commands import AdmitGroup
from dora.core.events import VersionPublished
from dora.core.ids import GroupId, VersionId
from dora.errors import ConfigError
from dora.journal.deep import DeepReport, altered_rows, deep_check, read_kept
from dora.journal.reader import Journal
from dora.journal.run_folder import RunFolder
from dora.journal.tokens import read_tokens
from dora.weights.merging import has_weights, made_of
from dora.weights.store import ADAPTER, StoreError, VersionStore, checksum_of


def recompute(run: RunFolder, config: Config | RecordedConfig) -> DeepReport:
    """Compare the log-probs of kept trajectories with the trainer's, under their version and the next.

    The journal and the token store must be undamaged.
    """
    if not run.trajectories.is_file():
        raise ConfigError(f"{run.trajectories}: no trajectories were kept; set log.trajectories_per_step")
    import torch

    from dora.trainer.score import score

    torch.set_num_threads(config.trainer.threads)  # as in a rank: on a busy host, more threads wait for each other

    def score_responses(
        version: Path, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]
    ) -> Sequence[npt.NDArray[np.float32]]:
        model, adapter = version, None
        if version in adapters:
            model, adapter = trained_model(run), version / ADAPTER
            made_of(model, version)
        return score(
            model,
            sequences,
            adapter=adapter,
            prompt_lengths=prompt_lengths,
            temperature=config.rollout.temperature,
            device=config.trainer.device,
            dtype=config.trainer.dtype,
            fp32_head=config.trainer.fp32_head,
        )

    run.require_plain(run.versions)
    store = VersionStore(memory_root=run.versions, durable_root=run.versions)
    journal = Journal(run.journal)
    published: dict[VersionId, Mapping[str, str]] = {}
    tags: dict[GroupId, VersionId] = {}
    for event, commands in journal:
        if isinstance(event, VersionPublished):
            published.setdefault(event.version, event.files)
        tags.update((order.group, order.version) for order in commands if isinstance(order, AdmitGroup))
    altered = dict(_altered_versions(store, published))
    adapters = {store.folder(one) for one in store.durable() if not has_weights(store.manifest(one))}
    stored = read_tokens(run.tokens, wanted={kept.trajectory for kept in read_kept(run.trajectories)})
    settings = journal.header.settings
    rows = altered_rows(
        run.trajectories,
        stored,
        tags=tags,
        group_size=settings.group_size,
        evaluated=settings.eval_prompt_tokens,
    )

    def folder_of(version: VersionId) -> Path | None:
        try:
            return store.folder(version) if version not in altered else None
        except StoreError:
            return None

    report = deep_check(
        read_kept(run.trajectories),
        score=score_responses,
        versions=folder_of,
        dtypes=(config.trainer.dtype, config.trainer.publish_dtype),
    )
    return replace(report, altered=(*altered.values(), *rows))


def _altered_versions(
    store: VersionStore, published: Mapping[VersionId, Mapping[str, str]]
) -> Iterator[tuple[VersionId, str]]:
    """Yield stored versions that differ from the published version, each with the first file that differs."""
    for version in store.durable():
        folder = store.folder(version)
        for name, checksum in published.get(version, {}).items():
            if not (folder / name).is_file() or checksum_of(folder / name) != checksum:
                yield version, f"{folder / name} does not match its checksum in the journal"
                break
