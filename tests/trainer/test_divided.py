"""Experts and matrices divided among ranks: which those are, and models that are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from dora.errors import ConfigError
from dora.trainer.experts import expert_parameters, require_experts
from dora.trainer.forecast import Outline
from dora.trainer.model import build_on_meta
from dora.trainer.resharding import Arrangement, Divided
from dora.trainer.tensor import divided_parameters, require_tensor
from tests.families import make_config


def model_of(family: str, **changes: Any) -> Any:
    return build_on_meta(make_config(family, **changes), torch.float32)


@pytest.mark.parametrize(
    ("family", "ranks", "says"),
    [
        ("qwen3", 2, "transformers has no plan to divide experts of Qwen3ForCausalLM among ranks; set it to 1"),
        ("llama4_text", 2, "transformers has no plan to divide experts of Llama4ForCausalLM among ranks"),
        ("mixtral", 3, "4 experts of MixtralForCausalLM cannot be divided among 3 ranks"),
    ],
)
def test_a_model_whose_experts_cannot_be_divided_is_refused(family: str, ranks: int, says: str) -> None:
    with pytest.raises(ConfigError, match=f"trainer.parallel.expert: {says}"):
        require_experts(model_of(family), ranks=ranks)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe"])
def test_the_stacked_parameters_of_all_experts_are_divided_and_no_others(family: str) -> None:
    model = model_of(family)
    require_experts(model, ranks=2)
    inside = {name for name, _ in model.named_parameters() if ".experts." in name}
    assert expert_parameters(model).keys() == inside
    assert inside


@pytest.mark.parametrize(
    ("family", "changes", "ranks", "says"),
    [
        ("qwen3_moe", {}, 2, "Qwen3MoeForCausalLM cannot be divided (moe_tp_experts, packed_colwise"),
        ("mamba", {}, 2, "MambaForCausalLM cannot be divided; set it to 1"),
        (
            "llama",
            {"attention_bias": True},
            2,
            "LlamaForCausalLM cannot be divided (model.layers.0.self_attn.o_proj",
        ),
        ("llama", {"num_key_value_heads": 1}, 2, "the 1 key heads of LlamaForCausalLM cannot be divided among 2 ranks"),
    ],
)
def test_a_model_whose_matrices_cannot_be_divided_is_refused(
    family: str, changes: dict[str, Any], ranks: int, says: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"trainer.parallel.tensor: {says}")):
        require_tensor(model_of(family, **changes), ranks=ranks)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text", "mistral"])
def test_all_matrices_of_the_layers_are_divided(family: str) -> None:
    model = model_of(family, num_attention_heads=4, num_key_value_heads=2)
    require_tensor(model, ranks=2)
    matrices = {name for name, parameter in model.named_parameters() if ".layers." in name and parameter.dim() > 1}
    assert matrices <= divided_parameters(model).keys()


def test_files_in_the_order_of_experts():
    divided = Divided({"stack": 0}, {})
    assert Arrangement(4).files("stack", divided) == [[0, 1, 2, 3]]
    in_groups = Arrangement(4, expert_ranks=2)
    assert in_groups.files("stack", divided) == [[0, 2, 1, 3]]  # ranks 0 and 2 share the first half of the experts
    assert in_groups.files("exp_avg/stack", divided) == [[0, 2, 1, 3]]
    assert in_groups.files("norm", divided) == [[0, 1, 2, 3]]


def test_files_of_columns():
    divided = Divided({}, {"of rows": 0, "of columns": 1})
    in_groups = Arrangement(4, tensor_ranks=2)
    assert in_groups.files("of rows", divided) == [[0, 2, 1, 3]]
    assert in_groups.files("exp_avg/of columns", divided) == [[0, 2], [1, 3]]


def test_divided_experts_are_not_gathered_in_the_forecast(tmp_path: Any) -> None:
    config = make_config("qwen3_moe")
    config.save_pretrained(tmp_path)
    whole, divided = (Outline(tmp_path, dtype=torch.float32, expert_ranks=ranks) for ranks in (1, 2))
    of_experts = sum(parameter.numel() for parameter in expert_parameters(model_of("qwen3_moe")).values())
    sizes = {"tokens": 600, "longest": 200, "ranks": 2}
    assert whole.forecast(**sizes).gathered - divided.forecast(**sizes).gathered == of_experts // 2 * 8
    assert whole.forecast(**sizes).states == divided.forecast(**sizes).states
