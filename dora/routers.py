"""The routers of a mixture-of-experts model: what they choose is recorded, and what was recorded is replayed.

A router computes a score for each expert, chooses the `top_k` highest ones with `topk`, and weighs them by their
scores. During its forward pass, that one call of `topk` is answered here: with the experts of a table, and the scores
that the router itself has just computed for them, so that it is trained as usual (R3, arXiv 2510.11370). Where the
table has the router's own choice, in any order, the answer is the one that torch gives, bit for bit.

Invariant: backward sees the table of its forward pass. Recomputation of a layer reads the table again, so that another
one in its place would give a wrong gradient without a sign of it; backward raises InvariantViolation instead.
Legend: T tokens of a pass, L layers with experts, k experts of a token, E experts of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dora.errors import ConfigError, InvariantViolation
from dora.routing import RoutingShape

_TOPK: Final = frozenset({torch.topk, torch.Tensor.topk})
_MASKS: Final = frozenset({torch.masked_fill, torch.Tensor.masked_fill})
#: Families whose choice cannot be replaced, and why.
_REFUSED: Final = {"phimoe": "mask scores by the experts that they chose before"}


class Routers:
    """The routers of one model, in the order of its layers."""

    def __init__(self, model: Any) -> None:
        found = _find(model)
        self.shape: RoutingShape = _shape(model, found)
        self._routers = [_Router(module, self.shape, family=_family(model)) for _, module in found]

    def replay(self, experts_TLk: Tensor | None) -> None:
        """From now on, use these experts for the T tokens of each pass, or where they are -1, and with None, the
        routers' own choice. The table stays until backward has returned. Ids of a token and layer are distinct."""
        if experts_TLk is not None and experts_TLk.shape[1:] != (len(self._routers), self.shape.top_k):
            raise InvariantViolation(f"experts of the shape {tuple(experts_TLk.shape)} for {self.shape}")
        for layer, router in enumerate(self._routers):
            router.table = None if experts_TLk is None else experts_TLk[:, layer]

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Record passes in this context, outside of which recording costs nothing."""
        for router in self._routers:
            router.recorded = []
        try:
            yield Recording(self._routers)
        finally:
            for router in self._routers:
                router.recorded = None


class Recording:
    """What the routers choose by themselves, also where other experts are replayed."""

    def __init__(self, routers: list[_Router]) -> None:
        self._routers = routers

    def take(self) -> Tensor:
        """Return int16 [T, L, k]: the experts of all tokens of the passes since the last call, in order. ConfigError if
        the routers do not choose as described above."""
        layers = []
        for router in self._routers:
            if router.fault is not None:
                raise router.fault
            passes, router.recorded = router.recorded or [], []
            layers.append(torch.cat(passes) if passes else torch.zeros(0, router.top_k, dtype=torch.int16))
        return torch.stack(layers, dim=1)


_ROUTERS: WeakKeyDictionary[nn.Module, Routers] = WeakKeyDictionary()


def find_routers(model: Any) -> Routers:
    """Return the routers of a causal LM, from then on with the forward method of this module; ConfigError if it has
    none, or some that do not choose as described above. The same model has the same ones."""
    if model not in _ROUTERS:
        _ROUTERS[model] = Routers(model)
    return _ROUTERS[model]


def routing_shape(model: Any) -> RoutingShape:
    """Return what `find_routers` would, and change nothing; the model may be without data."""
    return _shape(model, _find(model))


class _Router:
    """One router: its forward pass, with the answer to `topk`."""

    def __init__(self, module: Any, shape: RoutingShape, *, family: str) -> None:
        self.table: Tensor | None = None  #: [T, k], -1: its own choice
        self.recorded: list[Tensor] | None = None
        self.fault: ConfigError | None = None  #: why what was recorded means nothing
        self.num_experts, self.top_k = shape.num_experts, shape.top_k
        self._family, self._forward = family, module.forward
        module.forward = self.forward

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # which table there is would be part of compiled code
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the router with the table that there is now."""
        table, version = self.table, _version(self.table)
        if table is None and self.recorded is None:
            output = self._forward(*args, **kwargs)
        else:
            with _TopkAnswer(self) as answer:
                output = self._forward(*args, **kwargs)
            if answer.hits != 1:
                self.fault = unsupported(self._family, f"call topk {answer.hits} times for their choice")
                if table is not None:
                    raise self.fault
        for value in output if isinstance(output, tuple) else (output,):
            if value.requires_grad:
                value.register_hook(partial(self._require_unchanged, table, version))
        return output

    def _require_unchanged(self, table: Tensor | None, version: int, _: Tensor) -> None:
        """Raise InvariantViolation unless the table is still that of the forward pass."""
        if self.table is not table or _version(table) != version:
            raise InvariantViolation("backward found other experts to replay than its forward pass")

    def is_choice(self, scores: Any, top_k: int) -> bool:
        """Return whether a call of `topk` chooses experts."""
        return scores.dim() == 2 and scores.shape[1] == self.num_experts and top_k == self.top_k


