"""Which version an answer came from, as its log-probs tell: recomputed by the trainer's own forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dora.config.schema import Config
from dora.core.ids import VersionId
from dora.errors import ConfigError
from dora.journal.deep import DeepReport, deep_check, read_kept
from dora.journal.run_folder import RunFolder
from dora.weights.store import StoreError, VersionStore


def recompute(run: RunFolder, config: Config) -> DeepReport:
    """Log-probs of the kept trajectories under their version and the next, by the trainer's own forward pass."""
    if not run.trajectories.is_file():
        raise ConfigError(f"{run.trajectories}: there are no kept trajectories; set log.trajectories_per_step")
    from dora.trainer.score import score

    def score_responses(
        model: Path, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]
    ) -> Sequence[npt.NDArray[np.float32]]:
        return score(
            model,
            sequences,
            prompt_lengths=prompt_lengths,
            temperature=config.rollout.temperature,
            device=config.trainer.device,
            dtype=config.trainer.dtype,
        )

    store = VersionStore(memory_root=run.versions, durable_root=run.versions)

    def folder_of(version: VersionId) -> Path | None:
        try:
            return store.folder(version)
        except StoreError:
            return None

    return deep_check(
        read_kept(run.trajectories),
        score=score_responses,
        versions=folder_of,
        dtypes=(config.trainer.dtype, config.trainer.publish_dtype),
    )
