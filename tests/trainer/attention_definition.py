"""Attention by its definition: all scores of a packed row at once, in the data type of its inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink_H: Tensor | None,
    *,
    lengths: Sequence[int],
    scale: float,
    prompts: Sequence[int] = (),
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return the output [1, T, H, D_v] for query [1, H, T, D], key and value [1, H_kv, T, D or D_v]."""
    seen, distance, position = (t.to(query.device) for t in visible(lengths, prompts or (-1,) * len(lengths)))
    if window is not None:
        seen &= distance < window
    if chunk is not None:
        seen &= position[:, None] // chunk == position // chunk
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen, -torch.inf)
    if sink_H is not None:
        scores = torch.cat([scores, sink_H[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : query.shape[2]] @ value).transpose(1, 2)


def visible(lengths: Sequence[int], prompts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """[T, T] whether a query sees a key, how many positions are between them, and [T] positions in the sequences."""
    segment = torch.repeat_interleave(torch.tensor(lengths))
    starts = [lengths[prompt] if prompt >= 0 else 0 for prompt in prompts]
    position = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)])
    distance = position[:, None] - position
    is_prompt = torch.tensor(prompts)[segment][:, None] == segment
    return (distance >= 0) & ((segment[:, None] == segment) | is_prompt), distance, position
