"""Which models are padded: exactly those whose tokens affect each other by means other than attention."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dora.trainer import attention
from dora.trainer.layouts import carries_state, layout_of
from dora.trainer.model import build_on_meta
from tests.families import FAMILIES, SHAPE, make_config, make_model
from tests.leaks import mixes_tokens

#: Families of transformers that docs/MODELS.md does not have.
OTHERS: Final[dict[str, dict[str, Any]]] = {
    "xlstm": {"embedding_dim": 32, "num_blocks": 2, "num_heads": 4, "chunk_size": 16},
    "zaya": {"moe_intermediate_size": 16, "num_experts": 4},
    "biogpt": {},
    "bitnet": {},
    "cohere2_moe": {"num_experts": 4, "num_experts_per_tok": 2},
    "diffllama": {},
    "hy_v3": {},
    "jais2": {},
    "laguna": {},
    "mellum": {},
    "persimmon": {},
    "vaultgemma": {"head_dim": 8},
}
#: This one has an attention of its own and is refused.
REFUSED: Final = "falcon"


def config_of(family: str) -> Any:
    if family in FAMILIES:
        return make_config(family)
    config = AutoConfig.for_model(family, **{**SHAPE, **OTHERS[family]})
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    return config


@pytest.mark.parametrize("family", [*(family for family in FAMILIES if family != REFUSED), *OTHERS])
def test_a_family_carries_state_if_its_tokens_reach_each_other_without_attention(family: str) -> None:
    config = config_of(family)
    torch.manual_seed(0)
    model = make_model(family) if family in FAMILIES else AutoModelForCausalLM.from_config(config).eval()
    model.set_attn_implementation(attention.NAME)
    assert carries_state(model) == mixes_tokens(model)
    assert layout_of(build_on_meta(config, torch.float32)) == layout_of(model)


def test_a_convolution_is_a_sign_where_transformers_does_not_mark_the_family(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("recurrent_gemma")
    for kind in type(model).__mro__:
        if "_is_stateful" in vars(kind):  # not in transformers 5.12
            monkeypatch.setattr(kind, "_is_stateful", False)
    assert carries_state(model)
