"""Log-probs of the trained tokens of a row under the model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dora.trainer import attention
from dora.trainer.packing import Row

LOGITS_CHUNK = 2**24  # logits converted to log-probs at a time (64 MiB in float32)


def logprobs(model: nn.Module, row: Row, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Return [P] log-probs of the targets under softmax(logits / temperature), and [P] entropies (no gradient)."""
    segments = None if row.padded else attention.Segments(row.lengths, row.tokens_BT.device)
    with attention.within(segments):
        logits_BPV = model(
            input_ids=row.tokens_BT,
            position_ids=row.positions_BT,
            use_cache=False,
            logits_to_keep=0 if row.padded else row.predictors_P,
        ).logits
    logits_PV = logits_BPV.flatten(0, 1)[row.predictors_P] if row.padded else logits_BPV[0]
    rows = max(1, LOGITS_CHUNK // logits_PV.shape[1])
    if len(logits_PV) <= rows:
        return _select(logits_PV, row.targets_P, temperature)
    parts = [
        checkpoint(_select, part, targets, temperature, use_reentrant=False)
        for part, targets in zip(logits_PV.split(rows), row.targets_P.split(rows), strict=True)
    ]
    chosen, entropy = zip(*parts, strict=True)
    return torch.cat(chosen), torch.cat(entropy)


def _select(logits_PV: Tensor, targets_P: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(logits_PV.dtype, torch.float32)
    log_softmax_PV = (logits_PV.to(wide) / temperature).log_softmax(-1)
    with torch.no_grad():
        entropy_P = -(log_softmax_PV.exp() * log_softmax_PV).sum(-1)
    return log_softmax_PV.gather(-1, targets_P[:, None])[:, 0], entropy_P
