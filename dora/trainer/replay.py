"""Replay of the experts that the engine chose (R3, arXiv 2510.11370), and a check that a model can do that.

All passes over a row replay the same experts: of the policy, the proximal policy and the reference alike, so that
policies with equal weights have equal log-probs, to the bit. Tokens of which no experts are known, and rows of the
checks, are routed by the model itself.

Legend: T tokens of a pass, P trained tokens, L layers with experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dora.routers import find_routers, unsupported
from dora.routing import RoutingShape
from dora.trainer.check_rows import sequences_for
from dora.trainer.forward_check import PACKING
from dora.trainer.logprobs import logprobs
from dora.trainer.model import Policy
from dora.trainer.packing import Layout, Row


@contextmanager
def replayed(model: Any, row: Row) -> Iterator[None]:
    """In this context, passes of the model over `row`, and their backward passes, are of the experts of the row."""
    if row.experts_BTLk is None:
        yield
        return
    routers = find_routers(model)
    routers.replay(row.flat(row.experts_BTLk))
    try:
        yield
    finally:
        routers.replay(None)


@torch.no_grad()
def check_replay(policy: Policy, layout: Layout, *, dtype: str) -> RoutingShape:
    """Return what the model chooses for each token; ConfigError unless replay of its own choice changes nothing, and
    that of other experts something. A collective: every rank computes and finds the same."""
    model, family = policy.model, policy.model.config.model_type
    routers = find_routers(model)
    for _, row in sequences_for(model.config, longest=0).rows(layout, policy.device):
        with routers.record() as recording:
            expected_P = logprobs(model, row, temperature=1.0)[0]
            own_TLk = recording.take()[-row.flat(row.tokens_BT).numel() :]  # what came before only measured the head
        found = []
        for experts_TLk in (own_TLk.flip(-1), (own_TLk + 1) % routers.shape.num_experts):
            routers.replay(experts_TLk)
            try:
                found.append((logprobs(model, row, temperature=1.0)[0] - expected_P).abs().double().mean())
            finally:
                routers.replay(None)
        same, other = torch.stack(found).tolist()
        if not same <= PACKING[dtype]:
            raise unsupported(family, f"change log-probs by {same:.2g} if their own choice is replayed")
        if not other > same:
            raise unsupported(family, "do not send tokens to the experts that are replayed")
    policy.reshard()
    return routers.shape
