"""Bytes kept for backward and the peak, against counts by hand."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dora.trainer.live_bytes import LiveBytes, activation_bytes

FLOAT = 4


def test_a_linear_layer_and_an_activation_keep_input_and_output() -> None:
    layer, x = nn.Linear(8, 16), torch.randn(5, 8)
    assert activation_bytes(lambda: layer(x)) == 5 * 16 * FLOAT  # the input existed before
    assert activation_bytes(lambda: layer(2 * x)) == (5 * 16 + 5 * 8) * FLOAT
    assert activation_bytes(lambda: torch.relu(layer(x)).view(-1)[3:]) == 5 * 16 * FLOAT  # relu keeps its output only


def test_what_is_held_beside_the_graph_counts_too() -> None:
    first, second, x = nn.Linear(8, 64), nn.Linear(64, 8), torch.randn(5, 8)

    def middle(x: torch.Tensor) -> torch.Tensor:
        return second(first(x).exp())

    full = activation_bytes(lambda: checkpoint(middle, x, use_reentrant=False))
    selective = activation_bytes(
        lambda: checkpoint(
            middle, x, use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts([torch.ops.aten.addmm.default]),
        )
    )  # fmt: skip
    assert full == 5 * 8 * FLOAT
    assert selective == (5 * 64 + 5 * 8) * FLOAT


def test_the_peak_includes_what_was_freed_and_the_gradients() -> None:
    x = torch.randn(100, requires_grad=True)
    with LiveBytes() as live:
        y = x.exp().sum()
        assert live.now == 100 * FLOAT + FLOAT
        y.backward()
        del y
        assert live.now == 100 * FLOAT
    assert live.peak() == (100 + 100 + 1 + 1) * FLOAT  # exp and the gradient of x; the sum and its gradient
    assert x.grad is not None
    assert live.peak(without=[x.grad, x]) == (100 + 1 + 1) * FLOAT  # x existed before
