"""Families of language models as tiny random configurations: plain data for tests and for the table of families.

`FAMILIES` maps a model type of transformers to what its config gets besides `SHAPE`. A hybrid has a layer of each kind.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SHAPE: Final[dict[str, Any]] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
HEAD: Final = {"head_dim": 8}
MOE: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED: Final = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LOCAL: Final = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT: Final = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
DELTA: Final = {
    "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
MAMBA: Final = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
WINDOW: Final = {"sliding_window": 16}
LONGROPE: Final = {
    "max_position_embeddings": 128, "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32,
        "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0], "partial_rotary_factor": 1.0,
    },
}  # fmt: skip

FAMILIES: Final[dict[str, dict[str, Any]]] = {
    # Dense, full attention
    "llama": {},
    "qwen2": {},
    "qwen3": HEAD,
    "mistral": WINDOW,
    "ministral3": HEAD,
    "gemma": HEAD,
    "granite": {},
    "smollm3": {},
    "olmo": {},
    "olmo2": {},
    "glm": HEAD,
    "glm4": HEAD,
    "phi": {},
    "phi3": LONGROPE,
    "starcoder2": {},
    "stablelm": {},
    "cohere": {},
    "helium": HEAD,
    "seed_oss": HEAD,
    "ernie4_5": HEAD,
    "hunyuan_v1_dense": HEAD,
    "exaone4": WINDOW,
    "apertus": {},
    "arcee": {},
    "nemotron": {},
    "gpt_neox": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 48},
    # Dense, windows, soft caps, norms of their own
    "gemma2": {**HEAD, **WINDOW},
    "gemma3_text": {**HEAD, **WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma3n_text": {
        **HEAD, **WINDOW, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "laurel_rank": 8,
        "altup_num_inputs": 2, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_text": {
        **HEAD, **WINDOW, "global_head_dim": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97,
        "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "cohere2": WINDOW,
    "olmo3": WINDOW,
    # Experts
    "mixtral": LOCAL,
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**HEAD, **MOE},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {**HEAD, **LOCAL, **WINDOW},
    "deepseek_v2": {**ROUTED, **LATENT, "topk_method": "greedy"},
    "deepseek_v3": {**ROUTED, **LATENT},
    "glm4_moe": {**HEAD, **ROUTED},
    "glm4_moe_lite": {**ROUTED, **LATENT},
    "minimax_m2": {**HEAD, **LOCAL, "rotary_dim": 4},
    "phimoe": LOCAL,
    "granitemoe": LOCAL,
    "granitemoeshared": {**LOCAL, "shared_intermediate_size": 16},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1},
    "dots1": {**HEAD, **ROUTED},
    "hunyuan_v1_moe": {**HEAD, "num_experts": 4, "moe_topk": 2},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "afmoe": {**HEAD, **MOE, **WINDOW, "num_dense_layers": 1, "num_shared_experts": 1},
    "exaone_moe": {**HEAD, **MOE, **WINDOW, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "llama4_text": {**HEAD, **LOCAL, "intermediate_size_mlp": 48, "attention_chunk_size": 16},
    # Linear attention, state space, convolution
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **MOE, "shared_expert_intermediate_size": 16},
    "qwen3_next": {**DELTA, **MOE, "shared_expert_intermediate_size": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {**MOE, "layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "expand": 2},
    "falcon_mamba": {"state_size": 8},
    "falcon_h1": {**MAMBA, **HEAD, "mamba_d_ssm": 64, "mamba_n_groups": 2},
    "granitemoehybrid": {
        **MAMBA, **LOCAL, "layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 16,
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3], "mamba_n_groups": 2},
    "nemotron_h": {
        **HEAD, "layers_block_type": ["mamba", "attention", "mlp", "moe"], "mamba_num_heads": 8, "mamba_head_dim": 8,
        "ssm_state_size": 8, "n_groups": 2, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
    },
    "jamba": {
        "mamba_d_state": 8, "mamba_dt_rank": 4, "num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2,
        "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    },
    "minimax": {**HEAD, **LOCAL, "layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 16},
    "recurrent_gemma": {
        **HEAD, "lru_width": 32, "attention_window_size": 16, "block_types": ["recurrent", "attention"],
    },
    "zamba2": {
        "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 2, "chunk_size": 16,
        "layers_block_type": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3], "use_mem_rope": True,
        "num_mem_blocks": 1, "adapter_rank": 4,
    },
    "kimi_linear": {
        **LATENT, "q_lora_rank": None, "linear_head_dim": 8, "linear_num_heads": 4, "num_experts": 4,
        "num_experts_per_token": 2, "moe_intermediate_size": 16, "num_shared_experts": 1,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "olmo_hybrid": {**DELTA, **HEAD},
}  # fmt: skip


def make_config(family: str, **changes: Any) -> Any:
    """The tiny config of a family, without special tokens, since the vocabulary has no room for them."""
    config = AutoConfig.for_model(family, **{**SHAPE, **FAMILIES.get(family, {}), **changes})
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    return config


def make_model(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """A random model with weights large enough for differences to show, under transformers' own attention."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(make_config(family, **changes), dtype=dtype, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model.eval()
