"""Log-probs computed in tiles inside the head: equal to the plain form, for every way in which logits are finished."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from test_forward_check import MAMBA, make
from torch import Tensor, nn

from dora.errors import ConfigError
from dora.trainer import logprobs as logprobs_module
from dora.trainer.live_bytes import LiveBytes
from dora.trainer.logprobs import Finish, TiledLogProbs, logprobs
from dora.trainer.packing import Row, make_row

CPU = torch.device("cpu")
#: Families whose models finish the logits of the head in another way, with settings that make it matter.
FINISHED = {
    "qwen3": ({"head_dim": 8}, Finish(1.0, math.inf)),
    "phi": ({}, Finish(1.0, math.inf)),  # its head has a bias
    "granite": ({"logits_scaling": 0.5}, Finish(2.0, math.inf)),
    "cohere": ({"logit_scale": 3.0}, Finish(3.0, math.inf)),
    "gemma3_text": ({"head_dim": 8, "final_logit_softcapping": 1.5}, Finish(1.0, 1.5)),
    "falcon_h1": (
        {**MAMBA, "mamba_d_ssm": 64, "mamba_n_groups": 1, "lm_head_multiplier": 0.25},
        Finish(0.25, math.inf),
    ),
}


def make_tokens(model: Any, *, count: int) -> tuple[Row, Tensor]:
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, count)
    row = make_row(tokens, lengths=np.array([count]), trained=np.arange(2, count), device=CPU)
    return row, torch.linspace(-1, 1, count - 2, dtype=torch.float64)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("tile", [(100, 100), (3, 97), (2, 5), (1, 1)])
@pytest.mark.parametrize("family", FINISHED)
def test_tiles_equal_the_plain_form(family: str, tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    changes, finish = FINISHED[family]
    model = make(family, torch.float64, **changes)
    row, weight_P = make_tokens(model, count=9)
    logits = model(input_ids=row.tokens_BT, use_cache=False).logits[0, 1:-1] / 0.7
    plain = logits.log_softmax(-1).gather(1, row.targets_P[:, None])[:, 0]
    (plain * weight_P).sum().backward()
    expected = gradients(model)
    monkeypatch.setattr(logprobs_module, "TILE", tile)
    chosen, entropy = logprobs(model, row, temperature=0.7)
    (chosen * weight_P).sum().backward()
    found = logprobs_module._FINISHES[model]
    assert (found.scale, found.cap) == pytest.approx((finish.scale, finish.cap), rel=1e-14)
    torch.testing.assert_close(chosen, plain, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=logits).entropy(), rtol=0, atol=1e-12)
    assert not entropy.requires_grad
    torch.testing.assert_close(gradients(model), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("tile", [(100, 100), (3, 97), (2, 5)])
@pytest.mark.parametrize("family", FINISHED)
def test_entropies_have_the_gradient_of_the_plain_form_if_asked(
    family: str, tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(family, torch.float64, **FINISHED[family][0])
    row, weight_P = make_tokens(model, count=9)
    logits = model(input_ids=row.tokens_BT, use_cache=False).logits[0, 1:-1] / 0.7
    plain = logits.log_softmax(-1).gather(1, row.targets_P[:, None])[:, 0]
    plain_entropy = torch.distributions.Categorical(logits=logits).entropy()
    (plain * weight_P + plain_entropy * weight_P.flip(0).square()).sum().backward()
    expected = gradients(model)
    monkeypatch.setattr(logprobs_module, "TILE", tile)
    chosen, entropy = logprobs(model, row, temperature=0.7, entropy_gradient=True)
    (chosen * weight_P + entropy * weight_P.flip(0).square()).sum().backward()
    torch.testing.assert_close(gradients(model), expected, rtol=0, atol=1e-10)


def test_the_entropy_alone_has_a_gradient_and_a_loss_without_it_has_that_of_the_log_probs() -> None:
    model = make("qwen3", torch.float64, head_dim=8)
    row, weight_P = make_tokens(model, count=9)
    found = []
    for asked in (False, True):
        chosen, _ = logprobs(model, row, temperature=0.7, entropy_gradient=asked)
        (chosen * weight_P).sum().backward()
        found.append(gradients(model))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-14)
    logprobs(model, row, temperature=0.7, entropy_gradient=True)[1].sum().backward()
    assert any(bool(gradient.abs().max() > 1e-6) for gradient in gradients(model).values())


def test_the_model_is_plain_again_after_a_call() -> None:
    model = make("qwen3", head_dim=8)
    row, _ = make_tokens(model, count=9)
    logprobs(model, row, temperature=1.0)
    assert model(input_ids=row.tokens_BT).logits.shape == (1, 9, 97)
    assert not model._forward_hooks


def test_a_head_whose_words_are_treated_differently_is_refused() -> None:
    model = make("qwen3", head_dim=8)
    row, _ = make_tokens(model, count=9)

    def hide_images(_: nn.Module, __: Any, output: Any) -> Any:
        output.logits[..., 90:] = -1e9
        return output

    model.register_forward_hook(hide_images)
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM changes the logits of its head by more than a scale"):
        logprobs(model, row, temperature=1.0)


def test_a_head_that_is_not_linear_is_refused() -> None:
    model = make("qwen3", head_dim=8)
    row, _ = make_tokens(model, count=9)
    model.lm_head = nn.Sequential(nn.Linear(32, 97))
    with pytest.raises(ConfigError, match="the output head of Qwen3ForCausalLM is Sequential, not Linear"):
        logprobs(model, row, temperature=1.0)


@pytest.mark.parametrize("fp32_head", [False, True])
def test_a_float32_head_does_not_round_logits(fp32_head: bool) -> None:
    model = make("qwen3", torch.bfloat16, head_dim=8)
    row, _ = make_tokens(model, count=60)
    seen: list[Tensor] = []
    model.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    chosen, _ = logprobs(model, row, temperature=1.0, fp32_head=fp32_head)
    exact = (seen[-1][0, 1:-1].double() @ model.lm_head.weight.double().T).log_softmax(-1)
    error = (chosen - exact.gather(1, row.targets_P[:, None])[:, 0]).abs().max()
    assert error < 1e-5 if fp32_head else error > 1e-3


# -- a large vocabulary -----------------------------------------------------------------------------------------------


def peak_bytes(tokens: int, *, words: int, hidden: int, entropy_gradient: bool) -> int:
    """Peak of forward and backward, less the gradients of hidden states and weight."""
    hidden_PH = torch.randn(tokens, hidden, requires_grad=True)
    weight_VH = torch.randn(words, hidden, requires_grad=True)
    targets_P = torch.randint(words, (tokens,))
    with LiveBytes() as live:
        settings = (Finish(0.5, 30.0), 0.7, False, entropy_gradient)
        chosen, entropy = TiledLogProbs.apply(hidden_PH, weight_VH, None, targets_P, *settings)
        (chosen.sum() + entropy.sum()).backward()
        return live.peak(without=[hidden_PH.grad, weight_VH.grad])


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_the_peak_does_not_depend_on_the_number_of_tokens(
    entropy_gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs_module, "TILE", (512, 512))
    short, long = (
        peak_bytes(tokens, words=9_500, hidden=16, entropy_gradient=entropy_gradient) for tokens in (512, 2_048)
    )
    assert long <= 1.05 * short
    assert long < 2_048 * 9_500 * 4 / 10  # of the logits


def test_a_large_vocabulary_with_scale_and_cap_equals_the_plain_form_in_float32() -> None:
    """The whole size, 2,048 tokens, is in bench/memory.py."""
    torch.manual_seed(0)
    hidden_PH, weight_VH = (torch.randn(n, 32, requires_grad=True) for n in (48, 150_000))
    targets_P = torch.randint(150_000, (48,))
    capped = 30 * torch.tanh(1.5 * (hidden_PH @ weight_VH.T) / 30) / 0.7
    plain = capped.log_softmax(-1).gather(1, targets_P[:, None])[:, 0]
    expected = torch.autograd.grad(plain.sum(), (hidden_PH, weight_VH))
    arguments = (hidden_PH, weight_VH, None, targets_P, Finish(1.5, 30.0), 0.7, False)
    chosen, _ = TiledLogProbs.apply(*arguments)
    torch.testing.assert_close(chosen, plain, rtol=0, atol=1e-5)
    for found, wanted in zip(torch.autograd.grad(chosen.sum(), (hidden_PH, weight_VH)), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
