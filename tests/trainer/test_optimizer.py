"""The optimizers of a rank's rows: where moments are held does not change the update, and it resumes exactly."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch
from conftest import SETTINGS
from torch import Tensor
from torch._C._distributed_c10d import HashStore, ProcessGroup, ProcessGroupGloo
from transformers import AutoModelForCausalLM

from dora.trainer.eight_bit import AdamW8bit, block_size
from dora.trainer.optimizer import ShardOptimizer, moment_bytes, roles_of
from tests.families import make_model

KINDS = ["device", "host", "8bit", "muon"]


def alone() -> ProcessGroup:
    group = ProcessGroup(HashStore(), 0, 1)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, ProcessGroupGloo(HashStore(), 0, 1))
    return group


def make_policy(model_path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_path).requires_grad_(False)


def make(model: Any, kind: str, **changes: Any) -> tuple[dict[str, Tensor], ShardOptimizer]:
    """The parameters, and what updates them."""
    held = {"optimizer": "muon"} if kind == "muon" else {"optimizer_state": kind}
    shards = {name: parameter.data for name, parameter in model.named_parameters()}
    settings = msgspec.structs.replace(SETTINGS, **held, **changes)
    return shards, ShardOptimizer(shards, settings, model=model, group=alone())


def gradients_of(shards: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shard.shape, generator=generator) for name, shard in shards.items()}


def trained(model_path, kind: str, steps: int = 4) -> tuple[dict[str, Tensor], ShardOptimizer]:
    shards, optimizer = make(make_policy(model_path), kind)
    for step in range(steps):
        optimizer.update(gradients_of(shards, step), learning_rate=1e-2 / (step + 1))
    return shards, optimizer


def test_updates_on_the_host_equal_those_on_the_device(model_path) -> None:
    torch.testing.assert_close(trained(model_path, "host")[0], trained(model_path, "device")[0], rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_exactly_from_a_checkpoint(kind: str, model_path) -> None:
    shards, optimizer = trained(model_path, kind, steps=3)
    saved = {name: tensor.clone() for name, tensor in (shards | optimizer.state()).items()}
    optimizer.update(gradients_of(shards, 3), learning_rate=1e-3)
    again, restored = make(make_policy(model_path), kind)
    for name, tensor in (again | restored.state()).items():
        tensor.copy_(saved[name])
    restored.update(gradients_of(again, 3), learning_rate=1e-3)
    torch.testing.assert_close(again, shards, rtol=0, atol=0)
    torch.testing.assert_close(restored.state(), optimizer.state(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_only_matrices_are_decayed(kind: str, model_path) -> None:
    model = make_policy(model_path)
    roles = roles_of(model)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    shards, optimizer = make(model, kind, weight_decay=0.5)
    optimizer.update({name: torch.zeros_like(shard) for name, shard in shards.items()}, learning_rate=0.1)
    for name, shard in shards.items():
        left = 1.0 if roles[name] == "undecayed" else 1 - 0.1 * 0.5
        torch.testing.assert_close(shard, left * before[name], rtol=1e-6, atol=0)


# ---- roles ----------------------------------------------------------------------------------------------------------


def test_norms_biases_and_embeddings_have_no_decay_and_muon_takes_what_is_inside(model_path) -> None:
    found = {name.removeprefix("model.").replace("layers.0.", ""): role for name, role in
             roles_of(make_model("gpt_oss", num_hidden_layers=1)).items()}  # fmt: skip
    assert {name for name, role in found.items() if role == "outer"} == {"lm_head.weight"}
    assert {name for name, role in found.items() if role == "hidden"} == {
        *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
        "mlp.router.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj",
    }  # fmt: skip
    tied = roles_of(make_policy(model_path))
    assert tied["model.embed_tokens.weight"] == "undecayed"
    assert "outer" not in tied.values()


def test_norms_of_single_heads_have_two_dimensions_but_are_no_matrices() -> None:
    roles = roles_of(make_model("cohere", num_hidden_layers=1, use_qk_norm=True))
    norms = {name: role for name, role in roles.items() if "norm" in name}
    assert len(norms) == 4
    assert set(norms.values()) == {"undecayed"}


def test_convolutions_and_state_matrices_are_not_for_muon() -> None:
    found = {name.rpartition("mixer.")[2]: role for name, role in roles_of(make_model("mamba")).items()}
    assert (found["conv1d.weight"], found["A_log"], found["in_proj.weight"]) == ("outer", "undecayed", "hidden")


# ---- 8 bits ---------------------------------------------------------------------------------------------------------


def make_8bit(matrix: Tensor, *, beta2: float = 0.95) -> AdamW8bit:
    return AdamW8bit({"w": matrix}, betas=(0.9, beta2), weight_decay={"w": 0.0})


def step_8bit(optimizer: AdamW8bit, matrix: Tensor, gradient: Tensor, *, learning_rate: float) -> float:
    """Update, and return how far a parameter moved at most, in learning rates."""
    before = matrix.clone()
    optimizer.update({"w": gradient}, learning_rate=learning_rate)
    return float((matrix - before).abs().max()) / learning_rate


@pytest.mark.parametrize(("beta2", "tolerance"), [(0.95, 0.02), (0.999, 0.1)])
def test_8_bits_follow_adamw_over_hundreds_of_updates(beta2: float, tolerance: float) -> None:
    """Gradients of four orders of magnitude in a block, some of them zero at times."""
    torch.manual_seed(0)
    scale, start = 10 ** (-4 * torch.rand(16, 512)), torch.randn(16, 512)
    matrix, parameter = start.clone(), torch.nn.Parameter(start.clone())
    optimizer = make_8bit(matrix, beta2=beta2)
    adamw = torch.optim.AdamW([parameter], lr=1e-3, betas=(0.9, beta2), weight_decay=0.0)
    for step in range(300):
        gradient = scale * (torch.randn(16, 512) + 0.3) * (torch.rand(16, 512) < (1.0 if step % 2 else 0.2))
        step_8bit(optimizer, matrix, gradient, learning_rate=1e-3)
        parameter.grad = gradient
        adamw.step()
    moved = parameter.detach() - start
    assert float((matrix - parameter.detach()).norm() / moved.norm()) < tolerance


@pytest.mark.parametrize("small", [1e-4, 1e-7, 1e-12])
def test_a_small_second_moment_among_large_ones_does_not_vanish(small: float) -> None:
    """With torchao's 8 bits, the case of 1e-4 moved the parameter by 4,200 learning rates; AdamW: 0.7."""
    matrix = torch.zeros(1, 256)
    optimizer = make_8bit(matrix)
    gradient = torch.ones(1, 256)
    gradient[0, 3] = small
    step_8bit(optimizer, matrix, gradient, learning_rate=1.0)
    worst = max(step_8bit(optimizer, matrix, torch.zeros(1, 256), learning_rate=1.0) for _ in range(100))
    assert worst < 1.0


