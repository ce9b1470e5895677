"""The trainer's part of `dora check`, on a tiny model: a forecast beside a measurement, and what to change."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from peft import LoraConfig, get_peft_model

from dora.app import trainer_check
from dora.app.trainer_check import check_trainer
from dora.config.load import load
from dora.trainer.forecast import FITS
from dora.trainer.score import score
from tests.families import make_model

MIB = 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model("qwen3").save_pretrained(folder)
    return folder


def lines_of(model: Path, *changes: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    config = load(None, ["trainer.micro_batch_tokens=1000", *changes], environ=environ or {})
    with ExitStack() as stack:
        found = dict(check_trainer(config, model, stack).lines)
    assert not dist.is_initialized()
    return found


def figures(text: str, pattern: str) -> list[float]:
    found = re.search(pattern, text)
    assert found, text
    return [float(figure) for figure in found.groups()]


@pytest.mark.parametrize("mode", ["none", "full"])
def test_the_forecast_is_shown_beside_what_was_measured(model: Path, mode: str) -> None:
    found = lines_of(model, f"trainer.activation_checkpointing={mode}")
    assert found["forward"] == "log-probs and gradients of packed sequences equal those of each alone"
    says = r"^1000 tokens, sequences of 416: forecast ([\d.]+) MB, measured ([\d.]+) MB kept"
    forecast, measured = figures(found["trial"], says)
    assert forecast == pytest.approx(measured, rel=0.15)
    assert f"activation checkpointing {mode}" in found["memory"]
    (fitting,) = figures(found[""].replace(",", ""), r"^answers of up to (\d+) tokens would fit in this memory$")
    assert fitting > 10_000


def test_the_loaded_model_gives_the_log_probs_of_the_model_folder(model: Path) -> None:
    config = load(None, ["rollout.temperature=0.7"], environ={})
    sequences, prompts = [[1, 2, 3, 4], [5, 6, 7]], [2, 1]
    with ExitStack() as stack:
        ours = check_trainer(config, model, stack).score(sequences, prompt_lengths=prompts)
    for mine, theirs in zip(ours, score(model, sequences, prompt_lengths=prompts, temperature=0.7), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


def test_the_log_probs_compared_with_servers_are_those_of_the_model_without_the_adapter(
    model: Path, tmp_path: Path
) -> None:
    """Servers have the model until version 0 is pushed."""
    peft = LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(make_model("qwen3"), peft).save_pretrained(tmp_path, save_embedding_layers=False)
    changes = [f"model.adapter={tmp_path}", "trainer.lora.rank=4", "trainer.lora.targets=['q_proj']"]
    config = load(None, changes, environ={})
    sequences, prompts = [[1, 2, 3, 4], [5, 6, 7]], [2, 1]
    with ExitStack() as stack:
        ours = check_trainer(config, model, stack).score(sequences, prompt_lengths=prompts)
    for mine, theirs in zip(ours, score(model, sequences, prompt_lengths=prompts, temperature=1.0), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


def test_what_does_not_fit_is_told_with_what_to_change(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {mode: need_of(model, mode) for mode in ("none", "full")}

    def told(memory: float, *changes: str) -> str:
        monkeypatch.setattr(trainer_check, "_memory", lambda _: int(memory))
        return lines_of(model, *changes)[""]

    none = "trainer.activation_checkpointing=none"
    says = r"^DOES NOT FIT in .*: set trainer.micro_batch_tokens to at most (\d+)$"
    assert 416 < figures(told(0.7 * needs["none"], none), says)[0] < 1000
    assert told(0.3 * needs["none"], none).endswith(
        ": set trainer.activation_checkpointing to full and trainer.micro_batch_tokens to 416"
    )
    assert "answers of up to" in told(1.5 * needs["full"] / FITS)  # by itself
    assert told(1.0).endswith(": the model is too large for this device")


def need_of(model: Path, mode: str) -> float:
    found = lines_of(model, f"trainer.activation_checkpointing={mode}")
    return figures(found["memory"], r"^one rank: ([\d.]+) MB of")[0] * MIB


def test_ranks_on_nodes_are_forecast_only(model: Path) -> None:
    found = lines_of(model, "nodes.expected=3")
    assert found["trial"] == "not tried: the ranks run on nodes"
    assert "forward" not in found
    assert found["memory"].startswith("one rank: ")
