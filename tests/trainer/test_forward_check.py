"""Before anything is trained: models whose packed forward pass differs from that of each sequence alone are refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from dora.errors import ConfigError
from dora.trainer import attention, forward_check, layouts
from dora.trainer.check_rows import LENGTHS, sequences_for
from dora.trainer.forward_check import CheckedLayout, check_forward, check_training
from dora.trainer.logprobs import logprobs
from dora.trainer.meshes import make_mesh
from dora.trainer.model import Policy
from dora.trainer.packing import Layout, Row
from dora.trainer.score import score
from tests.families import LATENT, make_config, make_model

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
#: Families with layers that carry state.
STATEFUL = (
    "bamba", "falcon_h1", "granitemoehybrid", "lfm2", "mamba", "mamba2", "minimax", "qwen3_5_text", "recurrent_gemma",
)  # fmt: skip
DYNAMIC_ROPE = {
    "max_position_embeddings": 16, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
}  # fmt: skip
BY_KIND = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "dynamic",
        "factor": 4.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 96,
    },
}
LONG_ROPE = {
    "pad_token_id": 0, "original_max_position_embeddings": 16,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, "short_factor": [1.0] * 4,
        "long_factor": [1.0, 2.0, 4.0, 8.0],
    },
}  # fmt: skip


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


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def policy(alone: None, model_path: Path) -> Policy:
    return Policy(model_path, mesh=make_mesh("cpu"), dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", EXACT)
def test_a_family_that_attends_within_sequences_is_packed(family: str, dtype: torch.dtype) -> None:
    found = check_forward(make(family, dtype, **EXACT[family]), device=CPU, dtype=name_of(dtype))
    assert found == CheckedLayout(Layout(share_above=1.15))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", ["large", "as transformers draws them"])
@pytest.mark.parametrize("family", STATEFUL)
def test_a_family_with_layers_that_carry_state_is_padded_whatever_can_be_measured(
    family: str, weights: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    drawn = weights != "large"
    model = AutoModelForCausalLM.from_config(make_config(family)) if drawn else make_model(family)
    model = model.to(dtype).eval()
    model.set_attn_implementation(attention.NAME)
    if family == "minimax":  # in bfloat16 transformers' own layers mix types
        model, dtype = model.float(), torch.float32
    found = check_forward(model, device=CPU, dtype=name_of(dtype))
    assert found.layout == Layout(padded=True)
    assert "has layers that would carry state from one packed sequence into the next" in found.note


def test_longrope_is_exact_since_long_and_short_sequences_share_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("phi3", **LONG_ROPE)
    assert check_forward(model, device=CPU, dtype="float32") == CheckedLayout(Layout(rope_limit=16, share_above=1.15))
    monkeypatch.setattr(layouts, "rope_limit", lambda config: 50)
    with pytest.raises(ConfigError, match="Phi3ForCausalLM cannot be trained: log-probs of packed sequences differ"):
        check_forward(model, device=CPU, dtype="float32")


def test_queries_that_are_scaled_by_their_position_in_the_row_are_not_packed() -> None:
    model = make_model("llama4_text", floor_scale=8)
    model.set_attn_implementation(attention.NAME)
    found = check_forward(model, device=CPU, dtype="float32")
    assert found.layout == Layout(padded=True)
    assert "scales queries by their position in the row, so it is trained in padded rows" in found.note


def test_a_configuration_with_which_transformers_itself_cannot_compute_is_refused_in_one_line() -> None:
    model = make("youtu", **{**LATENT, "num_key_value_heads": 2})
    with pytest.raises(ConfigError, match=r"YoutuForCausalLM cannot be trained: .*The size of tensor a \(4\)"):
        check_forward(model, device=CPU, dtype="float32")


def test_a_forward_pass_that_raises_is_refused_in_one_line() -> None:
    model = make("llama")
    model.model.layers[0].register_forward_pre_hook(lambda *_: {}["mask"])
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM cannot be trained: its forward pass raises KeyError"):
        check_forward(model, device=CPU, dtype="float32")


def test_a_rope_that_depends_on_the_whole_row_is_refused() -> None:
    model = make("llama", **DYNAMIC_ROPE)
    with pytest.raises(ConfigError, match="LlamaForCausalLM cannot be trained: log-probs of packed sequences differ"):
        check_forward(model, device=CPU, dtype="float32")


def test_scores_of_a_hybrid_are_those_of_each_sequence_alone(tmp_path: Path) -> None:
    make_model("qwen3_5_text").save_pretrained(tmp_path)
    sequences = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11]]
    together = score(tmp_path, sequences, prompt_lengths=[1, 1, 2], temperature=0.7)
    for sequence, length, logprobs_P in zip(sequences, [1, 1, 2], together, strict=True):
        [alone_P] = score(tmp_path, [sequence], prompt_lengths=[length], temperature=0.7)
        np.testing.assert_allclose(logprobs_P, alone_P, atol=1e-5)


def test_the_check_of_a_trainer_leaves_no_gradient_and_the_same_weights(policy: Policy) -> None:
    before = {name: shard.clone() for name, shard in policy.shards().items()}
    check_training(policy, dtype="float32")
    assert policy.gradients() == {}
    assert all(torch.equal(shard, before[name]) for name, shard in policy.shards().items())
    assert policy.model.config._attn_implementation == attention.NAME


# -- sequences beyond each threshold ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "longest", "beyond"),
    [
        ("llama", {}, 1000, ()),
        ("mistral", {"sliding_window": 16}, 1000, ()),  # the short ones are beyond it
        ("mistral", {"sliding_window": 80}, 1000, (88,)),
        ("mistral", {"sliding_window": 80}, 85, (85,)),
        ("mistral", {"sliding_window": 80}, 80, ()),
        ("llama4_text", {"attention_chunk_size": 64, "floor_scale": 100}, 1000, (72, 108)),
        ("gemma3_text", {"sliding_window": 70, "rope_parameters": BY_KIND}, 1000, (78, 104)),
    ],
)
def test_there_is_a_sequence_beyond_each_threshold_up_to_the_longest(
    family: str, changes: dict[str, Any], longest: int, beyond: tuple[int, ...]
) -> None:
    sequences = sequences_for(make_config(family, **changes), longest=longest)
    assert sequences.lengths == (*LENGTHS, *beyond)


def test_a_rope_of_one_kind_of_layers_that_depends_on_the_row_is_refused_if_a_sequence_can_be_so_long() -> None:
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16}
    model = make("gemma3_text", head_dim=8, max_position_embeddings=96, rope_parameters=BY_KIND, **kinds)
    check_forward(model, device=CPU, dtype="float32", longest=96)
    with pytest.raises(ConfigError, match="cannot be trained: log-probs of packed sequences differ by"):
        check_forward(model, device=CPU, dtype="float32", longest=120)


def test_only_sequences_whose_scores_fit_are_compared_under_the_attention_of_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make("mistral", sliding_window=80)
    compared: dict[str, list[int]] = {"eager": [], attention.NAME: []}

    def note(_: Any, given: tuple[torch.Tensor, ...]) -> None:
        compared[model.config._attn_implementation].append(given[0].shape[1])

    model.get_input_embeddings().register_forward_pre_hook(note)
    monkeypatch.setattr(forward_check, "SCORES", 4 * 64**2)
    check_forward(model, device=CPU, dtype="float32", longest=100)
    assert compared["eager"] == list(LENGTHS)
    assert 88 in compared[attention.NAME]


# -- planted faults ---------------------------------------------------------------------------------------------------


def shifted_segments(row: Row) -> Row:
    if len(row.lengths) == 1:
        return row
    first, second, *rest = row.lengths
    return replace(row, lengths=(first + 1, second - 1, *rest))


def positions_of_the_row(row: Row) -> Row:
    return replace(row, positions_BT=torch.arange(row.tokens_BT.shape[1])[None])


@pytest.mark.parametrize("fault", [shifted_segments, positions_of_the_row])
def test_a_row_that_is_laid_out_wrongly_is_found(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama", **EXACT["llama"])
    if fault is positions_of_the_row:  # rotary angles are relative: only absolute positions would show
        model = make("gpt2", n_embd=32, n_layer=2, n_head=4, max_position_embeddings=256)
    monkeypatch.setattr(forward_check, "logprobs", lambda model, row, **kw: logprobs(model, fault(row), **kw))
    with pytest.raises(ConfigError, match="log-probs of packed sequences differ by"):
        check_forward(model, device=CPU, dtype="float32")


def lfm2() -> Any:
    model = make_model("lfm2")
    model.set_attn_implementation(attention.NAME)
    return model


def one_line_to_the_next(_: Any, __: Any, out: torch.Tensor) -> torch.Tensor:
    return out + 0.1 * out.roll(1, dims=0)


def test_padded_lines_that_leak_are_found() -> None:
    model = lfm2()
    model.model.layers[1].register_forward_hook(one_line_to_the_next)
    with pytest.raises(ConfigError, match="Lfm2ForCausalLM cannot be trained: log-probs of padded"):
        check_forward(model, device=CPU, dtype="float32")


def test_a_layer_that_leaks_is_found() -> None:
    model = make("llama")
    model.model.layers[1].register_forward_hook(lambda _, __, out: out + 0.1 * out.roll(1, dims=1))
    with pytest.raises(ConfigError, match="log-probs of packed sequences differ by"):
        check_forward(model, device=CPU, dtype="float32")


def mixes_neighbours(model: Any) -> Any:
    """Give a model a layer that adds what stands before a token, unless it is the first of its sequence."""

    def add(_: Any, __: Any, given: dict[str, Any], out: torch.Tensor) -> torch.Tensor:
        return out + 0.1 * out.roll(1, dims=1) * (given["position_ids"] > 0)[..., None]

    model.model.layers[1].register_forward_hook(add, with_kwargs=True)
    return model


def test_a_model_that_cannot_share_prompts_is_packed_without_and_says_so() -> None:
    model = mixes_neighbours(make("llama"))
    found = check_forward(model, device=CPU, dtype="float32", shared_prompts="auto")
    assert found.layout == Layout()
    assert (
        "LlamaForCausalLM computes each prompt once per answer: with shared prompts, log-probs of packed sequences"
        in found.note
    )
    assert check_forward(model, device=CPU, dtype="float32", shared_prompts="off") == CheckedLayout(Layout())
    with pytest.raises(
        ConfigError,
        match=r"trainer\.shared_prompts: LlamaForCausalLM cannot share prompts: with shared prompts, log-probs",
    ):
        check_forward(model, device=CPU, dtype="float32", shared_prompts="on")


def test_padded_rows_share_no_prompts() -> None:
    model = lfm2()
    assert check_forward(model, device=CPU, dtype="float32", shared_prompts="auto").layout == Layout(padded=True)
    with pytest.raises(
        ConfigError, match=r"trainer\.shared_prompts: Lfm2ForCausalLM cannot share prompts: its rows are"
    ):
        check_forward(model, device=CPU, dtype="float32", shared_prompts="on")


def test_a_gradient_that_leaks_between_answers_to_a_prompt_is_found(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leaking(model: Any, row: Row, *, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, entropy = logprobs(model, row, temperature=temperature)
        leak = (chosen - chosen.detach()).roll(1) if max(row.prompts) >= 0 else 0.0  # the values are the same
        return chosen + 0.1 * leak, entropy

    monkeypatch.setattr(forward_check, "logprobs", leaking)
    found = check_training(policy, dtype="float32", shared_prompts="auto")
    assert found.layout == Layout()
    assert "computes each prompt once per answer: the gradient would differ by" in found.note
    with pytest.raises(ConfigError, match=r"trainer\.shared_prompts: Qwen3ForCausalLM cannot share prompts"):
        check_training(policy, dtype="float32", shared_prompts="on")


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
        check_forward(model, device=CPU, dtype="float32")


def test_a_gradient_that_leaks_is_found(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    def leaking(model: Any, row: Row, *, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, entropy = logprobs(model, row, temperature=temperature)
        leak = (chosen - chosen.detach()).roll(1) if len(row.lengths) > 1 else 0.0  # the values are the same
        return chosen + 0.1 * leak, entropy

    monkeypatch.setattr(forward_check, "logprobs", leaking)
    with pytest.raises(ConfigError, match="the gradient of packed sequences differs by"):
        check_training(policy, dtype="float32")
