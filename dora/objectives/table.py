"""All policy losses by name: one for each module of `losses/`, and functions of the user's own.

Settings choose among them by `kind`: see `PolicyLoss`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, Union

from pydantic import Discriminator, Tag

from dora.objectives import losses
from dora.objectives.loss_settings import LossSettings
from dora.objectives.tokens import TokenLoss, Tokens
from dora.objectives.user_loss import UserLoss, load_loss

#: The tag of the user's own losses in `PolicyLoss`.
USER: Final = "FILE.py:function"


@dataclass(frozen=True, slots=True)
class LossEntry:
    """A policy loss: the type of its settings, and the function that takes them."""

    settings: type[LossSettings]
    function: Callable[..., TokenLoss]


def _entry(name: str) -> LossEntry:
    module = importlib.import_module(f"{losses.__name__}.{name}")
    [settings] = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, LossSettings) and value.__module__ == module.__name__
    ]
    assert settings.model_fields["kind"].default == name, f"{module.__name__}: kind must be '{name}'"
    return LossEntry(settings, module.loss)


LOSSES: Final = {info.name: _entry(info.name) for info in pkgutil.iter_modules(losses.__path__)}
#: Tag -> settings, in the order of docs/CONFIG.md: the default first.
LOSS_SETTINGS: Final[dict[str, type[LossSettings]]] = {
    **{name: LOSSES[name].settings for name in sorted(LOSSES, key=lambda name: (name != "ppo", name))},
    USER: UserLoss,
}


def _tag(given: Any) -> str:
    """Return the tag of loss settings, given as an object or as a table; for an unknown kind, return the kind."""
    kind = given.get("kind") if isinstance(given, dict) else getattr(given, "kind", None)
    return USER if isinstance(kind, str) and ":" in kind else str(kind)


def settings_type(given: Any) -> type[LossSettings] | None:
    """Return the type of settings that a table describes; None if its kind is unknown."""
    return LOSS_SETTINGS.get(_tag(given))


def loss_of(settings: LossSettings) -> Callable[[Tokens], TokenLoss]:
    """Return the policy loss that the settings describe. A user's own loss is imported; ConfigError if that fails."""
    if isinstance(settings, UserLoss):
        return load_loss(settings)
    return partial(LOSSES[settings.kind].function, settings=settings)


if TYPE_CHECKING:
    PolicyLoss = LossSettings
else:
    #: The settings of any loss, told apart by `kind`.
    PolicyLoss = Annotated[
        Union[tuple(Annotated[settings, Tag(tag)] for tag, settings in LOSS_SETTINGS.items())],  # noqa: UP007
        Discriminator(_tag),
    ]
