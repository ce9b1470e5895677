"""How evenly a mixture-of-experts model sends tokens to its experts, and how its choices differ from the engine's.

Counted in the passes that train: recomputation in backward is not observed. Each token of a sequence counts once, that
of a prompt that sequences share once for each of them: neither packing nor the number of ranks changes a metric.
Legend: T tokens of a pass, L layers with experts, k experts of a token, E experts of a layer, K staleness.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dora.errors import ConfigError
from dora.routers import find_routers
from dora.routing import RoutingShape
from dora.trainer.packing import Row
from dora.transport.messages import MicroBatch

#: name -> (unit, formula). Of models with experts, unless they are compiled and nothing is replayed.
BALANCE: dict[str, tuple[str, str]] = {
    "expert_load_mean": ("1", "largest load of a layer's experts over the mean of that layer, mean over layers"),
    "expert_load_max": ("1", "largest load of a layer's experts over the mean of that layer, maximum over layers"),
    "experts_unused_frac": ("fraction", "experts, of all layers, to which no token of the step was sent"),
}
#: With `objective.router_replay`, in addition.
REPLAYED: dict[str, tuple[str, str]] = {
    "routing_changed_frac": (
        "fraction",
        "replayed experts that the trainer's router would not have chosen; at staleness 0, by rounding alone",
    ),
    "routing_unknown_frac": ("fraction", "tokens without experts to replay; the last ones of sequences left out"),
    "routing_later_frac": ("fraction", "of the same tokens, those whose experts are of a server that read them again"),
    "routing_unshared_frac": ("fraction", "prompt tokens that siblings do not share because of their experts, of all"),
}
_COUNTS = ("readers", "unknown", "later", "tokens", "unshared")


class Balance:
    """The counts of one step on one rank."""

    def __init__(self, model: Any, *, replays: bool, max_staleness: int, device: torch.device) -> None:
        """ConfigError unless the experts of the model can be observed."""
        self._routers, self._replays = find_routers(model), replays
        shape = self._routers.shape
        self._loads_LE = torch.zeros(len(shape.layers), shape.num_experts, dtype=torch.int64, device=device)
        #: By staleness: replayed experts, and those of them that the router would not have chosen.
        self._replayed_K = self._loads_LE.new_zeros(max_staleness + 1)
        self._changed_K = self._loads_LE.new_zeros(max_staleness + 1)
        self._counts: dict[str, Tensor] = {name: self._loads_LE.new_zeros(()) for name in _COUNTS}

    @property
    def shape(self) -> RoutingShape:
        """What the model chooses for each token."""
        return self._routers.shape

    @contextmanager
    def observing(self, row: Row) -> Iterator[None]:
        """Count the tokens of the last pass over `row` in this context: the first one of a model may follow another, in
        which it is measured what comes after its head."""
        with self._routers.record() as recording:
            yield
            try:
                own_TLk = recording.take()
            except ConfigError:
                if self._replays:
                    raise
                return  # of a family that chooses in another way; nothing but metrics needs it
        self._add(own_TLk[-row.flat(row.tokens_BT).numel() :], row)

    @torch.no_grad()
    def _add(self, own_TLk: Tensor, row: Row) -> None:
        chosen_TLk, uses_T11 = own_TLk, row.flat(row.uses_BT)[:, None, None]
        if row.experts_BTLk is not None and row.lags_BT is not None:
            table_TLk, lags_T = row.flat(row.experts_BTLk), row.flat(row.lags_BT)
            is_replayed_TLk = table_TLk >= 0
            chosen_TLk = torch.where(is_replayed_TLk, table_TLk, own_TLk)
            for own_Tk, table_Tk in zip(own_TLk.unbind(1), table_TLk.unbind(1), strict=True):
                is_kept_Tk = (table_Tk[:, :, None] == own_Tk[:, None, :]).any(2)
                is_changed_Tk = (table_Tk >= 0) & ~is_kept_Tk
                self._changed_K.scatter_add_(0, lags_T, (is_changed_Tk * uses_T11[:, 0]).sum(1))
            self._replayed_K.scatter_add_(0, lags_T, (is_replayed_TLk * uses_T11).sum((1, 2)))
        starts_L1 = torch.arange(len(self._loads_LE), device=uses_T11.device)[:, None] * self._loads_LE.shape[1]
        places = (chosen_TLk.long() + starts_L1).flatten()
        self._loads_LE.view(-1).scatter_add_(0, places, uses_T11.expand_as(chosen_TLk).flatten())

    def add_batch(self, batch: MicroBatch, *, unshared: int) -> None:
        """Count the tokens of a micro-batch; `unshared`: those of its prompts that only have other experts."""
        is_read = np.ones(len(batch.tokens), bool)
        is_read[np.cumsum(batch.lengths) - 1] = False
        marks = np.bincount(batch.routed[is_read[: len(batch.routed)]], minlength=3)
        added = {"readers": int(is_read.sum()), "unknown": int(marks[0]), "later": int(marks[2])}
        added |= {"tokens": len(batch.tokens), "unshared": unshared}
        for name, count in added.items():
            self._counts[name] += count

    def close(self) -> dict[str, float]:
        """Return the metrics of the step, and begin the next; a collective."""
        own = (self._loads_LE.flatten(), self._replayed_K, self._changed_K, torch.stack([*self._counts.values()]))
        summed = torch.cat(own)
        dist.all_reduce(summed)
        loads, replayed_K, changed_K, counts = summed.split([len(part) for part in own])
        loads_LE, total = loads.view_as(self._loads_LE), dict(zip(_COUNTS, counts.tolist(), strict=True))
        for count in (self._loads_LE, self._replayed_K, self._changed_K, *self._counts.values()):
            count.zero_()
        metrics: dict[str, float] = {}
        if loads_LE.any():
            peaks_L = loads_LE.amax(1) / loads_LE.double().mean(1)
            metrics |= {
                "expert_load_mean": float(peaks_L.mean()),
                "expert_load_max": float(peaks_L.max()),
                "experts_unused_frac": float((loads_LE == 0).double().mean()),
            }
        if self._replays:
            metrics |= {
                "routing_changed_frac": int(changed_K.sum()) / max(int(replayed_K.sum()), 1),
                "routing_unknown_frac": total["unknown"] / max(total["readers"], 1),
                "routing_later_frac": total["later"] / max(total["readers"], 1),
                "routing_unshared_frac": total["unshared"] / max(total["tokens"], 1),
            }
            by_lag = enumerate(zip(changed_K.tolist(), replayed_K.tolist(), strict=True))
            metrics |= {f"lag={lag}/routing_changed_frac": part / of for lag, (part, of) in by_lag if of}
        return metrics


def balance_of(
    model: Any, *, replays: bool, compiled: bool, max_staleness: int, device: torch.device
) -> Balance | None:
    """Return what counts the loads of a model's experts; None if it has none, or they cannot be observed. Observation
    divides the code of compiled layers, so it is left out unless choices are replayed, which does so anyway."""
    if replays:
        return Balance(model, replays=True, max_staleness=max_staleness, device=device)
    try:
        return None if compiled else Balance(model, replays=False, max_staleness=0, device=device)
    except ConfigError:
        return None
