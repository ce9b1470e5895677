"""Muon (K. Jordan et al., 2024, https://kellerjordan.github.io/posts/muon) over a rank's own rows of matrices.

The momentum of a matrix is orthogonalized whole, by torch's Newton-Schulz iteration in bfloat16. So each matrix has an
owner among the ranks. The owner receives the rows of all other ranks, orthogonalizes the matrix, and returns to each
rank its own rows. The matrices of experts are stacked in one parameter; each is whole on one rank and needs no owner.

Steps are scaled as in arXiv 2502.16982 (0.2 sqrt(max(rows, columns))), so that their root mean square is that of AdamW
and both take the same learning rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

MOMENTUM: Final = 0.95  # with Nesterov's look-ahead, both as in torch.optim.Muon


class ShardedMuon:
    """Updates this rank's rows of matrices in place; all updates are collectives."""

    def __init__(
        self, shards: Mapping[str, Tensor], *, rows: Mapping[str, int], weight_decay: float, group: dist.ProcessGroup
    ) -> None:
        """`rows`: the number of rows of each whole parameter, which is cut in chunks of ceil(rows / ranks)."""
        self._shards = shards
        self._rows = rows
        self._weight_decay = weight_decay
        self._group = group
        self._momenta = {name: torch.zeros_like(shard) for name, shard in shards.items()}

    def update(self, gradients: Mapping[str, Tensor], *, learning_rate: float) -> None:
        """Make one update; a collective."""
        for names in self._batches():
            updates = [self._looked_ahead(name, gradients[name]) for name in names]
            for name, direction in zip(names, self._directions(names, updates), strict=True):
                self._move(name, direction, learning_rate)
        for name, shard in self._shards.items():
            if shard.dim() > 2:
                update = self._looked_ahead(name, gradients[name])
                self._move(
                    name, torch.stack([direction_of(m) for m in update]) if len(update) else update, learning_rate
                )

    def state(self) -> dict[str, Tensor]:
        """Return the momenta themselves, not copies, by name: KIND/PARAMETER."""
        return {f"momentum/{name}": momentum for name, momentum in self._momenta.items()}

    def _looked_ahead(self, name: str, gradient: Tensor) -> Tensor:
        momentum = self._momenta[name].lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(momentum, MOMENTUM)

    def _move(self, name: str, direction: Tensor, learning_rate: float) -> None:
        self._shards[name].mul_(1 - learning_rate * self._weight_decay).add_(direction, alpha=learning_rate)

    # ---- owners -----------------------------------------------------------------------------------------------------

    def _batches(self) -> Iterator[list[str]]:
        """Yield as many matrices as there are ranks, of similar size: each rank owns one."""
        matrices = [name for name, shard in self._shards.items() if shard.dim() == 2]
        matrices.sort(key=lambda name: (self._rows[name] * self._shards[name].shape[1], name))
        ranks = self._group.size()
        return (matrices[start : start + ranks] for start in range(0, len(matrices), ranks))

    def _directions(self, names: Sequence[str], updates: Sequence[Tensor]) -> Iterator[Tensor]:
        """Return this rank's rows of the orthogonalized updates."""
        rank, ranks = self._group.rank(), self._group.size()
        if ranks == 1:
            return map(direction_of, updates)
        sizes = [update.numel() for update in updates] + [0] * (ranks - len(names))
        owned_sizes = [0] * ranks
        if rank < len(names):
            rows, columns = self._rows[names[rank]], updates[rank].shape[1]
            owned_sizes = [n * columns for n in split_rows(rows, ranks)]
        sent = torch.cat([update.flatten() for update in updates])
        owned = sent.new_empty(sum(owned_sizes))
        dist.all_to_all_single(owned, sent, owned_sizes, sizes, group=self._group)
        if rank < len(names):
            owned = direction_of(owned.view(rows, columns)).flatten()
        dist.all_to_all_single(sent, owned, sizes, owned_sizes, group=self._group)
        return (part.view_as(update) for part, update in zip(sent.split(sizes), updates, strict=False))


def split_rows(rows: int, ranks: int) -> list[int]:
    """Return the rows of each rank under FSDP2."""
    chunk = -(-rows // ranks)
    return [min(max(rows - rank * chunk, 0), chunk) for rank in range(ranks)]


def direction_of(matrix: Tensor) -> Tensor:
    """Return the step of `torch.optim.Muon` for a matrix, at a learning rate of 1."""
    origin = nn.Parameter(torch.zeros_like(matrix))
    origin.grad = matrix
    torch.optim.Muon(
        [origin], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw"
    ).step()
    return origin.detach()
