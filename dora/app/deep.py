"""Recomputes the log-probs of kept answers, which shows the version that each came from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dora.config.schema import Config
from dora.errors import ConfigError
from dora.journal.deep import DeepReport, deep_check, read_kept
from dora.journal.run_folder import RunFolder
from dora.weights.store import StoreError, VersionStore


def recompute(run: RunFolder, config: Config) -> DeepReport:
    """Compare the log-probs of kept trajectories with the trainer's, under their version and the next."""
    if not run.trajectories.is_file():
        raise ConfigError(f"{run.trajectories}: no trajectories were kept; set log.trajectories_per_step")
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

    def folder_of(version: int) -> Path | None:
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
