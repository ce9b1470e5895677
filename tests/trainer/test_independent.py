"""The trainer computes what the documents say: against a trainer that was written from them and shares no code with it.

`python -m tests.trainer.independent` draws a hundred other cases.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.trainer import independent, plain_trainer

pytestmark = pytest.mark.deep


def test_the_plain_trainer_shares_no_code():
    tree = ast.parse(Path(plain_trainer.__file__).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert not any(module.split(".")[0] in ("dora", "tests", "bench") for module in modules)


def test_weights_and_metrics_are_those_of_the_formulas(tmp_path: Path):
    torch.set_num_threads(1)
    assert independent.run(list(independent.draw(8, seed=5)), tmp_path) == ""


def test_weights_of_tokens_weigh_the_gradients_of_their_own_tokens_in_gspo(tmp_path: Path):
    (drawn,) = independent.draw(1, seed=11)
    objective = {"loss": {"kind": "gspo", "clip_low": 0.1, "clip_high": 0.1}, "weight": "tis", "weight_low": 0.9}
    assert independent.run([replace(drawn, objective=objective)], tmp_path) == ""


def test_weights_and_metrics_are_those_of_the_formulas_on_two_ranks(tmp_path: Path):
    assert independent.run(list(independent.draw(4, seed=6)), tmp_path, ranks=2) == ""


def test_weights_and_metrics_are_those_of_the_formulas_with_copies_of_the_weights(tmp_path: Path):
    drawn = zip(independent.draw(2, seed=7), (True, False), strict=True)
    cases = [replace(case, shard_ranks=2, gathered=gathered) for case, gathered in drawn]
    assert independent.run(cases, tmp_path, ranks=4) == ""


def test_weights_and_metrics_are_those_of_the_formulas_with_divided_rows(tmp_path: Path):
    cases = [independent.divided(case, 2) for case in independent.draw(2, seed=8)]
    assert independent.run(cases, tmp_path, ranks=2) == ""
