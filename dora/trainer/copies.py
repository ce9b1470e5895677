"""A policy beside the one that is trained, in the same process and over the same rows.

Invariant: its weights only change in `refresh`.
Legend: P trained tokens of a row.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from dora.core.ids import VersionId
from dora.trainer.logprobs import logprobs
from dora.trainer.model import Policy
from dora.trainer.packing import Row


class FrozenPolicy:
    """A policy that is not trained."""

    def __init__(self, model_path: Path, *, policy: Policy) -> None:
        """Load a folder in the layout of `policy`."""
        self._copy = Policy(model_path, mesh=policy.mesh, dtype=policy.dtype)
        self.version: VersionId | None = None  #: None until `refresh`

    @torch.no_grad()
    def refresh(self, policy: Policy, *, version: VersionId) -> None:
        """Copy the weights of `policy`, which are those of `version`."""
        self._copy.reshard()
        current = policy.shards()
        for name, shard in self._copy.shards().items():
            shard.copy_(current[name])
        self.version = version

    @torch.no_grad()
    def logprobs(self, row: Row, *, temperature: float, fp32_head: bool) -> Tensor:
        """Return the [P] log-probs of the row's targets; a collective like the policy's own pass."""
        return logprobs(self._copy.model, row, temperature=temperature, fp32_head=fp32_head)[0]
