"""A policy loss of the user's own: `objective.loss.kind = "FILE.py:function"`.

    def my_loss(tokens: Tokens, **options) -> Tensor | TokenLoss

`tokens` are the tokens of one forward pass (`dora.objectives.tokens.Tokens`), and `options` is the table
`objective.loss.options`. The function returns one loss for each token, [P], with a gradient with respect to
`tokens.current_P`; it does not average them. A sequence is always whole, but other sequences may be in other passes, so
the loss of a token must depend on its own sequence only. Use `.detach()` for parts without gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from dora.errors import ConfigError
from dora.functions import load_function
from dora.objectives.loss_settings import UNWEIGHTED, Anchor, LossSettings
from dora.objectives.marks import MARKS
from dora.objectives.tokens import TokenLoss, Tokens

if TYPE_CHECKING:
    from torch import Tensor

KEY = "objective.loss.kind"


class UserLoss(LossSettings):
    """A function of yours: function(tokens, **options) -> a loss for each token; docs/OBJECTIVES.md has an example. The
    ranks of the trainer import it."""

    IMPLIED = UNWEIGHTED
    IS_OF_SEQUENCES = True

    kind: Annotated[str, Field(pattern=r"^.+:\w+$")]
    """FILE.py:function, or module:function."""
    options: dict[str, Any] = Field(default={})
    """Further arguments of the function."""

    @property
    def anchor(self) -> Anchor:
        """π_o, which the function may use."""
        return "proximal"


def load_loss(settings: UserLoss) -> Callable[[Tokens], TokenLoss]:
    """Import the function; ConfigError if it is missing or takes other arguments.

    The returned loss raises ConfigError if the function raises, or returns anything but one loss for each token.
    """
    function = load_function(settings.kind, field=KEY)
    try:
        inspect.signature(function).bind(None, **settings.options)
    except TypeError as err:
        raise ConfigError(f"{KEY}: {settings.kind} must accept the tokens and objective.loss.options ({err})") from err

    def loss(tokens: Tokens) -> TokenLoss:
        try:
            result = function(tokens, **settings.options)
        except Exception as err:  # user code may raise anything
            raise ConfigError(f"{KEY}: {settings.kind} raised {type(err).__name__}: {err}") from err
        of_loss = result if isinstance(result, TokenLoss) else TokenLoss(result)
        if problem := _problem(of_loss.loss_P, tokens.current_P):
            raise ConfigError(f"{KEY}: {settings.kind} returned {problem}")
        for name, mark_P in of_loss.marks.items():
            if name not in MARKS:
                raise ConfigError(f"{KEY}: {settings.kind} marks '{name}'; known are {', '.join(MARKS)}")
            if getattr(mark_P, "shape", None) != tokens.current_P.shape:
                raise ConfigError(
                    f"{KEY}: {settings.kind} marks '{name}' with something other than a value for each token"
                )
        return of_loss

    return loss


def _problem(loss_P: Any, current_P: Tensor) -> str:
    """Return what is wrong with the result of a user's loss, or nothing."""
    if not isinstance(loss_P, type(current_P)):
        return f"{type(loss_P).__name__}, expected a tensor or a TokenLoss"
    if loss_P.shape != current_P.shape:
        return f"a tensor of shape {list(loss_P.shape)}, expected one loss for each token: {list(current_P.shape)}"
    if current_P.requires_grad and not loss_P.requires_grad:
        return "losses without a gradient; they must depend on tokens.current_P"
    if not loss_P.detach().isfinite().all():
        return f"{int((~loss_P.detach().isfinite()).sum())} losses that are NaN or infinite"
    return ""
