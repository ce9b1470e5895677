"""Attention over packed and padded rows: transformers' own attention of each sequence alone, and its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_forward_check import make
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig
from transformers.masking_utils import causal_mask_function

from dora.errors import ConfigError
from dora.trainer import attention, attention_gpu, attention_kernels
from dora.trainer.attention import Pattern, Segments, attend, pattern_of, require_interface, within
from dora.trainer.attention_kernels import AttentionCall
from dora.trainer.attention_kernels import _calls as calls_of
from tests.trainer.attention_definition import dense, visible

CPU = torch.device("cpu")
LENGTHS = (5, 40, 17, 61, 1, 9)
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
    "qwen2_moe": {
        "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0, "num_experts": 4,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    },
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


#: Prompts of 20, 1 and 16 tokens with responses, and a sequence by itself.
SHARED = ((20, 33, 4, 17, 9, 1, 6, 2, 16, 40), (-1, 0, 0, 0, -1, -1, 5, 5, -1, 8))


@pytest.mark.parametrize("rule", RULES)
def test_attention_of_responses_that_share_prompts_is_exact_in_float64(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_kernels, "BLOCK_SCORES", 16 * 4 * 20)
    changes, (lengths, prompts) = dict(RULES[rule]), SHARED
    shapes = [(1, 4, sum(lengths), 8), (1, 2, sum(lengths), 8), (1, 2, sum(lengths), 6)]
    shapes += [(4,)] if changes.pop("sinks", False) else []
    inputs = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    query, key, value, sink_H = (*inputs, None)[:4]
    expected = dense(query, key, value, sink_H, lengths=lengths, prompts=prompts, scale=1.7, **changes)
    softcap, pattern = changes.pop("softcap", None), Pattern(Segments(lengths, CPU, prompts), **changes)
    found, _ = attend(torch.nn.Identity(), query, key, value, pattern, scaling=1.7, softcap=softcap, s_aux=sink_H)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    weight = torch.randn(expected.shape, dtype=torch.float64)
    gradients_of = [torch.autograd.grad(out, inputs, weight) for out in (found, expected)]
    torch.testing.assert_close(*gradients_of, rtol=0, atol=1e-10)


def test_a_prompt_is_seen_by_all_its_responses_in_a_single_call() -> None:
    own = [AttentionCall(slice(start, stop), slice(start, stop)) for start, stop in ((0, 4), (4, 9), (9, 10), (10, 12))]
    over_prompt = AttentionCall(slice(4, 12), slice(0, 4), offset=4)
    assert calls_of((4, 5, 1, 2), (-1, 0, 0, 0), window=None) == [*own, over_prompt]
    in_window = [AttentionCall(slice(4, 6), slice(2, 4), offset=2), AttentionCall(slice(9, 10), slice(2, 4), offset=2)]
    assert calls_of((4, 5, 1, 2), (-1, 0, 0, -1), window=3) == [*own, *in_window]
    assert calls_of((4, 5, 1, 2), (-1, 0, 0, 0), window=1) == own


# -- memory -----------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor made meanwhile."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


LONG = 4096


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "llama4_text", "mistral"])
def test_neither_masks_nor_scores_of_a_long_row_are_ever_whole(family: str) -> None:
    lengths = (96, LONG - 96)
    changes = {"num_hidden_layers": 2, "max_position_embeddings": LONG, "num_attention_heads": 2, "vocab_size": 8}
    model = make(family, **{**FAMILIES[family], **changes, "num_key_value_heads": 1})
    with Largest() as largest, within(Segments(lengths, CPU)):
        positions = torch.cat([torch.arange(n) for n in lengths])
        model(
            torch.zeros(1, LONG, dtype=torch.long), position_ids=positions[None], use_cache=False
        ).logits.sum().backward()
    assert largest.elements < LONG * LONG / 8


def kept_for_backward(key_heads: int, **changes: Any) -> int:
    """Bytes that attention of 8 heads keeps, of the tensors that it is given and of its own."""
    query, key, value = (torch.randn(1, heads, 300, 16, requires_grad=True) for heads in (8, key_heads, key_heads))
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out, _ = attend(torch.nn.Identity(), query, key, value, Pattern(Segments((40, 90, 170), CPU)), **changes)
    assert out.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("changes", [{}, {"softcap": 2.0}, {"s_aux": torch.zeros(8)}], ids=["plain", "cap", "sinks"])
def test_keys_are_not_repeated_to_all_heads_and_scores_are_not_kept(changes: dict[str, Any]) -> None:
    row = 300 * 16 * 4  # one head, float32
    # query and output of 8 heads, keys and values of theirs, and one number per query and head, padding included
    for key_heads in (1, 2, 8):
        given = (8 + 8 + 2 * key_heads) * row
        assert given < kept_for_backward(key_heads, **changes) < given + 8 * 300 * 4 * 1.7


# -- layers that are run again -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["nemotron", "gemma2"])
def test_layers_run_again_for_the_backward_pass_keep_their_segments(family: str) -> None:
    model = make(family, **FAMILIES[family])
    sequences = [torch.randint(97, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    expected = gradients(model, logits_of(model, "packed", sequences))
    runs = []
    for layer in model.model.layers:
        plain = layer.forward

        def again(*args: Any, plain: Any = plain, **kwargs: Any) -> Any:
            runs.append(plain)
            return plain(*args, **kwargs)

        layer.forward = lambda *args, again=again, **kwargs: checkpoint(again, *args, use_reentrant=False, **kwargs)
    found = gradients(model, logits_of(model, "packed", sequences))
    assert len(runs) == 2 * len(model.model.layers)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# -- refused ----------------------------------------------------------------------------------------------------------


def one_row() -> list[Tensor]:
    return [torch.randn(1, 2, 6, 4) for _ in range(3)]


@pytest.mark.parametrize(
    ("mask", "changes", "message"),
    [
        (torch.zeros(1, 1, 6, 6), {}, "Identity attends with a mask of its own"),
        (None, {}, "Identity attends with a mask of its own"),
        (Pattern(None), {"is_causal": False}, "Identity is not causal"),
        (Pattern(None), {"position_bias": torch.zeros(1, 2, 6, 6)}, "Identity attends with position_bias"),
        (Pattern(None), {"block_indices": torch.zeros(6)}, "Identity attends with block_indices"),
    ],
)
def test_attention_that_would_be_computed_otherwise_is_refused(mask: Any, changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"model.path: {message}"):
        attend(torch.nn.Identity(), *one_row(), mask, **changes)


def test_a_module_that_is_not_causal_is_refused() -> None:
    module = torch.nn.Identity()
    module.is_causal = False
    with pytest.raises(ConfigError, match="Identity is not causal"):
        attend(module, *one_row(), Pattern(None))


def test_a_model_that_is_not_causal_is_refused() -> None:
    model = make("llama")
    model.config.is_causal = False
    with pytest.raises(ConfigError, match="bidirectional_mask_function of transformers is not supported"):
        model(torch.zeros(1, 8, dtype=torch.long), use_cache=False)


def test_a_model_that_computes_with_its_mask_is_refused() -> None:
    with pytest.raises(ConfigError, match="a layer of this model computes with its attention mask"):
        make("doge")(torch.zeros(1, 8, dtype=torch.long), use_cache=False)


@pytest.mark.parametrize("family", ["bloom", "falcon", "mpt"])
def test_a_family_with_attention_of_its_own_is_refused(family: str) -> None:
    with pytest.raises(ConfigError, match="ForCausalLM has an attention of its own"):
        require_interface(AutoConfig.for_model(family))
    require_interface(AutoConfig.for_model("llama"))


def test_a_packed_row_without_segments_is_an_error() -> None:
    with pytest.raises(ValueError, match="the row has no segments"):
        make("llama")(torch.zeros(1, 8, dtype=torch.long), position_ids=torch.arange(8)[None] % 5, use_cache=False)


def test_padding_before_a_token_is_an_error() -> None:
    model = make("llama")
    tokens = torch.zeros(2, 4, dtype=torch.long)
    model(tokens, attention_mask=torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]), use_cache=False)
    with pytest.raises(ValueError, match="padding before a token"):
        model(tokens, attention_mask=torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]), use_cache=False)


def test_a_row_has_no_segments_once_its_forward_pass_is_over() -> None:
    segments = Segments((3, 4), CPU)

    def causal() -> Pattern:
        return pattern_of(mask_function=causal_mask_function)

    with within(segments):
        assert causal().segments is segments
    assert causal().segments is None


# -- kernels for GPUs, as far as a CPU shows ---------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 100, 300])
@pytest.mark.parametrize(
    ("lengths", "prompts"),
    [
        ((700,), (-1,)),
        ((5, 300, 1, 260, 134), (-1, -1, -1, -1, -1)),
        ((5, 300, 1, 260, 134), (-1, 0, 0, -1, 3)),
        ((256, 200, 1, 100, 143), (-1, 0, 0, 0, -1)),
    ],
    ids=["one sequence", "several", "short prompts", "long prompt"],
)
def test_a_block_mask_is_that_of_the_definition(
    lengths: tuple[int, ...], prompts: tuple[int, ...], window: int | None
) -> None:
    row = Segments(lengths, CPU, prompts)
    ends, prompts_N = (row.ends, row.prompts_N) if len(lengths) > 1 else (None, None)
    mask = attention_gpu.block_mask(ends, prompts_N, length=700, window=window, device=CPU)
    seen_TT, distance_TT, _ = visible(lengths, prompts)
    seen_TT &= distance_TT < (window or 700)

    def seen(_b: Tensor, _h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return seen_TT[q, kv]

    expected = create_block_mask(seen, None, None, 700, 700, device="cpu")
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        torch.testing.assert_close(getattr(mask, name), getattr(expected, name), msg=name)
    torch.testing.assert_close(mask.to_dense(), expected.to_dense())
    position_T = torch.arange(700)
    assert torch.equal(torch.as_tensor(mask.mask_mod(0, 0, position_T[:, None], position_T)), seen_TT)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("row", [(LENGTHS, ()), SHARED], ids=["alone", "shared"])
@pytest.mark.parametrize("changes", [{}, {"softcap": 0.7}, {"sinks": True}, {"window": 7, "softcap": 0.7}])
def test_flex_attention_is_given_the_same_attention(changes: dict[str, Any], row: Any) -> None:
    (lengths, prompts), changes = row, dict(changes)
    query, key, value = (torch.randn(1, h, sum(lengths), d, dtype=torch.float64) for h, d in ((4, 8), (2, 8), (2, 6)))
    sink_H = torch.randn(4, dtype=torch.float64) if changes.pop("sinks", False) else None
    expected = dense(query, key, value, sink_H, lengths=lengths, prompts=prompts, scale=1.7, **changes)
    window = changes.pop("window", None)
    mask = Pattern(None, window=window).block_mask(Segments(lengths, CPU, prompts), length=sum(lengths), device=CPU)
    rule = attention_kernels.Rule(scale=1.7, window=window, **changes)
    found = attention_gpu.attend_flex(query, key, value, sink_H, rule, mask=mask)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("window", [None, 7])
def test_flash_attention_takes_other_head_sizes_and_reads_no_value_on_the_host(window: int | None) -> None:
    # A tensor on the device "meta" has no values: to read one is an error.
    query, key, value = (
        torch.empty(2, h, 40, d, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for h, d in ((4, 12), (2, 12), (2, 6))
    )
    rule, ends = attention_kernels.Rule(scale=1.7, window=window), torch.empty(3, dtype=torch.int32, device="meta")
    out = attention_gpu.attend_flash(query, key, value, rule, ends=ends, longest=40)
    assert out.shape == (2, 40, 4, 6)
    out.sum().backward()
    assert [t.grad.shape for t in (query, key, value)] == [t.shape for t in (query, key, value)]


def test_a_cpu_has_neither_flash_nor_flex_attention() -> None:
    assert attention_gpu.kernels_present("cpu") == {"flash": False, "flex": False, "sdpa": True}
    assert attention_gpu.describe("cpu").startswith("attention: torch's SDPA on the CPU")
    assert attention_gpu.choose(one_row()[0], attention_kernels.Rule(scale=1.0), None, shares=False) is None


@pytest.mark.gpu
@pytest.mark.deep
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("row", [(LENGTHS, ()), SHARED], ids=["alone", "shared"])
@pytest.mark.parametrize("rule", RULES)
def test_kernels_for_gpus_compute_what_the_cpu_computes(rule: str, row: Any, dtype: torch.dtype) -> None:
    changes, (lengths, prompts) = dict(RULES[rule]), row
    inputs = [torch.randn(1, h, sum(lengths), 64, dtype=dtype) for h in (4, 2, 2)]
    inputs += [torch.randn(4, dtype=dtype)] if changes.pop("sinks", False) else []
    softcap = changes.pop("softcap", None)

    def run(device: str, wide: torch.dtype) -> list[Tensor]:
        moved = [tensor.to(device, wide).requires_grad_() for tensor in inputs]
        q, k, v, *sinks = moved
        pattern = Pattern(Segments(lengths, torch.device(device), prompts), **changes)
        out, _ = attend(torch.nn.Identity(), q, k, v, pattern, softcap=softcap, s_aux=sinks[0] if sinks else None)
        weight = torch.linspace(-1, 1, out.numel(), device=device, dtype=wide).view_as(out)
        return [t.detach().cpu().double() for t in (out, *torch.autograd.grad(out, moved, weight))]

    error = 1e-5 if dtype == torch.float32 else 2e-2
    for found, expected in zip(run("cuda", dtype), run("cpu", torch.float64), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=error * expected.abs().max().item())
