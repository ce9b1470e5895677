"""Replay of experts: equal to the routers' own choice where that is replayed, and to a plain loop elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from dora.errors import ConfigError, InvariantViolation
from dora.routers import find_routers, routing_shape
from dora.routing import RoutingShape
from dora.trainer import attention
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
    model.set_attn_implementation(attention.NAME)
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
        logprobs(model, row, temperature=1.0)  # at first, another pass measures what follows the head
        experts_TLk = recording.take()[-row.tokens_BT.numel() :]
    return experts_TLk[places_of(row)].numpy()


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


#: Long without the kernels of a GPU.
SLOW: Final = {"granitemoehybrid", "kimi_linear"}


@pytest.mark.parametrize("form", [pytest.param(f, marks=[pytest.mark.deep] if f in SLOW else []) for f in FORMS])
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
    model.set_experts_implementation("eager")
    table = torch.zeros(live.tokens_BT.numel(), *own.shape[1:], dtype=torch.int64)
    table[:] = torch.arange(own.shape[2])
    table[places_of(live)] = torch.from_numpy(experts).long()
    with plainly(model, family, table):
        plain = run(model, live)
    torch.testing.assert_close(found[0], plain[0], rtol=0, atol=1e-5)
    assert relative(found[1], plain[1]) <= 2e-6


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_is_the_same_under_recomputation(mode: Any) -> None:
    """Against a plain loop under the same attention."""
    model, plain = make("qwen3_moe of sums"), make("qwen3_moe of sums")
    live = row_of(None)
    own = own_choice(model, live)
    row = row_of(with_runners_up(model, live, own, share=0.3))
    plain.set_experts_implementation("eager")
    with plainly(plain, "qwen3_moe", row.experts_BTLk.flatten(0, 1)):  # type: ignore[union-attr]
        expected = run(plain, row_of(None))
    apply_checkpointing(decoder_layers(model), mode)
    found = run(model, row)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=2e-6)
    assert relative(found[1], expected[1]) <= 1e-6


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", ["another", "none", "in place", "late"])
def test_another_table_in_backward_is_noticed(mode: Any, change: str) -> None:
    model = make("mixtral")
    apply_checkpointing(decoder_layers(model), mode)
    row = row_of(None)
    own = own_choice(model, row)
    routers, table = find_routers(model), torch.from_numpy(own)
    others = torch.from_numpy(with_runners_up(model, row, own, share=0.5))
    routers.replay(None if change == "late" else table)
    total = logprobs(model, row, temperature=1.0)[0].sum()
    if change == "in place":
        table.copy_(others)
    else:
        routers.replay(None if change == "none" else others)
    # torch notices by itself if recomputation has other operators.
    with pytest.raises((InvariantViolation, CheckpointError), match=r"other experts|torch.utils.checkpoint"):
        total.backward()


def test_a_wrong_gradient_is_what_that_prevents(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("mixtral")
    apply_checkpointing(decoder_layers(model), "full")
    row = row_of(None)
    own = own_choice(model, row)
    expected = run(model, row_of(own))[1]
    monkeypatch.setattr("dora.routers._Router._require_unchanged", lambda *_: None)
    routers = find_routers(model)
    routers.replay(torch.from_numpy(own))
    model.zero_grad()
    found_P = logprobs(model, row, temperature=1.0)[0]
    routers.replay(torch.from_numpy(with_runners_up(model, row, own, share=0.05)))
    (found_P * torch.linspace(-1.0, 1.0, len(found_P))).sum().backward()
    assert relative({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, expected) > 1e-2


# ---- what a model has -----------------------------------------------------------------------------------------------


def test_the_routers_of_a_model_without_data_are_those_of_its_layers() -> None:
    meta = build_on_meta(make_config("deepseek_v3"), torch.float32)
    assert routing_shape(meta) == RoutingShape(num_layers=4, layers=(1, 2, 3), num_experts=4, top_k=2)
    assert find_routers(make("deepseek_v3")).shape == routing_shape(meta)
    hybrid = build_on_meta(make_config("nemotron_h"), torch.float32)
    assert routing_shape(hybrid) == RoutingShape(num_layers=4, layers=(3,), num_experts=4, top_k=2)


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("llama", {}, "llama has no routers of experts; set it to off"),
        ("phimoe", {}, "routers of phimoe mask scores by the experts that they chose before; set it to off"),
        ("hunyuan_v1_moe", {"moe_topk": [1, 2, 1, 2]}, "routers of hunyuan_v1_moe differ between layers; set it to"),
    ],
)
def test_models_that_cannot_replay_are_refused(family: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"^objective.router_replay: {says}"):
        routing_shape(build_on_meta(make_config(family, **changes), torch.float32))


def test_every_family_with_experts_is_compared_or_refused() -> None:
    found = set()
    for family in FAMILIES:
        try:
            routing_shape(build_on_meta(make_config(family), torch.float32))
        except ConfigError:
            continue
        found.add(family)
    assert found == WEIGHTS.keys()


def test_a_router_that_chooses_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("mixtral")
    router = next(module for module in model.modules() if hasattr(module, "gate")).gate
    forward = router.forward

    def twice(hidden: Tensor) -> Any:
        torch.topk(hidden[:, :4], 2)
        return forward(hidden)

    monkeypatch.setattr(router, "forward", twice)
    row = row_of(None)
    with pytest.raises(ConfigError, match="routers of mixtral call topk 2 times for their choice; set it to off"):
        own_choice(model, row)


def test_a_table_of_other_tokens_is_refused() -> None:
    model = make("mixtral")
    routers, row = find_routers(model), row_of(None)
    routers.replay(torch.zeros(3, 4, 2, dtype=torch.int16))
    with pytest.raises(InvariantViolation, match="experts of 3 tokens for a pass of 89"):
        logprobs(model, row, temperature=1.0)
    with pytest.raises(InvariantViolation, match="experts of the shape"):
        routers.replay(torch.zeros(3, 3, 2, dtype=torch.int16))


def test_passes_are_recorded_in_order_and_only_in_the_context() -> None:
    model = make("mixtral")
    ids = torch.arange(12)[None]
    with torch.no_grad(), find_routers(model).record() as recording:
        assert len(recording.take()) == 0
        whole = model(input_ids=ids, use_cache=False) and recording.take()
        for part in ids[:, :5], ids[:, :7]:
            model(input_ids=part, use_cache=False)
        parts = recording.take()
        assert len(recording.take()) == 0
    model(input_ids=ids, use_cache=False)
    assert (whole.shape, whole.dtype) == ((12, 4, 2), torch.int16)
    assert torch.equal(parts, torch.cat([whole[:5], whole[:7]]))
    assert find_routers(model) is find_routers(model)