@pytest.mark.parametrize("beta2", [0.85, 0.95, 0.999])
def test_no_parameter_moves_further_than_the_bound_of_adamw(beta2: float) -> None:
    """The bound of m / sqrt(v), attained by gradients that grow as beta2 / beta1 from step to step."""
    bound = 0.1 / math.sqrt((1 - beta2) * (1 - 0.81 / beta2))
    matrix = torch.zeros(8, 64)
    optimizer = make_8bit(matrix, beta2=beta2)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 120):
        correction = math.sqrt(1 - beta2**step) / (1 - 0.9**step)
        gradient = torch.randn(8, 64, generator=generator) * 10 ** (6 * torch.rand(8, 64, generator=generator) - 6)
        gradient[0] = (beta2 / 0.9) ** step
        assert step_8bit(optimizer, matrix, gradient, learning_rate=1e-2) <= 1.001 * bound * correction


def test_a_second_moment_without_gradients_decays() -> None:
    """Rounded to the nearest, a moment that loses a thousandth per step would never change."""
    matrix = torch.zeros(4, 64)
    optimizer = make_8bit(matrix, beta2=0.999)
    gradient = torch.ones(4, 64)
    gradient[:, :32] = 0.1
    step_8bit(optimizer, matrix, gradient, learning_rate=1e-3)
    gradient[:, :32] = 0.0
    for _ in range(1000):
        step_8bit(optimizer, matrix, gradient, learning_rate=1e-3)
    left = optimizer.second_moments("w")[:, :32] / (0.01 * 0.001)
    assert float(left.mean()) == pytest.approx(0.999**1000, rel=0.3)


def test_rows_of_several_ranks_have_the_moments_of_the_whole_matrix() -> None:
    torch.manual_seed(0)
    whole = torch.randn(7, 96)
    parts = [part.clone() for part in whole.split([4, 3])]
    one, many = make_8bit(whole), [make_8bit(part) for part in parts]
    for _ in range(5):
        gradient = torch.randn(7, 96)
        step_8bit(one, whole, gradient, learning_rate=1e-2)
        for optimizer, part, rows in zip(many, parts, gradient.split([4, 3]), strict=True):
            step_8bit(optimizer, part, rows, learning_rate=1e-2)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=0)


@pytest.mark.parametrize(("row", "block"), [(1024, 256), (2880, 240), (24, 24), (1031, 1031), (0, 1), (96, 96)])
def test_a_block_divides_a_row(row: int, block: int) -> None:
    assert block_size(row) == block


def test_the_bytes_of_moments_are_those_of_the_forecast() -> None:
    shards = {"w": torch.zeros(512, 1024)}
    state = make_8bit(shards["w"]).state().values()
    found = sum(tensor.numel() * tensor.element_size() for tensor in state) / shards["w"].numel()
    assert found == pytest.approx(moment_bytes(optimizer="adamw", optimizer_state="8bit").hidden, abs=0.01)
