"""Lengths beyond which a decoder computes in another way, wherever its configuration has them."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from dora.model_config import rope_limit
from dora.trainer.thresholds import thresholds

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16,
    "original_max_position_embeddings": 24,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 40}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
SMALL = {"num_hidden_layers": 4, "max_position_embeddings": 96}


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama", {}, {}),
        ("mistral", {"sliding_window": 16}, {"sliding_window": 16}),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": False}, {}),
        ("recurrent_gemma", {"attention_window_size": 16}, {"attention_window_size": 16}),
        ("gpt_neo", {"attention_types": [[["global", "local"], 2]]}, {"window_size": 256}),
        ("mamba2", {"chunk_size": 32}, {"chunk_size": 32}),
        ("minimax", {"block_size": 32}, {"block_size": 32}),
        ("llama4_text", {"attention_chunk_size": 16}, {"attention_chunk_size": 16, "floor_scale": 8192}),
        ("llama", {"rope_parameters": DYNAMIC}, {"rope_parameters.original_max_position_embeddings": 96}),
        ("llama", {"rope_parameters": YARN}, {"rope_parameters.original_max_position_embeddings": 40}),
        (
            "gemma3_text",
            {"sliding_window": 16, "rope_parameters": {"sliding_attention": DEFAULT, "full_attention": DYNAMIC}},
            {"sliding_window": 16, "rope_parameters.full_attention.original_max_position_embeddings": 96},
        ),
    ],
)
def test_each_length_is_named_by_its_place(family: str, changes: dict[str, Any], expected: dict[str, int]) -> None:
    assert thresholds(AutoConfig.for_model(family, **{**SMALL, **changes})) == expected


def test_the_lengths_of_the_text_model_are_those_of_a_model_that_also_sees() -> None:
    config = AutoConfig.for_model("gemma3", text_config={**SMALL, "sliding_window": 16})
    assert thresholds(config) == {"sliding_window": 16}


def test_longrope_is_found_in_the_one_embedding_and_in_that_of_a_kind_of_layer() -> None:
    nested = {"rope_parameters": {"sliding_attention": DEFAULT, "full_attention": LONG}}
    assert rope_limit(AutoConfig.for_model("llama", head_dim=32, rope_parameters=LONG)) == 24
    assert rope_limit(AutoConfig.for_model("gemma3_text", head_dim=32, **nested)) == 24
    assert rope_limit(AutoConfig.for_model("llama", rope_parameters=YARN)) is None
