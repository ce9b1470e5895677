"""The optimizer of a rank, over its own rows of the parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from dora.transport.messages import Configure


def make_optimizer(shards: dict[str, Tensor], order: Configure) -> torch.optim.AdamW:
    """Build AdamW over this rank's rows as plain tensors; it is elementwise, so sharding does not change it.

    Its moments exist from the start, so that all checkpoints have the same format.
    """
    settings = order.settings
    optimizer = torch.optim.AdamW(
        [torch.nn.Parameter(shard) for shard in shards.values()],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
        fused=True,
    )
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer
