"""Before anything is trained: models whose packed forward pass is not that of the sequences alone are refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from dora.errors import ConfigError
from dora.trainer import attention, forward_check
from dora.trainer.forward_check import require_exact_forward, require_exact_training
from dora.trainer.logprobs import logprobs
from dora.trainer.model import Policy, make_mesh
from dora.trainer.packing import Row
from dora.trainer.score import score

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
DELTA = {
    "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
EXACT = {
    "qwen3": {"head_dim": 8},
    "llama": {},
    "mistral": {"sliding_window": 16},
    "gemma3_text": {"head_dim": 8, "sliding_window": 16},
    "olmo3": {"sliding_window": 16},
    "granite": {},
    "gemma2": {"head_dim": 8, "sliding_window": 16},
    "nemotron": {},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
REFUSED = {
    "qwen3_5_text": (DELTA, r"Qwen3_5ForCausalLM \(with Qwen3_5GatedDeltaNet layers\) cannot be trained: log-probs of"),
    "lfm2": ({"layer_types": ["conv", "full_attention"] * 2}, r"Lfm2ShortConv layers\) cannot be trained"),
    "mamba2": (
        {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "expand": 2},
        r"Mamba2Mixer layers\) cannot be trained",
    ),
    "recurrent_gemma": (
        {"head_dim": 8, "lru_width": 32, "attention_window_size": 16, "block_types": ["recurrent", "attention"]},
        r"RecurrentGemmaRecurrentBlock layers\) cannot be trained",
    ),
    "granitemoehybrid": (
        {**MAMBA, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 4, "shared_intermediate_size": 16},
        r"GraniteMoeHybridMambaLayer layers\) cannot be trained",
    ),
    "llama": (
        {"max_position_embeddings": 16, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}},
        "LlamaForCausalLM cannot be trained: log-probs of packed sequences differ by",
    ),
}


def make(family: str, dtype: torch.dtype = torch.float32, **changes: object) -> Any:
    """A random model with weights large enough for differences to show."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SHAPE, **changes})
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def policy(alone: None, model_path: Path) -> Policy:
    return Policy(model_path, mesh=make_mesh("cpu"), dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", EXACT)
def test_a_family_that_attends_within_sequences_passes(family: str, dtype: torch.dtype) -> None:
    require_exact_forward(make(family, dtype, **EXACT[family]), device=CPU, dtype=str(dtype).removeprefix("torch."))


@pytest.mark.parametrize(
    ("family", "dtype"),
    # In bfloat16 this rope differs by no more than rounding does; `app.inputs` refuses it before.
    [(f, d) for f in REFUSED for d in (torch.float32, torch.bfloat16) if (f, d) != ("llama", torch.bfloat16)],
)
def test_a_family_in_which_one_sequence_reaches_the_next_is_refused(family: str, dtype: torch.dtype) -> None:
    changes, message = REFUSED[family]
    with pytest.raises(ConfigError, match=message):
        require_exact_forward(make(family, dtype, **changes), device=CPU, dtype=str(dtype).removeprefix("torch."))


def test_the_scores_of_a_check_and_of_an_audit_are_refused_too(tmp_path: Path) -> None:
    make("qwen3_5_text", **DELTA).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="Qwen3_5GatedDeltaNet layers"):
        score(tmp_path, [[1, 2, 3]], prompt_lengths=[1], temperature=1.0)


def test_the_check_of_a_trainer_leaves_no_gradient_and_the_same_weights(policy: Policy) -> None:
    before = {name: shard.clone() for name, shard in policy.shards().items()}
    require_exact_training(policy, dtype="float32")
    assert policy.gradients() == {}
    assert all(torch.equal(shard, before[name]) for name, shard in policy.shards().items())
    assert policy.model.config._attn_implementation == attention.NAME


# -- planted faults ---------------------------------------------------------------------------------------------------


def shifted_segments(row: Row) -> Row:
    if len(row.lengths) == 1:
        return row
    first, second, *rest = row.lengths
    return replace(row, lengths=(first + 1, second - 1, *rest))


def positions_of_the_row(row: Row) -> Row:
    return replace(row, positions_T=torch.arange(len(row.tokens_T)))


@pytest.mark.parametrize("fault", [shifted_segments, positions_of_the_row])
def test_a_row_that_is_laid_out_wrongly_is_found(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama", **EXACT["llama"])
    if fault is positions_of_the_row:  # rotary angles are relative: only absolute positions would show
        model = make("gpt2", n_embd=32, n_layer=2, n_head=4, max_position_embeddings=256)
    monkeypatch.setattr(forward_check, "logprobs", lambda model, row, **kw: logprobs(model, fault(row), **kw))
    with pytest.raises(ConfigError, match="log-probs of packed sequences differ by"):
        require_exact_forward(model, device=CPU, dtype="float32")


def test_a_layer_that_leaks_is_found() -> None:
    model = make("llama")
    model.model.layers[1].register_forward_hook(lambda _, __, out: out + 0.1 * out.roll(1, dims=1))
    with pytest.raises(ConfigError, match="log-probs of packed sequences differ by"):
        require_exact_forward(model, device=CPU, dtype="float32")


def test_an_attention_that_ignores_a_setting_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    for layer in model.model.layers:
        layer.self_attn.scaling *= 1.5
    plain = forward_check._plain_logprobs

    def unscaled(model: Any, row: Row) -> torch.Tensor:
        for layer in model.model.layers:
            layer.self_attn.scaling /= 1.5
        return plain(model, row)

    monkeypatch.setattr(forward_check, "_plain_logprobs", unscaled)
    with pytest.raises(ConfigError, match=r"log-probs differ by \S+ from transformers' own"):
        require_exact_forward(model, device=CPU, dtype="float32")


def test_a_gradient_that_leaks_is_found(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    def leaking(model: Any, row: Row, *, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, entropy = logprobs(model, row, temperature=temperature)
        leak = (chosen - chosen.detach()).roll(1) if len(row.lengths) > 1 else 0.0  # the values are the same
        return chosen + 0.1 * leak, entropy

    monkeypatch.setattr(forward_check, "logprobs", leaking)
    with pytest.raises(ConfigError, match="the gradient of packed sequences differs by"):
        require_exact_training(policy, dtype="float32")
