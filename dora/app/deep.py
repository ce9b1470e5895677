"""Recomputes the log-probs of kept answers, which shows the version that each answer came from.

Versions and kept trajectories are first compared with what the run recorded: altered data would prove nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from msgspec import structs

from dora.app.export import trained_model
from dora.app.routing import routing_of
from dora.config.recorded import RecordedConfig
from dora.config.schema import Config
from dora.core.commands import AdmitGroup
from dora.core.events import VersionPublished
from dora.core.ids import GroupId, VersionId
from dora.errors import ConfigError
from dora.journal.choices import UNKNOWN
from dora.journal.deep import DeepReport, KeptTrajectory, altered_rows, deep_check, read_kept
from dora.journal.reader import Journal
from dora.journal.run_folder import RunFolder
from dora.journal.tokens import TokenStore, read_tokens
from dora.routing import RoutingShape
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
            dtype=config.trainer.publish_dtype,  # that of the engine; another one's rounding looks like other weights
            fp32_head=config.trainer.fp32_head,
            experts=[chosen[tuple(sequence)] for sequence in sequences] if chosen else None,
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
    replays = any(answer.choices is not None for answer in stored.answers.values())
    chosen = dict(_chosen(read_kept(run.trajectories), stored, routing_of(trained_model(run)))) if replays else {}
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
        dtypes=(config.trainer.publish_dtype,),
    )
    return replace(report, altered=(*altered.values(), *rows))


def _chosen(
    kept: Iterable[KeptTrajectory], stored: TokenStore, routing: RoutingShape
) -> Iterator[tuple[tuple[int, ...], npt.NDArray[np.int16]]]:
    """Yield the tokens of each row, and the experts that the engine chose for them; -1 where that is not known."""
    for trajectory in kept:
        answer = stored.answers.get(trajectory.trajectory)
        places = structs.replace(
            trajectory,
            prompt_tokens=tuple(range(len(trajectory.prompt_tokens))),
            tokens=tuple(range(len(trajectory.prompt_tokens), len(trajectory.prompt_tokens) + len(trajectory.tokens))),
        )
        for (ids, _), (at, _) in zip(trajectory.rows(), places.rows(), strict=True):
            experts = np.full((len(ids), len(routing.layers), routing.top_k), -1, np.int16)
            if answer is not None and answer.choices is not None:
                known = answer.choices.marks(np.array(at)) != UNKNOWN
                found = answer.choices.experts(np.array(at)).view(routing.dtype.newbyteorder("<"))
                experts[known] = found.reshape(experts.shape)[known]
            yield tuple(ids), experts


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
