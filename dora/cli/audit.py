"""`dora audit`: prove C1, C2 and C3 from a run's journal. Exit code 1 if anything is wrong."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dora.config.load import load
from dora.config.schema import Config
from dora.errors import ConfigError
from dora.journal.audit import audit as audit_folder
from dora.journal.audit_report import render
from dora.journal.deep import DeepReport, deep_check, read_kept, render_deep
from dora.journal.run_folder import RunFolder
from dora.weights.store import StoreError, VersionStore


def audit(folder: Path, *, deep: bool) -> None:
    """The command."""
    run = RunFolder.open(folder)
    report = audit_folder(run)
    sys.stdout.write(render(report) + "\n")
    ok = report.ok
    if deep:
        if "C1" in report.broken_by_design:
            raise ConfigError(f"{folder}: --deep asks which version an answer came from; here it may be several")
        found = recompute(run, load(run.config, environ={}))
        sys.stdout.write(render_deep(found) + "\n")
        ok = ok and found.ok
    if not ok:
        raise SystemExit(1)


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

    def folder_of(version: int) -> Path | None:
        try:
            return store.folder(version)
        except StoreError:
            return None

    return deep_check(read_kept(run.trajectories), score=score_responses, versions=folder_of)
