"""A model folder is checked against the job before anything starts."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_a_request_beyond_the_context_of_a_dynamic_rope_is_refused(altered, key) -> None:
    rope = {"rope_type": "dynamic", "original_max_position_embeddings": 16}
    with pytest.raises(ConfigError, match=r"beyond 16, the dynamic rotary embedding of .* depends on earlier"):
        open_with(altered(**{"rope_parameters": None, key: rope}))


@pytest.mark.parametrize(("kind", "original"), [("dynamic", 100_000), ("longrope", 16)])
def test_one_within_it_is_not_and_the_trainer_handles_longrope(altered, kind, original) -> None:
    open_with(altered(rope_parameters={"rope_type": kind, "original_max_position_embeddings": original}))


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
        return weights_digest(load(None, ["objective.kl_coefficient=0.1", *changes], environ={}), model)

    assert digest() == model_digest(model)
    reference = f"objective.kl_reference={altered()}"
    assert digest(reference) != digest()
    before = digest(reference)
    altered(rope_theta=1.0)
    assert digest(reference) != before
