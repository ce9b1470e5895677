"""Making the seed policy: the same recipe gives the same bytes; the demonstrations are what the recipe says."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dora.seed.make import RECIPES, Recipe, build_model, build_tokenizer, demonstration, make

POLICIES = Path(__file__).parents[1] / "e2e" / "policies"
TINY = Recipe(worked_steps=3, mixed_steps=2, batch_tokens=128, hidden_size=16, num_layers=1)


@pytest.fixture(autouse=True)
def _quiet_threads():
    """`make` sets the thread count of this process; put it back for the tests that follow."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_the_same_recipe_gives_the_same_bytes(tmp_path):
    make(tmp_path / "one", recipe=TINY)
    make(tmp_path / "two", recipe=TINY)
    make(tmp_path / "other", recipe=replace(TINY, seed=8))
    files = sorted(file.name for file in (tmp_path / "one").iterdir())
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    weights = (tmp_path / "one" / "model.safetensors").read_bytes()
    assert weights != (tmp_path / "other" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("family", RECIPES)
def test_a_policy_of_every_family_is_made_and_padding_reaches_no_token(tmp_path, family):
    make(tmp_path, recipe=replace(TINY, family=family, num_layers=2))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.model_type == family
    tokens, padded = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[5, 6, 7, 8, 0, 0, 0]])
    torch.testing.assert_close(model(padded).logits[:, :4], model(tokens).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["qwen3_moe", "lfm2"])
def test_the_policies_of_the_tests_are_those_that_the_recipe_makes(family):
    """Their shape; the weights take a minute each."""
    shipped = AutoConfig.from_pretrained(POLICIES / family)
    made = build_model(build_tokenizer(), recipe=RECIPES[family]).config
    names = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size", "layer_types", "num_experts")
    assert {n: getattr(made, n, None) for n in names} == {n: getattr(shipped, n, None) for n in names}
    assert (POLICIES / family / "model.safetensors").stat().st_size < 1_000_000


def test_a_worked_demonstration_without_a_slip_is_right():
    shown = demonstration("a3b4c2=", "09", worked_share=1.0, recipe=Recipe(), rng=random.Random(0))
    assert shown == "a03b07c09"


def test_the_mixed_part_shows_the_styles_in_the_shares_of_the_recipe():
    recipe, rng = Recipe(worked_share=0.3, right_share=0.1, slip=0.5), random.Random(0)
    shown = [demonstration("a3b4c2=", "09", worked_share=0.3, recipe=recipe, rng=rng) for _ in range(5_000)]
    worked = [text for text in shown if text.startswith("a")]
    blurted = [int(text) for text in shown if not text.startswith("a")]
    assert len(worked) / len(shown) == pytest.approx(0.3, abs=0.03)
    assert blurted.count(9) / len(blurted) == pytest.approx(0.1, abs=0.02)
    assert set(blurted) == set(range(5, 14))
    assert any(text != "a03b07c09" for text in worked)
