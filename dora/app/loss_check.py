"""`dora check` for a user's own loss: compares its gradient with finite differences, and its value for each sequence
with the value for the sequence alone.

The tokens are random, in float64. Tensors that the loss detaches stay fixed while its inputs vary. So stop-gradients,
on which most policy losses rely, are constants in the finite differences too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Final

from dora.errors import ConfigError
from dora.objectives.settings import ObjectiveConfig
from dora.objectives.table import loss_of
from dora.objectives.tokens import TokenLoss, Tokens
from dora.objectives.user_loss import KEY, UserLoss

if TYPE_CHECKING:  # torch takes seconds to import
    from torch import Tensor

#: Trained tokens of each sequence of a draw, and the number of draws.
LENGTHS: Final = (5, 1, 7)
DRAWS: Final = 4
STEP: Final = 1e-6
#: Largest error of a derivative, relative to 1 + its size.
TOLERANCE: Final = 1e-6

Loss = Callable[[Tokens], TokenLoss]


def check_loss(settings: ObjectiveConfig) -> str:
    """Return what was found out about the user's loss, "" if it is a built-in one; ConfigError names the loss."""
    if not isinstance(settings.loss, UserLoss):
        return ""
    loss, kind = loss_of(settings.loss), settings.loss.kind
    worst = 0.0
    for seed in range(DRAWS):
        tokens = random_tokens(seed)
        together_P = loss(tokens).loss_P.detach()
        for sequence in range(len(LENGTHS)):
            alone_P = loss(part_of(tokens, [sequence])).loss_P.detach()
            if (alone_P - together_P[tokens.sequence_P == sequence]).abs().max() > TOLERANCE:
                raise ConfigError(
                    f"{KEY}: {kind} returns different losses for a sequence if other sequences are in the same pass; a "
                    "loss may depend on the tokens of its own sequence only"
                )
        worst = max(worst, gradient_error(loss, tokens))
    try:
        loss(part_of(random_tokens(0), []))
    except ConfigError as err:
        raise ConfigError(f"{err} (in a pass without tokens, such as that of a rank that gets no sequence)") from err
    if not worst <= TOLERANCE:
        raise ConfigError(
            f"{KEY}: the gradient of {kind} differs from finite differences by {worst:.1e}; stop a gradient with "
            ".detach(), not with no_grad(), and do not overwrite tensors"
        )
    return f"{kind}: its gradient equals finite differences (largest error {worst:.1e})"


def gradient_error(loss: Loss, tokens: Tokens, *, directions_dP: Tensor | None = None) -> float:
    """Return the largest error of the gradient of Σ i l_i against central differences, relative to 1 + its size.

    `directions_dP`: the directions in which differences are taken; None: each token by itself.
    """
    import torch

    frozen = _frozen_detach()
    scale_P = torch.arange(1, len(tokens.current_P) + 1, dtype=torch.float64) / len(tokens.current_P)

    def total(current_P: Tensor) -> Tensor:
        with frozen():
            return (loss(replace(tokens, current_P=current_P.requires_grad_())).loss_P * scale_P).sum()

    leaf = tokens.current_P.detach().clone()
    (gradient_P,) = torch.autograd.grad(total(leaf), leaf, materialize_grads=True)
    directions_dP = torch.eye(len(leaf), dtype=torch.float64) if directions_dP is None else directions_dP
    center = leaf.detach()
    differences = [(total(center + step) - total(center - step)).item() / (2 * STEP) for step in STEP * directions_dP]
    derivatives_d = directions_dP @ gradient_P
    errors_d = (torch.tensor(differences, dtype=torch.float64) - derivatives_d).abs() / (1 + derivatives_d.abs())
    return float(errors_d.max())


def random_tokens(seed: int) -> Tokens:
    """Return tokens of sequences of LENGTHS, in float64: most ratios 0.7 to 1.4, advantages of both signs."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def normal(count: int) -> Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64)

    count = sum(LENGTHS)
    lengths_n = torch.tensor(LENGTHS)
    sequence_P = torch.arange(len(LENGTHS)).repeat_interleave(lengths_n)
    behavior_P = -0.5 - normal(count).abs()
    proximal_P = behavior_P + 0.1 * normal(count)
    return Tokens(
        current_P=(proximal_P + 0.2 * normal(count)).requires_grad_(),
        behavior_P=behavior_P,
        advantage_P=normal(len(LENGTHS))[sequence_P],
        sequence_P=sequence_P,
        lengths_n=lengths_n,
        siblings_n=torch.full((len(LENGTHS),), 4),
        staleness_n=torch.arange(len(LENGTHS)),
        progress=0.5,
        proximal_P=proximal_P,
        reference_P=behavior_P + 0.1 * normal(count),
        entropy_P=normal(count).abs(),
    )


def part_of(tokens: Tokens, sequences: list[int]) -> Tokens:
    """Return the tokens of the given sequences only, numbered anew in the given order."""
    import torch

    chosen = torch.tensor(sequences, dtype=torch.int64)
    at_P = torch.cat([chosen[:0], *((tokens.sequence_P == sequence).nonzero()[:, 0] for sequence in sequences)])
    place = torch.full((len(tokens.lengths_n),), -1).index_copy(0, chosen, torch.arange(len(sequences)))
    columns: dict[str, Any] = {f.name: getattr(tokens, f.name) for f in fields(tokens)}
    parts: dict[str, Any] = {
        name: column[at_P if name.endswith("_P") else chosen]
        for name, column in columns.items()
        if isinstance(column, torch.Tensor)
    }
    return replace(tokens, **parts | {"sequence_P": place[parts["sequence_P"]]})


def _frozen_detach() -> Callable[[], Any]:
    """Return a context that can be entered repeatedly: every call of `detach` returns what the same call returned when
    the context was first entered."""
    import torch
    from torch.overrides import TorchFunctionMode

    first: list[Tensor] = []

    class FrozenDetach(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self._replayed = iter(list(first)) if first else None

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is not torch.Tensor.detach:
                return func(*args, **(kwargs or {}))
            found = func(*args)
            if self._replayed is None:
                first.append(found)
                return found
            return next(self._replayed, found)

    return FrozenDetach
