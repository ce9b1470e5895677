"""Making the seed policy: the same recipe gives the same bytes; the demonstrations are what the recipe says."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from dora.seed.make import Recipe, demonstration, make

TINY = Recipe(worked_steps=3, mixed_steps=2, batch_tokens=128, hidden_size=16, num_layers=1)


@pytest.fixture(autouse=True)
def _quiet_threads():
    """`make` sets the thread count of this process; put it back for the tests that follow."""
    import torch

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
