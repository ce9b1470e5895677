"""Replay of experts: equal to the routers' own choice where that is replayed, to a plain loop elsewhere, and guarded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor

from dora.errors import ConfigError, InvariantViolation
from dora.routers import find_routers, routing_shape
from dora.routing import RoutingShape
from dora.trainer.checkpointing import MODES, apply_checkpointing
from dora.trainer.logprobs import logprobs
from dora.trainer.model import build_on_meta, decoder_layers
from dora.trainer.packing import Layout, Row, make_row
from dora.trainer.replay import replayed
from tests.families import FAMILIES, make_config, make_model

CPU = torch.device("cpu")
LENGTHS: Final = (3, 40, 17, 29)
#: Family -> what makes a weight of a score, and whether those of a token are divided by their sum.
WEIGHTS: Final[dict[str, tuple[str, bool]]] = {
    "mixtral": ("softmax", True), "qwen2_moe": ("softmax", False), "qwen3_moe": ("softmax", False),
    "olmoe": ("softmax", False), "flex_olmo": ("softmax", False), "minimax": ("softmax", True),
    "qwen3_5_moe_text": ("softmax", True), "qwen3_next": ("softmax", True), "hunyuan_v1_moe": ("softmax", True),
    "deepseek_v2": ("softmax", False), "ernie4_5_moe": ("softmax", True), "jamba": ("softmax", False),
    "gpt_oss": ("of chosen", False), "granitemoe": ("of chosen", False), "granitemoeshared": ("of chosen", False),
    "granitemoehybrid": ("of chosen", False), "deepseek_v3": ("sigmoid", True), "glm4_moe": ("sigmoid", True),
    "glm4_moe_lite": ("sigmoid", True), "dots1": ("sigmoid", True), "exaone_moe": ("sigmoid", True),
    "nemotron_h": ("sigmoid", True), "kimi_linear": ("sigmoid", True), "minimax_m2": ("sigmoid", True),
    "afmoe": ("sigmoid", True), "lfm2_moe": ("sigmoid", True), "llama4_text": ("sigmoid", False),
}  # fmt: skip
#: Further forms of families; the layers of the first have groups of experts, of which some are left out.
FORMS: Final = {
    "deepseek_v2 in groups": (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_routed_experts": 8, "n_group": 4, "topk_group": 2},
    ),
    "deepseek_v3 in groups": ("deepseek_v3", {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}),
    "qwen3_moe of sums": ("qwen3_moe", {"norm_topk_prob": True}),
    "one expert": ("mixtral", {"num_experts_per_tok": 1}),
    **{family: (family, {}) for family in WEIGHTS},
}


def make(form: str) -> Any:
    family, changes = FORMS[form]
    model = make_model(family, **changes)
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("bias") and parameter.dim() == 1:  # of the choice too, so that it is not the highest scores
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def drawn() -> list[np.ndarray]:
    return [np.random.default_rng(n).integers(0, 97, n) for n in LENGTHS]


def row_of(experts: np.ndarray | None, *, padded: bool = False) -> Row:
    """All sequences in one row; every token but the first of each is trained."""
    trained = np.concatenate([np.arange(n) > 0 for n in LENGTHS]).nonzero()[0]
    return make_row(
        np.concatenate(drawn()),
        lengths=LENGTHS,
        trained=trained,
        experts=None if experts is None else experts.astype(np.int16),
        layout=Layout(padded=padded),
        device=CPU,
    )


def places_of(row: Row) -> Tensor:
    """Where the tokens of `drawn` are in a row; all lengths differ."""
    starts = np.arange(len(LENGTHS)) * row.tokens_BT.shape[1] if row.padded else np.cumsum(LENGTHS) - LENGTHS
    return torch.cat([torch.arange(n) + int(start) for n, start in zip(LENGTHS, starts, strict=True)])


def run(model: Any, row: Row) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs, and the gradient of a sum of them."""
    model.zero_grad()
    with replayed(model, row):
        found_P = logprobs(model, row, temperature=1.0)[0]
        (found_P * torch.linspace(-1.0, 1.0, len(found_P))).sum().backward()
    return found_P.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def relative(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    squares = sum(float((found[n] - expected[n]).double().square().sum()) for n in found)
    return float((squares / sum(float(t.double().square().sum()) for t in expected.values())) ** 0.5)


def own_choice(model: Any, row: Row) -> np.ndarray:
    """What the model chooses for each token of `drawn`."""
    with torch.no_grad(), find_routers(model).record() as recording:
        logprobs(model, row, temperature=1.0)
        logprobs_again = recording.take()  # what follows the head is measured by a pass of its own, at first
    return logprobs_again[-row.tokens_BT.numel() :][places_of(row)].numpy()


# ---- a plain loop ---------------------------------------------------------------------------------------------------


@contextmanager
def plainly(model: Any, family: str, experts_TLk: Tensor) -> Iterator[None]:
    """In this context, the model sends its tokens to these experts by formulas of this test."""
    blocks = [block for block in model.modules() if {"experts"} < set(dict(block.named_children()))]
    routers = [getattr(block, "router", None) or block.gate for block in blocks]
    before = [(owner, dict(vars(owner))) for owner in (*routers, *blocks)]
    for block, router, ids_Tk in zip(blocks, routers, experts_TLk.unbind(1), strict=True):
        forward = plain_router(family, model.config, router, ids_Tk.long())
        if family == "jamba":
            block.route_tokens_to_experts = lambda hidden, _, f=forward: f(hidden)[:0:-1]
        else:
            router.forward = forward
    try:
        yield
    finally:
        for owner, attributes in before:
            vars(owner).clear()
            vars(owner).update(attributes)


def plain_router(family: str, config: Any, router: Any, ids_Tk: Tensor) -> Callable[..., tuple[Tensor, ...]]:
    kind, is_divided = WEIGHTS[family]
    is_divided = getattr(config, "norm_topk_prob", is_divided) if family != "hunyuan_v1_moe" else is_divided
    scale = getattr(config, "routed_scaling_factor", getattr(config, "route_scale", 1.0))
    matrix_EH = next(p for p in router.parameters() if p.dim() == 2)

    def forward(hidden: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        rows, scores = [], hidden.reshape(-1, hidden.shape[-1]) @ matrix_EH.T
        if family == "gpt_oss":
            scores = scores + router.bias
        for token, ids in enumerate(ids_Tk.tolist()):
            logits = scores[token]
            chosen = torch.stack([logits[i] for i in ids])
            if kind == "softmax":
                weights = torch.exp(chosen - torch.logsumexp(logits, 0))
            else:
                weights = chosen.softmax(0) if kind == "of chosen" else 1 / (1 + torch.exp(-chosen))
            rows.append(scale * weights / (weights.sum() if is_divided else 1.0))
        weight_Tk = torch.stack(rows)
        if family == "llama4_text":
            return torch.zeros_like(scores).scatter(1, ids_Tk, weight_Tk), scores
        if family.startswith("granite"):
            return ids_Tk, weight_Tk, scores
        return scores, weight_Tk, ids_Tk

    return forward


def with_runners_up(model: Any, row: Row, own_TLk: np.ndarray, *, share: float) -> np.ndarray:
    """The own choice, but with another expert in place of the last one for this share of pairs."""
    rng = np.random.default_rng(0)
    experts = own_TLk.copy()
    num_experts = find_routers(model).shape.num_experts
    for token, layer in zip(*(rng.random(own_TLk.shape[:2]) < share).nonzero(), strict=True):
        left = [e for e in range(num_experts) if e not in own_TLk[token, layer]]
        experts[token, layer, -1] = rng.choice(left)
    return experts


# ---- equality -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_own_choice_is_replayed_to_the_bit_and_others_as_by_a_plain_loop(form: str) -> None:
    family, model = FORMS[form][0], make(form)
    padded = "linear_attention" in str(model.config) or family in ("jamba", "nemotron_h", "granitemoehybrid")
    live = row_of(None, padded=padded)
    own = own_choice(model, live)
    expected = run(model, live)
    for same in (own, own[..., ::-1], np.where(np.arange(len(own))[:, None, None] % 2, own, -1)):
        found = run(model, row_of(same, padded=padded))
        assert torch.equal(found[0], expected[0])
        assert all(torch.equal(found[1][name], expected[1][name]) for name in expected[1])
    experts = with_runners_up(model, live, own, share=0.05)
    assert (experts != own).any()
    found = run(model, row_of(experts, padded=padded))
    assert float((found[0] - expected[0]).abs().max()) > 1e-2
    model.set_experts_implementation("eager") if family != "llama4_text" else None
    table = torch.zeros(live.tokens_BT.numel(), *own.shape[1:], dtype=torch.int64)
    table[:] = torch.arange(own.shape[2])
    table[places_of(live)] = torch.from_numpy(experts).long()
    with plainly(model, family, table):
        plain = run(model, live)
    print(form, float((found[0] - plain[0]).abs().max()), relative(found[1], plain[1]))
    torch.testing.assert_close(found[0], plain[0], rtol=0, atol=1e-5)
    assert relative(found[1], plain[1]) <= 2e-6
