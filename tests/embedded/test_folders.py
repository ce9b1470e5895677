"""Model folders with more than a text decoder needs, or with other contents: served, or refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dora.embedded.server import _tokenizer
from dora.errors import ConfigError
from tests.embedded.conftest import decoder_of
from tests.families import make_model

ROPES = {
    "full_attention": {
        "rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip


def test_a_dynamic_rope_of_one_kind_of_layer_limits_the_context(tmp_path: Path) -> None:
    make_model("gemma3_text", rope_parameters=ROPES, sliding_window=64).save_pretrained(tmp_path)
    assert decoder_of(tmp_path).context_tokens == 32


def test_tensors_of_a_part_that_is_not_served_come_with_every_version(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_model("qwen3").save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    vision = {"visual.blocks.0.weight": torch.ones(3)}
    save_file(tensors | vision, folder / "model.safetensors", metadata={"format": "pt"})
    decoder = decoder_of(folder)
    decoder.load(folder)
    save_file(tensors | {"audio.weight": torch.ones(3)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"holds audio\.weight, which the served model does not have"):
        decoder.load(folder)


def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_model("qwen3").save_pretrained(folder)
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    names = load_file(tmp_path / "outside.safetensors").keys()
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../outside.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"^--model-path: .* names '\.\./outside\.safetensors', which is not"):
        decoder_of(folder)


def test_a_tokenizer_that_needs_code_of_the_folder_is_refused_without_advice_to_run_it(tmp_path: Path) -> None:
    config = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "evil"}')
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    with pytest.raises(ConfigError, match="no usable tokenizer") as caught:
        _tokenizer(tmp_path)
    assert "trust" not in str(caught.value)
    assert not (tmp_path / "ran").exists()
