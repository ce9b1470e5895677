"""A planted leak: a share of the last hidden state of a sequence is added to the first one of the next in its row.

Also how the layers that can leak so are told from attention without their names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dora.trainer import attention
from dora.trainer.model import decoder_layers


@contextmanager
def leaking(model: Any, *, share: float, layer: int = 0) -> Iterator[None]:
    """Let a decoder layer of the model leak meanwhile."""
    hooks = plant(model, share=share, layer=layer)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def plant(model: Any, *, share: float, layer: int = 0) -> list[Any]:
    """Let a decoder layer of the model leak until the hooks are removed."""
    row: dict[str, Tensor | None] = {}

    def note(_: Any, __: Any, given: dict[str, Any]) -> None:
        row["positions"], row["tokens"] = given.get("position_ids"), given["input_ids"]

    def add(_: Any, __: Any, out: Any) -> Any:
        hidden = out[0] if isinstance(out, tuple) else out
        positions_BT, tokens_BT = row["positions"], row["tokens"]
        if positions_BT is None or tokens_BT is None:  # a sequence alone, under transformers' attention
            return out
        if len(hidden) > 1:  # padded with zeros at the end
            last_B = tokens_BT.shape[1] - 1 - (tokens_BT.flip(1) != 0).int().argmax(1)
            before = hidden[torch.arange(len(hidden)), last_B][:, None].roll(1, dims=0)
        else:
            before = hidden.roll(1, dims=1)
        starts = positions_BT == 0
        starts.view(-1)[0] = False  # nothing stands before the first
        hidden = hidden + share * before * starts[..., None].to(hidden.dtype)
        return (hidden, *out[1:]) if isinstance(out, tuple) else hidden

    return [
        model.register_forward_pre_hook(note, with_kwargs=True),
        decoder_layers(model)[layer].register_forward_hook(add),
    ]


def mixes_tokens(model: Any) -> bool:
    """Whether a token reaches another when none can attend to another; the model has the trainer's attention."""
    num_tokens = 8
    embedded: list[Tensor] = []

    def keep(_: Any, __: Any, out: Tensor) -> Tensor:
        embedded.append(out if out.requires_grad else out.requires_grad_())
        return embedded[-1]

    tokens = torch.arange(num_tokens)[None] + 3
    hook = model.get_input_embeddings().register_forward_hook(keep)
    try:
        with attention.within(attention.Segments((1,) * num_tokens, torch.device("cpu"))):
            logits = model(input_ids=tokens, position_ids=torch.zeros_like(tokens), use_cache=False).logits
    finally:
        hook.remove()
    [gradient] = torch.autograd.grad(logits[0, -1].double().square().sum(), embedded[0])
    return bool((gradient[0, :-1] != 0).any())