class _TopkAnswer(TorchFunctionMode):
    """Answers the call of `topk` in a forward pass of one router."""

    def __init__(self, router: _Router) -> None:
        super().__init__()
        self._router = router
        self._masked: tuple[Tensor, Tensor] | None = None  # scores without some groups of experts, and with all
        self.hits = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _MASKS:
            self._masked = result, args[0]
        elif func in _TOPK and self._router.is_choice(args[0], args[1] if len(args) > 1 else (kwargs or {})["k"]):
            self.hits += 1
            return self._answer(args[0], result)
        return result

    def _answer(self, scores_TE: Tensor, own: Any) -> Any:
        """Return what `topk` is to return; `own`: what it did."""
        own_Tk, table_Tk = own.indices, self._router.table
        if self._router.recorded is not None:
            self._router.recorded.append(own_Tk.to(torch.int16))
        if table_Tk is None:
            return own
        if len(table_Tk) != len(own_Tk):
            raise InvariantViolation(f"experts of {len(table_Tk)} tokens for a pass of {len(own_Tk)}")
        if self._masked is not None and self._masked[0] is scores_TE:
            scores_TE = self._masked[1]  # experts of other groups have scores too
        table_Tk = table_Tk.to(own_Tk.dtype)
        is_own_T = (table_Tk[:, :, None] == own_Tk[:, None, :]).any(2).all(1) | (table_Tk[:, 0] < 0)
        experts_Tk = torch.where(is_own_T[:, None], own_Tk, table_Tk)
        return torch.return_types.topk((scores_TE.gather(1, experts_Tk), experts_Tk))


def _version(table: Tensor | None) -> int:
    """Return a number that changes where the table does."""
    return 0 if table is None else table._version


def unsupported(family: str, how: str) -> ConfigError:
    """Return the error for a family whose routers do something else than described above."""
    return ConfigError(f"objective.router_replay: routers of {family} {how}; set it to off")


def _find(model: Any) -> list[tuple[str, Any]]:
    """Return the name and the module of each router: beside the experts, or around them if it is a mere matrix."""
    found = []
    for name, block in model.named_modules():
        parts = dict(block.named_children())
        router = parts.get("router", parts.get("gate"))
        if router is not None and "experts" in parts:
            found.append((name, block if type(router) is nn.Linear else router))
    return found


def _shape(model: Any, found: list[tuple[str, Any]]) -> RoutingShape:
    family = _family(model)
    if not found:
        raise ConfigError(f"objective.router_replay: {family} has no routers of experts; set it to off")
    if family in _REFUSED:
        raise unsupported(family, _REFUSED[family])
    config = model.config.get_text_config(decoder=True)
    shapes = {
        (getattr(module, "num_experts", None) or config.num_experts, getattr(module, "top_k", None))
        for _, module in found
    }
    (num_experts, top_k), *others = shapes
    if others or not isinstance(top_k, int):
        raise unsupported(family, "differ between layers" if others else "do not say how many experts they choose")
    places = [re.fullmatch(r"(.*?)\.(\d+)(?:\..*)?", name) for name, _ in found]
    lists = {place[1] for place in places if place is not None}
    layers = tuple(int(place[2]) for place in places if place is not None)
    if None in places or len(lists) != 1 or list(layers) != sorted(set(layers)):
        raise unsupported(family, "are not one to a layer")
    num_layers = len(model.get_submodule(lists.pop()))
    return RoutingShape(num_layers=num_layers, layers=layers, num_experts=num_experts, top_k=top_k)


def _family(model: Any) -> str:
    return str(model.config.get_text_config(decoder=True).model_type)
