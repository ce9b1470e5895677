"""Activation checkpointing: fewer bytes kept, the same gradients, the same parameters; in every kind of layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_forward_check import DELTA, MAMBA, make
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from dora.trainer import logprobs as logprobs_module
from dora.trainer.checkpointing import MODES, Mode, apply_checkpointing
from dora.trainer.forward_check import check_training
from dora.trainer.live_bytes import LiveBytes, activation_bytes
from dora.trainer.logprobs import logprobs
from dora.trainer.meshes import make_mesh
from dora.trainer.model import Policy, decoder_layers
from dora.trainer.packing import Row, make_row

CPU = torch.device("cpu")
FAMILIES = {
    "qwen3": {"head_dim": 8},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4},
    "qwen3_5_text": DELTA,
    "granitemoehybrid": {
        **MAMBA, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 4, "shared_intermediate_size": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
}  # fmt: skip


def one_sequence(model: Any, *, tokens: int) -> Row:
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, tokens)
    return make_row(ids, lengths=np.array([tokens]), trained=np.arange(1, tokens), device=CPU)


def kept_and_gradient(family: str, mode: Mode) -> tuple[int, dict[str, torch.Tensor]]:
    model = make(family, **FAMILIES[family])
    apply_checkpointing(decoder_layers(model), mode)
    row = one_sequence(model, tokens=80)

    def total() -> torch.Tensor:
        return logprobs(model, row, temperature=1.0)[0].sum()

    total().backward()
    return activation_bytes(total), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_fewer_bytes_are_kept_for_the_same_gradient(family: str) -> None:
    (none, expected), (selective, same), (full, gradient) = (kept_and_gradient(family, mode) for mode in MODES)
    assert same.keys() == gradient.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(same[name], expected[name], rtol=0, atol=0)
        torch.testing.assert_close(gradient[name], expected[name], rtol=0, atol=0)
    assert full < selective < 0.8 * none
    assert full < 0.2 * none


class Flex(nn.Module):
    """A layer with FlexAttention, a higher-order operator, whose gradients only GPUs compute."""

    def forward(self, x_1HTD: torch.Tensor) -> torch.Tensor:
        return flex_attention(x_1HTD, x_1HTD, x_1HTD)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("mode", MODES[1:])
def test_a_layer_may_have_higher_order_operators(mode: Mode) -> None:
    layer, x_1HTD = Flex(), torch.linspace(0, 1, 2 * 40 * 16).view(1, 2, 40, 16)
    expected = layer(x_1HTD)
    apply_checkpointing([layer], mode)
    torch.testing.assert_close(layer(x_1HTD), expected, rtol=0, atol=0)


def test_full_keeps_the_input_of_each_layer_and_little_else() -> None:
    rows = {}
    for layers in (2, 6):
        model = make("qwen3", head_dim=8, num_hidden_layers=layers)
        apply_checkpointing(decoder_layers(model), "full")
        row = one_sequence(model, tokens=100)
        rows[layers] = activation_bytes(lambda model=model, row=row: logprobs(model, row, temperature=1.0))
    assert rows[6] - rows[2] == 4 * 100 * 32 * 4  # layers x tokens x hidden size x float32


def test_three_times_as_long_an_answer_takes_less_than_without_it_and_with_plain_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 12 layers and 32,000 or 150,000 words: bench/memory.py."""
    monkeypatch.setattr(logprobs_module, "TILE", (256, 256))
    model = make("qwen3", head_dim=8, hidden_size=64, intermediate_size=192, vocab_size=2_000)
    with LiveBytes() as plain:
        logits = model(input_ids=torch.arange(128)[None], use_cache=False).logits
        logits.log_softmax(-1)[0, :, 0].sum().backward()
        room = plain.peak(without=[p.grad for p in model.parameters()])
    model.zero_grad()
    apply_checkpointing(decoder_layers(model), "full")
    row = one_sequence(model, tokens=3 * 128)
    logprobs(model, row, temperature=1.0)  # what the model does after its head is measured once
    with LiveBytes() as live:
        logprobs(model, row, temperature=1.0)[0].sum().backward()
        assert live.peak(without=[p.grad for p in model.parameters()]) < room


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sharded_policies_have_the_same_names_and_gradients_and_pass_the_check(dtype: str, model_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        gradients, kept = {}, {}
        for mode in MODES:
            policy = Policy(
                model_path, mesh=make_mesh("cpu"), dtype=getattr(torch, dtype), activation_checkpointing=mode
            )
            check_training(policy, dtype=dtype)
            row = one_sequence(policy.model, tokens=80)

            def total(policy: Policy = policy, row: Row = row) -> torch.Tensor:
                return logprobs(policy.model, row, temperature=1.0)[0].sum()

            total().backward()
            gradients[mode], kept[mode] = policy.gradients(), activation_bytes(total)
        torch.testing.assert_close(gradients["selective"], gradients["none"], rtol=0, atol=0)
        torch.testing.assert_close(gradients["full"], gradients["none"], rtol=0, atol=0)
        assert kept["full"] < kept["selective"] < kept["none"]
    finally:
        dist.destroy_process_group()


def test_the_switch_of_transformers_has_no_effect_in_evaluation_mode() -> None:
    """Why `apply_checkpointing` does not use it; if this fails, it may."""
    model = make("qwen3", head_dim=8)
    row = one_sequence(model, tokens=80)

    def kept(model: nn.Module) -> int:
        return activation_bytes(lambda: logprobs(model, row, temperature=1.0))

    before = kept(model)
    model.gradient_checkpointing_enable()
    assert kept(model) == before
