"""From a micro-batch to the row and the loss inputs of each pass, and checks of what the trainer relies on.

C3 is asserted for every group, independently of the controller.
Legend: P trained tokens of a pass, n sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dora.errors import InvariantViolation, ProtocolError
from dora.objectives.advantages import group_advantages
from dora.objectives.tokens import Tokens
from dora.routing import RoutingShape
from dora.trainer.packing import Layout, Row, make_row
from dora.transport.messages import MicroBatch


@dataclass(frozen=True, slots=True)
class Targets:
    """Inputs of the objective that come with the micro-batch; see `Tokens`."""

    behavior_P: Tensor  # float32
    advantage_P: Tensor  # float32
    sequence_P: Tensor  # int64
    lengths_n: Tensor  # int64
    siblings_n: Tensor  # int64
    staleness_n: Tensor  # int64

    def tokens(
        self,
        current_P: Tensor,
        *,
        entropy_P: Tensor,
        proximal_P: Tensor | None = None,
        reference_P: Tensor | None = None,
        progress: float = 0.0,
    ) -> Tokens:
        """Return the inputs of the objective, with the log-probs of the weights being trained and of other policies."""
        return Tokens(
            current_P=current_P,
            behavior_P=self.behavior_P,
            advantage_P=self.advantage_P,
            sequence_P=self.sequence_P,
            lengths_n=self.lengths_n,
            siblings_n=self.siblings_n,
            staleness_n=self.staleness_n,
            progress=progress,
            proximal_P=proximal_P,
            reference_P=reference_P,
            entropy_P=entropy_P,
        )


def pack(
    batch: MicroBatch,
    members: Sequence[int],
    *,
    owners_n: NDArray[np.int64] | None = None,
    advantages_nU: NDArray[np.float64],
    experts: NDArray[np.int16] | None = None,
    layout: Layout,
    device: torch.device,
) -> tuple[Row, Targets]:
    """Return the row and the loss inputs of one pass over the sequences `members` of a checked micro-batch.

    The objective treats sequences with the same number in `owners_n` as one sequence; None: each sequence by itself.
    `experts`: those of the micro-batch, from `experts_of`.
    `advantages_nU` has an advantage per turn; turns beyond the last column have the advantage of the last column.
    """
    chosen = np.array(members, np.int64)
    ends, lengths = np.cumsum(batch.lengths)[chosen], batch.lengths[chosen]
    at = np.concatenate([np.arange(0), *(np.arange(e - n, e) for e, n in zip(ends, lengths, strict=True))])
    trained = np.flatnonzero(batch.loss_mask[at])
    of_row_P = np.repeat(np.arange(len(chosen)), lengths)[trained]
    owners = (np.arange(len(batch.lengths)) if owners_n is None else owners_n)[chosen]
    place = {owner: i for i, owner in enumerate(dict.fromkeys(owners.tolist()))}
    sequence_P = np.array([place[owner] for owner in owners.tolist()], np.int64)[of_row_P]
    firsts = chosen[[owners.tolist().index(owner) for owner in place]]
    turn_P = np.minimum(turns_of(batch)[at[trained]], advantages_nU.shape[1] - 1)
    advantage_P = advantages_nU[chosen[of_row_P], turn_P]
    targets = Targets(
        behavior_P=torch.from_numpy(batch.behavior_logprobs[at[trained]]).to(device),
        advantage_P=torch.from_numpy(advantage_P.astype(np.float32)).to(device),
        sequence_P=torch.from_numpy(sequence_P).to(device),
        lengths_n=torch.from_numpy(np.bincount(sequence_P, minlength=len(firsts))).to(device),
        siblings_n=torch.from_numpy((~np.isnan(batch.group_rewards[firsts])).sum(1)).to(device),
        staleness_n=torch.from_numpy((batch.step - batch.versions[firsts]).astype(np.int64)).to(device),
    )
    row = make_row(
        batch.tokens[at],
        lengths=lengths,
        trained=trained,
        experts=None if experts is None else experts[at],
        lags_n=batch.step - batch.versions[chosen],
        layout=layout,
        device=device,
    )
    return row, targets


def experts_of(batch: MicroBatch, routing: RoutingShape | None) -> NDArray[np.int16] | None:
    """Return [T, L, k] the experts of a checked micro-batch, -1 where nothing is known; None if none are replayed."""
    if routing is None:
        return None
    if not len(batch.tokens):
        return np.zeros((0, len(routing.layers), routing.top_k), np.int16)
    experts = _ids(batch, routing).astype(np.int16)
    experts[batch.routed == 0] = -1
    return experts


def _ids(batch: MicroBatch, routing: RoutingShape) -> NDArray[np.integer]:
    """Return [T, L, k] the ids as they were sent; those of tokens of which nothing is known have no meaning."""
    return np.ascontiguousarray(batch.experts).view(routing.dtype.newbyteorder("<"))


def firsts_of(batch: MicroBatch) -> NDArray[np.int64]:
    """Return the index of the first sequence of each trajectory."""
    return np.flatnonzero(np.diff(batch.trajectories, prepend=-1) != 0)


def turns_of(batch: MicroBatch) -> NDArray[np.int64]:
    """Return [T] the number of the turn, from 0 in each trajectory, in which each trained token was sampled.

    Two turns always have tokens between them that are not trained, so a turn is a run of trained tokens.
    """
    begins = np.diff(batch.loss_mask != 0, prepend=False) & (batch.loss_mask != 0)
    firsts = firsts_of(batch)
    before = np.cumsum(begins)[(np.cumsum(batch.lengths) - batch.lengths)[firsts]]  # first tokens are never trained
    tokens = np.add.reduceat(batch.lengths, firsts) if len(firsts) else batch.lengths
    turns: NDArray[np.int64] = np.cumsum(begins) - np.repeat(before, tokens) - 1
    return turns


def advantages_of(batch: MicroBatch, kinds: Sequence[str], *, to_go: bool = False) -> NDArray[np.float64]:
    """Return [n, 1] advantages or, with `to_go`, [n, U]: one for each turn, of the rewards from that turn to the end.

    `kinds`: the kind of advantage of each source of prompts, or a single kind for all.
    """
    if len(kinds) > 1 and batch.sources.max(initial=0) >= len(kinds):
        raise ProtocolError(f"micro-batch {batch.step}/{batch.index}: a prompt of source {batch.sources.max()}")
    kind = [kinds[source] for source in batch.sources] if len(kinds) > 1 else kinds[0]
    if not (to_go and batch.rewards_to_go.size):
        return group_advantages(batch.rewards, batch.group_rewards, kind=kind)[:, None]
    own = batch.trajectories % batch.group_rewards.shape[1]
    to_go_U = [batch.rewards_to_go[:, :, turn] for turn in range(batch.rewards_to_go.shape[2])]
    of_turns = [group_advantages(of[np.arange(len(own)), own], of, kind=kind) for of in to_go_U]
    return np.stack(of_turns, axis=1)


def without_truncated(batch: MicroBatch) -> MicroBatch:
    """Return the micro-batch without training on answers that a budget ended.

    The rewards of these answers still count in the statistics of their groups.
    """
    kept = np.repeat(batch.truncated == 0, batch.lengths)
    return msgspec.structs.replace(batch, loss_mask=batch.loss_mask * kept)


def check(batch: MicroBatch, *, max_staleness: int, vocab_size: int, routing: RoutingShape | None = None) -> None:
    """Raise InvariantViolation if a group breaks C3, and ProtocolError if the fields contradict each other.

    `routing`: what the model chooses for each token; None: no choices are replayed.
    """
    for group, version in zip(batch.groups, batch.versions, strict=True):
        if not 0 <= batch.step - version <= max_staleness:
            raise InvariantViolation(
                f"C3: group {group} of version {version} was committed to step {batch.step + 1} (K = {max_staleness})"
            )
    n, total = len(batch.lengths), len(batch.tokens)
    if len(np.unique(batch.trajectories)) != len(firsts_of(batch)):
        raise ProtocolError(f"micro-batch {batch.step}/{batch.index}: sequences of one trajectory are not side by side")
    per_trajectory = ("trajectories", "groups", "rewards", "group_rewards", "truncated", "sources")
    if any(len(getattr(batch, column)) != n for column in per_trajectory):
        raise ProtocolError(f"micro-batch {batch.step}/{batch.index}: columns of different length for {n} sequences")
    if batch.rewards_to_go.size and batch.rewards_to_go.shape[:2] != batch.group_rewards.shape:
        raise ProtocolError(f"micro-batch {batch.step}/{batch.index}: rewards to go that do not fit the siblings")
    if any(len(column) != total for column in (batch.loss_mask, batch.behavior_logprobs)):
        raise ProtocolError(f"micro-batch {batch.step}/{batch.index}: columns of different length for {total} tokens")
    if (batch.lengths < 1).any() or batch.lengths.sum() != total:
        raise ProtocolError(f"micro-batch {batch.step}/{batch.index}: lengths do not add up to {total} tokens")
    if total and (batch.tokens.min() < 0 or batch.tokens.max() >= vocab_size):
        raise ProtocolError(f"micro-batch {batch.step}/{batch.index}: a token outside the vocabulary of {vocab_size}")
    if batch.loss_mask[np.cumsum(batch.lengths) - batch.lengths].any():
        raise ProtocolError(f"micro-batch {batch.step}/{batch.index}: the first token of a sequence cannot be trained")
    bad = ~np.isfinite(batch.behavior_logprobs[batch.loss_mask != 0])
    if bad.any():
        raise ProtocolError(f"micro-batch {batch.step}/{batch.index}: {bad.sum()} trained tokens without a log-prob")
    if fault := _fault_of_routing(batch, routing):
        raise ProtocolError(f"micro-batch {batch.step}/{batch.index}: experts to replay: {fault}")


def _fault_of_routing(batch: MicroBatch, routing: RoutingShape | None) -> str:
    """Return what is wrong with the experts of a micro-batch, "" if nothing."""
    if routing is None or not len(batch.tokens):
        return "some, though none are expected" if batch.experts.size or batch.routed.size else ""
    total, num_layers = len(batch.tokens), len(routing.layers)
    expected = (total, num_layers, routing.row_bytes // num_layers)
    if batch.experts.shape != expected or len(batch.routed) != total:
        return f"shapes {batch.experts.shape} and {batch.routed.shape}, expected {expected} and {(total,)}"
    if batch.routed.max(initial=0) > 2:
        return f"a token is marked {batch.routed.max()}"
    return routing.fault(_ids(batch, routing)[batch.routed != 0])
