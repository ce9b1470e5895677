"""Shared by whole runs: a policy whose answers take long enough to be interrupted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dora.seed.policy import path as seed_path


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seed's tokenizer over a larger, random policy: its stop token is one of so many that answers reach the token
    budget, and a hundred tokens take a good part of a second."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("models") / "slow"
    shutil.copytree(seed_path(), folder)
    config = AutoConfig.from_pretrained(
        folder, vocab_size=2048, hidden_size=192, intermediate_size=768, num_hidden_layers=8
    )
    config.layer_types = ["full_attention"] * 8
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
