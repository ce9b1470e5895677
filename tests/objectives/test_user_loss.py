"""A loss of the user's own: imported from the working directory, checked, and named in every error."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from dora.app.loss_check import check_loss, random_tokens
from dora.errors import ConfigError
from dora.objectives.objective import Objective
from dora.objectives.settings import ObjectiveConfig
from dora.objectives.table import loss_of

ROOT = Path(__file__).parents[2]
PLAIN = "def loss(tokens):\n    return -tokens.advantage_P * tokens.current_P\n"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write a module into the working directory; return settings that name a function of it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str, *, function: str = "loss", name: str = "my_losses", **options):
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text(source)
        return ObjectiveConfig.model_validate({"loss": {"kind": f"{name}:{function}", "options": options}})

    yield write
    sys.modules.pop("my_losses", None)


def test_the_example_of_the_page_is_a_loss_whose_gradient_is_right(module):
    page = (ROOT / "docs/OBJECTIVES.md").read_text()
    [source] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    [table] = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    given = tomllib.loads(table)["objective"]["loss"]
    module(source)
    settings = ObjectiveConfig.model_validate({"loss": given})
    assert check_loss(settings).startswith("my_losses.py:soft_clip: its gradient equals finite differences")
    tokens = random_tokens(0)
    ratio = (tokens.current_P - tokens.behavior_P).exp()
    expected = -tokens.advantage_P * ((ratio - 1) / 0.5).tanh() / 8  # of `longest`
    torch.testing.assert_close(Objective(settings, longest=8)(tokens).loss_P, expected)


def test_a_built_in_loss_is_not_checked_again():
    assert check_loss(ObjectiveConfig()) == ""


def test_it_may_mark_tokens_and_stop_gradients(module):
    settings = module(
        "from dora.objectives.tokens import TokenLoss\n"
        "def loss(tokens):\n"
        "    weight = (tokens.current_P - tokens.behavior_P).exp().detach()\n"
        "    loss_P = -weight.clamp(max=1.1) * tokens.advantage_P * tokens.current_P\n"
        "    return TokenLoss(loss_P, {'clip_high': weight > 1.1})\n"
    )
    assert "equals finite differences" in check_loss(settings)
    assert Objective(settings, longest=8)(random_tokens(0)).marks["clip_high"].any()


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return tokens.current_P.sum()", r"returned a tensor of shape \[\], expected one loss for each token: \[13\]"),
        (
            "return tokens.current_P.detach()",
            "returned losses without a gradient; they must depend on tokens.current_P",
        ),
        ("return tokens.current_P * float('nan')", "returned 13 losses that are NaN or infinite"),
        ("return 3.0", "returned float, expected a tensor or a TokenLoss"),
        ("return {}['x']", "raised KeyError: 'x'"),
        (
            "from dora.objectives.tokens import TokenLoss\n    return TokenLoss(tokens.current_P, {'odd': 0})",
            "marks 'odd'; known are clip_low, clip_high, ",
        ),
        (
            "from dora.objectives.tokens import TokenLoss\n    return TokenLoss(tokens.current_P, {'clip_low': True})",
            "marks 'clip_low' with something other than a value for each token",
        ),
    ],
)
def test_a_wrong_result_is_a_line_that_names_the_function(module, body, problem):
    settings = module(f"def loss(tokens):\n    {body}\n")
    with pytest.raises(ConfigError, match=rf"^objective.loss.kind: my_losses:loss {problem}") as caught:
        Objective(settings, longest=8)(random_tokens(0))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("source", "options", "problem"),
    [
        (PLAIN, {"cap": 3}, r"must accept the tokens and objective.loss.options \(got an unexpected keyword"),
        (
            "def loss(tokens, *, cap): ...",
            {},
            r"must accept the tokens and objective.loss.options \(missing a required",
        ),
    ],
)
def test_other_arguments_are_refused_when_it_is_imported(module, source, options, problem):
    with pytest.raises(ConfigError, match=problem):
        loss_of(module(source, **options).loss)


def test_a_missing_module_or_function_is_refused(module):
    with pytest.raises(
        ConfigError, match=r"objective.loss.kind: cannot import 'my_losses' \(SystemExit: 2 \(my_losses\.py:1\)\)"
    ):
        loss_of(module("raise SystemExit(2)").loss)
    with pytest.raises(ConfigError, match=r"objective.loss.kind: cannot import 'nowhere'"):
        loss_of(ObjectiveConfig.model_validate({"loss": {"kind": "nowhere:loss"}}).loss)
    with pytest.raises(ConfigError, match=r"objective.loss.kind: .*my_losses.py has no function 'other'"):
        loss_of(module(PLAIN, function="other").loss)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (
            "weight = tokens.current_P.exp()\n    with torch.no_grad():\n        weight = weight * 1\n"
            "    return -weight * tokens.advantage_P * tokens.current_P",
            "the gradient of my_losses:loss differs from finite differences by",
        ),
        (
            "x = tokens.current_P - tokens.current_P.mean()\n    return -tokens.advantage_P * x",
            "my_losses:loss returns different losses for a sequence if other sequences are in the same pass",
        ),
        (
            "assert tokens.sequence_P.max() < len(tokens.lengths_n)\n    return -tokens.advantage_P * tokens.current_P",
            r"my_losses:loss raised .* \(in a pass without tokens, such as that of a rank that gets no sequence\)$",
        ),
    ],
)
def test_a_wrong_gradient_and_a_loss_over_the_batch_are_found(module, body, problem):
    settings = module(f"import torch\ndef loss(tokens):\n    {body}\n")
    with pytest.raises(ConfigError, match=problem):
        check_loss(settings)
