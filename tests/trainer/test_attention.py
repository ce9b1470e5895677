"""Attention over packed and padded rows: transformers' own attention of each sequence alone, and its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_forward_check import make
from torch import Tensor

from dora.trainer import attention, attention_kernels
from dora.trainer.attention import Pattern, Segments, attend, within

CPU = torch.device("cpu")
LENGTHS = (5, 40, 17, 64, 1, 9)
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "num_key_value_heads": 4,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window": 16},
    "deepseek_v3": {**LATENT, "first_k_dense_replace": 9},
    "gemma2": {"head_dim": 8, "sliding_window": 16, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 5},
    "gemma3_text": {"head_dim": 8, "sliding_window": 16},
    "gpt_oss": {**EXPERTS, "head_dim": 8, "sliding_window": 16},
    "granite": {"attention_multiplier": 0.3},
    "llama4_text": {
        **EXPERTS, "head_dim": 8, "attention_chunk_size": 16, "intermediate_size_mlp": 48,
        "attn_temperature_tuning": False,
    },
    "mistral": {"sliding_window": 16},
    "nemotron": {},  # hands its layers no other arguments on
    "olmo3": {"sliding_window": 16},
    "phi3": {"sliding_window": 16},
    # Its windows are only in its masks.
    "qwen2_moe": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0, "num_experts": 4},
}  # fmt: skip


def logits_of(model: Any, layout: str, sequences: list[Tensor]) -> Tensor:
    """The logits of all sequences, one after another."""
    if layout == "alone":
        model.set_attn_implementation("eager")
        return torch.cat([model(tokens[None], use_cache=False).logits[0] for tokens in sequences])
    model.set_attn_implementation(attention.NAME)
    positions = [torch.arange(len(tokens)) for tokens in sequences]
    if layout == "packed":
        with within(Segments(tuple(map(len, sequences)), CPU)):
            out = model(torch.cat(sequences)[None], position_ids=torch.cat(positions)[None], use_cache=False)
        return out.logits[0]
    padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    logits = model(padded, use_cache=False).logits
    return torch.cat([row[: len(tokens)] for row, tokens in zip(logits, sequences, strict=True)])


def gradients(model: Any, logits: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (logits.log_softmax(-1) * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_have_the_logits_and_gradients_of_their_sequences_alone(family: str) -> None:
    model = make(family, **FAMILIES[family])
    sequences = [torch.randint(97, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    alone = logits_of(model, "alone", sequences)
    expected = gradients(model, alone)
    assert len(expected) > 8
    for layout in ("packed", "padded"):
        logits = logits_of(model, layout, sequences)
        found = gradients(model, logits)
        torch.testing.assert_close(logits, alone, rtol=0, atol=1e-5 * alone.abs().max().item())
        assert found.keys() == expected.keys()
        difference = sum(float((found[name] - g).square().sum()) for name, g in expected.items()) ** 0.5
        assert difference <= 1e-5 * sum(float(g.square().sum()) for g in expected.values()) ** 0.5, layout


@pytest.mark.parametrize("lengths", [(1,), (1, 2, 100), (100, 1, 30, 31, 29, 2), (7,) * 12])
def test_every_position_of_a_row_is_restored(lengths: tuple[int, ...]) -> None:
    value = torch.randn(1, 1, sum(lengths), 4)
    query = torch.zeros_like(value)  # equal scores: the mean over the segment so far
    out, _ = attend(torch.nn.Identity(), query, query, value, Pattern(Segments(lengths, CPU)))
    means = [part.cumsum(0) / torch.arange(1, len(part) + 1)[:, None] for part in value[0, 0].split(lengths)]
    torch.testing.assert_close(out[0, :, 0], torch.cat(means))


def dense(query, key, value, sink_H, *, lengths, scale, window=None, chunk=None, softcap=None):  # type: ignore[no-untyped-def]
    """The definition: all scores of a packed row, masked."""
    ends = torch.tensor(lengths).cumsum(0)
    position = torch.arange(query.shape[2])
    segment = torch.searchsorted(ends, position, right=True)
    within_segment = position - (ends - torch.tensor(lengths))[segment]
    distance = position[:, None] - position
    seen = (distance >= 0) & (segment[:, None] == segment)
    if window is not None:
        seen &= distance < window
    if chunk is not None:
        seen &= within_segment[:, None] // chunk == within_segment // chunk
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen, -torch.inf)
    if sink_H is not None:
        scores = torch.cat([scores, sink_H[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : query.shape[2]] @ value).transpose(1, 2)


RULES: dict[str, dict[str, Any]] = {
    "plain": {}, "window": {"window": 7}, "window of one": {"window": 1}, "chunks": {"chunk": 16},
    "soft cap": {"softcap": 0.7}, "sinks": {"sinks": True}, "sinks in windows": {"window": 7, "sinks": True},
    "all": {"window": 7, "softcap": 0.7, "sinks": True, "chunk": 16},
}  # fmt: skip


@pytest.mark.parametrize("sizes", [(8, 8), (8, 6), (6, 8)], ids=["equal", "small values", "large values"])
@pytest.mark.parametrize("rule", RULES)
def test_attention_is_exact_in_float64(rule: str, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "BLOCK_SCORES", 16 * 4 * 20)  # several blocks to a sequence
    generator = torch.Generator().manual_seed(0)
    changes = dict(RULES[rule])
    total = sum(LENGTHS)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator, requires_grad=True)

    query, key, value = random(1, 4, total, sizes[0]), random(1, 2, total, sizes[0]), random(1, 2, total, sizes[1])
    sink_H = random(4) if changes.pop("sinks", False) else None
    inputs = [t for t in (query, key, value, sink_H) if t is not None]
    expected = dense(query, key, value, sink_H, lengths=LENGTHS, scale=1.7, **changes)
    weight = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    softcap = changes.pop("softcap", None)

    def attend_to(q: Tensor, k: Tensor, v: Tensor, segments: Segments | None) -> Tensor:
        pattern = Pattern(segments, **changes)
        return attend(torch.nn.Identity(), q, k, v, pattern, scaling=1.7, softcap=softcap, s_aux=sink_H)[0]

    packed = attend_to(query, key, value, Segments(LENGTHS, CPU))
    # [1, heads, T, D] -> [B, heads, L, D]
    rows = [
        torch.nn.utils.rnn.pad_sequence(t[0].transpose(0, 1).split(LENGTHS), batch_first=True).transpose(1, 2)
        for t in (query, key, value)
    ]
    padded = attend_to(*rows, None)
    padded = torch.cat([row[:n] for row, n in zip(padded, LENGTHS, strict=True)])[None]
    gradient = torch.autograd.grad(expected, inputs, weight)
    for found in (packed, padded):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(torch.autograd.grad(found, inputs, weight), gradient, rtol=0, atol=1e-10)
