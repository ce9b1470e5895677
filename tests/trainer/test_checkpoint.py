"""Checkpoints are whole or refused with a clear line; one process stands for all ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from dora.errors import ConfigError
from dora.trainer import checkpoint
from dora.trainer.metrics import StepSums

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _single_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(3, 2, generator=generator), "exp_avg/w": torch.randn(3, 2, generator=generator)}


def test_what_is_loaded_is_what_was_saved(tmp_path):
    folder = checkpoint.save(tmp_path, step=7, tensors=state(1), device=CPU)
    loaded = state(2)
    assert checkpoint.load(folder, tensors=loaded) == 7
    torch.testing.assert_close(loaded, state(1), atol=0, rtol=0)


def test_the_two_newest_complete_checkpoints_are_kept_and_the_newest_is_found(tmp_path):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step=step, tensors=state(step), device=CPU)
    (tmp_path / "step-000009").mkdir()  # cut off before its manifest
    (tmp_path / ".step-000010").mkdir()  # cut off before the rename
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000003"
    assert not (tmp_path / "step-000001").exists()


def test_a_checkpoint_of_a_history_that_was_given_up_is_replaced(tmp_path):
    checkpoint.save(tmp_path, step=4, tensors=state(1), device=CPU)
    folder = checkpoint.save(tmp_path, step=4, tensors=state(2), device=CPU)
    loaded = state(3)
    checkpoint.load(folder, tensors=loaded)
    torch.testing.assert_close(loaded, state(2), atol=0, rtol=0)


def truncate(folder):
    os.truncate(folder / "rank-0.safetensors", 40)


def flip_a_byte(folder):
    path = folder / "rank-0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def other_world(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"world_size": 4}))


def lose_the_manifest(folder):
    (folder / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "is damaged"),
        (flip_a_byte, "is not what was saved"),
        (other_world, r"written by 4 ranks; set trainer\.ranks"),
        (lose_the_manifest, "is no complete checkpoint"),
    ],
)
def test_a_damaged_checkpoint_is_refused_with_the_reason(tmp_path, damage, reason):
    folder = checkpoint.save(tmp_path, step=1, tensors=state(1), device=CPU)
    damage(folder)
    with pytest.raises(ConfigError, match=reason):
        checkpoint.load(folder, tensors=state(1))


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    folder = checkpoint.save(tmp_path, step=1, tensors=state(1), device=CPU)
    for other in ({**state(1), "b": torch.zeros(1)}, {**state(1), "w": torch.zeros(4, 2)}):
        with pytest.raises(ConfigError, match="belongs to another model"):
            checkpoint.load(folder, tensors=other)


def test_golden_metrics():
    """losses.md §11, the three tokens of §4, ratio k."""
    sums = StepSums(max_staleness=1, device=CPU)
    three = torch.ones(3)
    sums.add_tokens(
        current=torch.tensor([-0.7, -2.2, -0.9]),
        behavior=torch.tensor([-1.0, -2.0, -0.5]),
        advantage=torch.tensor([1.0, 2.0, 3.0]),
        entropy=three,
        loss=torch.tensor([1.0, torch.nan, 1.0]),
        lag=torch.tensor([1, 1, 1]),
        tis_cap=1.2,
    )
    sums.add_sequences(lag=torch.tensor([1, 0]), reward=torch.tensor([1.0, 0.0]), truncated=torch.tensor([1, 0]))
    metrics = sums.reduce().metrics()
    expected = {
        "mismatch_k3": 0.0463, "log_ratio_mean": -0.1, "log_ratio_abs_max": 0.4, "ess": 0.9132, "chi2": -0.0194,
        "ppl_ratio": 1.1052, "tis_capped_frac": 1 / 3, "entropy": 1.0, "adv_mean": 2.0, "adv_std": (2 / 3) ** 0.5,
        "tokens": 3, "sequences": 1, "reward_mean": 1.0, "response_len_mean": 3, "truncated_frac": 1,
    }  # fmt: skip
    got = {name.removeprefix("lag=1/"): value for name, value in metrics.items() if name.startswith("lag=1/")}
    assert got == pytest.approx(expected, abs=5e-5)
    assert metrics["all/sequences"] == 2
    assert metrics["all/reward_mean"] == 0.5
    assert metrics["nonfinite_count"] == 1
    assert not any(name.startswith("lag=0/") for name in metrics), "a lag without tokens is absent, not 0"


def test_a_rank_without_its_environment_says_what_is_missing():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DORA_")}
    ended = subprocess.run(
        [sys.executable, "-m", "dora.trainer.main"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    assert ended.stderr.strip().startswith("dora trainer: DORA_CONTROLLER is not set")
    assert "Traceback" not in ended.stderr
