"""A model folder is checked against the job before anything starts."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from huggingface_hub.constants import HF_HUB_CACHE

from dora.app.inputs import model_digest, open_inputs, weights_digest
from dora.config.load import load
from dora.errors import ConfigError
from dora.seed.policy import model_folder


@pytest.fixture
def altered(tmp_path: Path):
    """The seed policy with changed entries in its config.json."""

    def alter(**changes: object) -> Path:
        shutil.copytree(model_folder("seed"), tmp_path, dirs_exist_ok=True)
        config = tmp_path / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_bytes()), **changes}))
        return tmp_path

    return alter


def open_with(model: Path) -> None:
    open_inputs(load(None, [f"model.path={model}"], environ={}))


def test_a_request_longer_than_the_context_is_refused(altered) -> None:
    with pytest.raises(ConfigError, match=r"^rollout\.max_new_tokens: .* but the model has 16 positions; lower one"):
        open_with(altered(max_position_embeddings=16))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            "Qwen/Qwen2.5-0.5B",
            f"model.path: Qwen/Qwen2.5-0.5B is not in the cache of the hub ({HF_HUB_CACHE})",
        ),
        (
            "models/my-model",
            "model.path: models/my-model has no config.json; give a Hugging Face model folder, or an id on the hub, "
            "such as Qwen/Qwen3-0.6B",
        ),
        (
            "there/my model",
            "model.path: there/my model has no config.json; give a Hugging Face model folder, or an id on the hub, "
            "such as Qwen/Qwen3-0.6B",
        ),
        ("there", "model.path: there has no config.json; give a Hugging Face model folder"),
        pytest.param(
            "x" * 300,  # longer than a name may be
            f"model.path: {'x' * 300} has no config.json; give a Hugging Face model folder, or an id on the hub, "
            "such as Qwen/Qwen3-0.6B",
            id="long",
        ),
    ],
)
def test_a_model_that_is_not_here_is_refused_with_what_to_give_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, says: str
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        open_inputs(load(None, [f"model.path={given}"], environ={}))
    assert str(refused.value) == says


#: Configurations with 16 positions, named and nested as families do; those of the vision part are no limit.
SHORT = {
    "named-otherwise": {"model_type": "gpt2", "n_positions": 16, "vocab_size": 66},
    "nested": {
        "model_type": "gemma3", "vision_config": {},
        "text_config": {"model_type": "gemma3_text", "max_position_embeddings": 16, "vocab_size": 66},
    },
    "nested-twice": {
        "model_type": "qwen2_5_omni",
        "thinker_config": {"text_config": {"max_position_embeddings": 16, "vocab_size": 66}},
    },
}  # fmt: skip
NESTED_ROPE = {"rope_parameters": {
    "full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}}  # fmt: skip
GEMMA = {"vocab_size": 66, "max_position_embeddings": 4096, "original_max_position_embeddings": 16, **NESTED_ROPE}
#: Rotary embeddings that are dynamic beyond 16 positions, of which all layers or one kind of layer has one.
DYNAMIC = {
    "by-layer": {"model_type": "gemma3_text", **GEMMA},
    "by-layer-nested": {"model_type": "gemma3", "vision_config": {}, "text_config": {**GEMMA}},
    "old-name-nested": {
        "model_type": "llava", "vision_config": {"model_type": "clip_vision_model"},
        "text_config": {
            "model_type": "llama", "max_position_embeddings": 4096, "original_max_position_embeddings": 16,
            "vocab_size": 66, "rope_scaling": {"type": "dynamic", "factor": 4.0},
        },
    },
}  # fmt: skip


@pytest.fixture
def configured(altered):
    """The seed policy with another config.json."""

    def configure(config: object) -> Path:
        folder = altered()
        (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        return folder

    return configure


@pytest.mark.parametrize("kind", SHORT)
def test_positions_are_read_as_transformers_reads_them(configured, kind) -> None:
    with pytest.raises(ConfigError, match=r"^rollout\.max_new_tokens: .* but the model has 16 positions; lower one"):
        open_with(configured(SHORT[kind]))


@pytest.mark.parametrize("kind", DYNAMIC)
def test_a_dynamic_rope_is_found_wherever_it_stands(configured, kind) -> None:
    with pytest.raises(ConfigError, match=r"beyond 16, the dynamic rotary embedding of .* depends on earlier"):
        open_with(configured(DYNAMIC[kind]))


def test_the_vocabulary_is_read_as_transformers_reads_it(configured) -> None:
    small = {"model_type": "gemma3", "vision_config": {}, "text_config": {**GEMMA, "vocab_size": 7}}
    with pytest.raises(ConfigError, match=r"^model\.path: the tokenizer of .* has 66 tokens, the model only 7; use"):
        open_with(configured(small))


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_a_request_beyond_the_context_of_a_dynamic_rope_is_refused(altered, key) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}
    with pytest.raises(ConfigError, match=r"beyond 16, the dynamic rotary embedding of .* depends on earlier"):
        open_with(altered(**{"rope_parameters": None, key: rope}))


@pytest.mark.parametrize(("kind", "original"), [("dynamic", 100_000), ("longrope", 16)])
def test_one_within_it_is_not_and_the_trainer_handles_longrope(altered, kind, original) -> None:
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16} if kind == "longrope" else {"factor": 2.0}
    rope = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": original, **factors}
    open_with(altered(rope_parameters=rope))


def test_a_reference_that_is_no_model_folder_is_refused(tmp_path: Path) -> None:
    changes = ["objective.kl_coefficient=0.1", f"objective.kl_reference={tmp_path}"]
    for name in ("config.json", "*.safetensors"):
        with pytest.raises(ConfigError, match=rf"^objective\.kl_reference: .* has no {re.escape(name)}; give"):
            open_inputs(load(None, changes, environ={}))
        (tmp_path / "config.json").touch()


def test_a_reference_of_another_vocabulary_or_architecture_is_refused_before_anything_starts(altered) -> None:
    changes = ["objective.kl_coefficient=0.1", f"objective.kl_reference={altered(vocab_size=7, model_type='gpt2')}"]
    says = r"^objective\.kl_reference: the shape of .* differs from model\.path \(model_type gpt2 .*, vocab_size 7 inst"
    with pytest.raises(ConfigError, match=says):
        open_inputs(load(None, changes, environ={}))


def test_the_files_of_the_reference_are_part_of_what_training_starts_from(altered) -> None:
    model = model_folder("seed")

    def digest(*changes: str) -> str:
        return weights_digest(open_inputs(load(None, ["objective.kl_coefficient=0.1", *changes], environ={})))

    assert digest() == model_digest(model)
    reference = f"objective.kl_reference={altered()}"
    assert digest(reference) != digest()
    before = digest(reference)
    altered(rope_theta=1.0)
    assert digest(reference) != before
