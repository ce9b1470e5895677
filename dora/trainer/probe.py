"""The probe: log-probs under the version that sampled, so that the engine's mismatch is known apart from staleness.

log π_s/μ of a stale token mixes two differences: log π_v/μ is between two engines under the same weights, log π_s/π_v
is between two weights in the same engine. For a token of version s in the first update the second one is 0, as
π_v = π_s. For a few stale sequences of a step the probe computes log π_v with the weights of v from the store, which
keeps v until the step with its groups is trained. The model is not copied: the policy's shards are set aside in host
memory, v is loaded in their place for one pass, and then the shards are put back, bit for bit. What is published
includes the adapter, if there is one, which is switched off in that pass. Where servers hold adapters, that of v takes
the place of the policy's.

Invariant: the probe changes no weight and no gradient, and never ends a run: a version that cannot be read is skipped.
Legend: P trained tokens of a pass, p those of one sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from dora.core.ids import VersionId
from dora.errors import ConfigError
from dora.objectives.tokens import log_ratio
from dora.routing import RoutingShape
from dora.trainer.adapters import Adapters
from dora.trainer.agreement import together
from dora.trainer.full_disk import print_error
from dora.trainer.loading import open_folder
from dora.trainer.logprobs import logprobs
from dora.trainer.model import Policy
from dora.trainer.packing import Layout, make_row
from dora.trainer.replay import replayed
from dora.transport.messages import Configure, MicroBatch, TrainerSettings
from dora.weights.store import ADAPTER, StoreError, VersionStore

_NONE: Final = 2**62  # in place of a version


@dataclass(frozen=True, slots=True)
class _Sequence:
    """A stale sequence, or the beginning of one."""

    tokens: NDArray[np.int32]
    trained: NDArray[np.int64]  # [p] positions
    behavior_p: Tensor
    current_p: Tensor  # log-probs under the weights at the start of the step
    experts: NDArray[np.int16] | None  # to replay


def make_probe(
    order: Configure, *, policy: Policy, layout: Layout, routing: RoutingShape | None = None
) -> Probe | None:
    """Return the probe of a run, over its store; None if it is off. `routing`: of the choices to replay, if any."""
    if not order.settings.probe_tokens:
        return None
    store = VersionStore(memory_root=Path(order.memory_root), durable_root=Path(order.durable_root))
    return Probe(store, policy=policy, layout=layout, settings=order.settings, routing=routing)


class Probe:
    """Collects sequences of a step, and measures when the step closes."""

    def __init__(
        self,
        store: VersionStore,
        *,
        policy: Policy,
        layout: Layout,
        settings: TrainerSettings,
        routing: RoutingShape | None = None,
    ) -> None:
        self._store = store
        self._no_experts = None if routing is None else np.zeros((0, len(routing.layers), routing.top_k), np.int16)
        self._policy = policy
        self._layout = layout
        self._settings = settings
        self._begin()

    def _begin(self) -> None:
        self._version = _NONE  # the version of the collected sequences: the smallest one seen in this step
        self._sequences: list[_Sequence] = []
        # sums for the engine mismatch: tokens, k3; for the version drift: tokens, log-ratio, k3
        self._sums = torch.zeros(5, dtype=torch.float64, device=self._policy.device)

    def add(
        self,
        batch: MicroBatch,
        members: Sequence[int],
        current_P: Tensor,
        behavior_P: Tensor,
        *,
        experts: NDArray[np.int16] | None = None,
    ) -> None:
        """Add a pass of the first update of a step: its sequences, and their log-probs under π_s and μ. `experts`: of
        all tokens of the micro-batch."""
        is_due = (batch.step + 1) % self._settings.probe_every == 0
        ends = np.cumsum(batch.lengths)
        start = 0
        for n in members:
            inside = slice(ends[n] - batch.lengths[n], ends[n])
            trained = np.flatnonzero(batch.loss_mask[inside])
            at = slice(start, start + len(trained))
            start = at.stop
            if batch.versions[n] == batch.step:
                self._add_engine(current_P[at].detach(), behavior_P[at])
            elif is_due and batch.versions[n] <= self._version and not self._layout.is_long(batch.lengths[n]):
                chosen = None if experts is None else experts[inside]
                sequence = _Sequence(batch.tokens[inside], trained, behavior_P[at], current_P[at].detach(), chosen)
                self._choose(int(batch.versions[n]), sequence)

    def _choose(self, version: int, sequence: _Sequence) -> None:
        """Keep as much of a sequence as there is room for: in a causal model, log-probs of the first tokens do not
        depend on later tokens."""
        if version < self._version:
            self._version, self._sequences = version, []
        room = self._settings.probe_tokens - sum(len(kept.tokens) for kept in self._sequences)
        trained = sequence.trained[sequence.trained < room]
        if count := len(trained):
            end, experts = trained[-1] + 1, sequence.experts
            self._sequences.append(
                _Sequence(
                    sequence.tokens[:end],
                    trained,
                    sequence.behavior_p[:count],
                    sequence.current_p[:count],
                    None if experts is None else experts[:end],
                )
            )

    def _add_engine(self, trainer_p: Tensor, behavior_p: Tensor) -> None:
        difference_p = log_ratio(trainer_p, behavior_p).double()
        self._sums[:2] += torch.stack([difference_p.new_tensor(float(len(difference_p))), _k3(difference_p)])

    def close(self) -> dict[str, float]:
        """Return the metrics of the step, and begin the next; a collective."""
        version = torch.tensor(self._version, device=self._policy.device)
        dist.all_reduce(version, op=dist.ReduceOp.MIN)
        is_skipped = int(version) != _NONE and not self._measure(VersionId(int(version)))
        sums = self._sums
        self._begin()
        dist.all_reduce(sums)
        engine_tokens, engine_k3, tokens, drift, drift_k3 = (sums / self._layout.ranks).tolist()
        metrics = {"probe_tokens": tokens, "probe_skipped": float(is_skipped)}
        if engine_tokens:
            metrics["engine_mismatch_k3"] = engine_k3 / engine_tokens
        if tokens:
            metrics |= {"version_drift_mean": drift / tokens, "version_drift_k3": drift_k3 / tokens}
        return metrics

    def _measure(self, version: VersionId) -> bool:
        """Add the sums of this rank's sequences of `version`; False if it cannot be read. A collective."""
        chosen = self._sequences if self._version == version else []
        lengths = [len(sequence.tokens) for sequence in chosen]
        starts = np.cumsum(lengths) - lengths
        trained = [start + sequence.trained for start, sequence in zip(starts, chosen, strict=True)]
        experts = [self._no_experts, *(sequence.experts for sequence in chosen)]
        row = make_row(
            np.concatenate([np.zeros(0, np.int32), *(sequence.tokens for sequence in chosen)]),
            lengths=lengths,
            trained=np.concatenate([np.zeros(0, np.int64), *trained]),
            experts=None if self._no_experts is None else np.concatenate([e for e in experts if e is not None]),
            layout=self._layout,
            device=self._policy.device,
        )
        try:
            with self._under(version), replayed(self._policy.model, row), torch.no_grad():
                settings = self._settings
                sampled_P = logprobs(
                    self._policy.model, row, temperature=settings.temperature, fp32_head=settings.fp32_head
                )[0]
        except ConfigError as err:
            if dist.get_rank() == 0:
                print_error(f"the probe of version {version} is skipped: {err}")
            return False
        if chosen:
            self._add_engine(sampled_P, torch.cat([sequence.behavior_p for sequence in chosen]))
            drift_P = log_ratio(torch.cat([sequence.current_p for sequence in chosen]), sampled_P).double()
            self._sums[2:] += torch.stack([drift_P.new_tensor(float(len(drift_P))), drift_P.sum(), _k3(drift_P)])
        return True

    @contextmanager
    def _under(self, version: VersionId) -> Iterator[None]:
        """In this context the policy is that of `version`; ConfigError on all ranks if one cannot read it."""
        policy = self._policy
        if policy.adapters is not None and self._settings.serves_adapters:
            with policy.other_adapter(partial(self._read_adapter, policy.adapters, version)):
                yield
            return
        loaded = policy.loaded()
        aside = {name: tensor.to("cpu", copy=True) for name, tensor in loaded.items()}
        policy.reshard()
        try:
            together(lambda: self._load(version), device=policy.device)
            with policy.without_adapter():
                yield
        finally:
            policy.reshard()
            for name, tensor in loaded.items():
                tensor.copy_(aside[name])

    def _read_adapter(self, adapters: Adapters, version: VersionId, *, rank: int) -> None:
        """Write this rank's rows of a version's adapter over those of the policy."""
        adapters.read(self._folder(version) / ADAPTER, rank=rank)

    def _load(self, version: VersionId) -> None:
        """Write this rank's rows of a published version over those of the policy."""
        policy = self._policy
        with ExitStack() as opened:
            try:
                folder = open_folder(self._folder(version), policy.model.config, opened)
            except (OSError, ValueError) as err:
                raise ConfigError(str(err)) from err
            policy.load_shards(folder)

    def _folder(self, version: VersionId) -> Path:
        try:
            return self._store.folder(version)
        except StoreError as err:
            raise ConfigError(str(err)) from err


def _k3(difference_P: Tensor) -> Tensor:
    """Return the sum of e^d - 1 - d."""
    return (difference_P.expm1() - difference_P).sum()
