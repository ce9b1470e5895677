"""The section [environment]: contradictions are named before anything starts."""

import pytest

from dora.config.load import load
from dora.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["name=shop"], "environment.name: expected FILE.py:name or module:name, got 'shop'"),
        (["command=['node']"], "environment.name: is empty, so there is no environment"),
        (["name=shop", "command=['node']", "python='python3'"], "environment.python: has no effect with"),
        (["name=a:b", "call_timeout_s=2000"], r"environment.call_timeout_s: 2000 s must be below run.no_progress_s"),
        (["output_bytes=2000000"], "environment.output_bytes: "),
        (
            ["name=a:b", "hosts=1", "episodes_per_host=2"],
            r"environment.episodes_per_host: 1 x 2 episodes are fewer than",
        ),
    ],
)
def test_a_contradiction_is_named(overrides: list[str], problem: str):
    with pytest.raises(ConfigError, match=problem) as raised:
        load(None, [f"environment.{override}" for override in overrides], environ={})
    assert "\n" not in str(raised.value)


def test_there_is_no_environment_unless_one_is_named():
    assert load(None, environ={}).environment.name == ""
    config = load(None, ["environment.name=shop.py:Shop", "environment.options.size=3"], environ={})
    assert config.environment.options == {"size": 3}


def test_rows_that_are_a_seed_need_an_environment():
    rows = ["task.sources.0.kind=seeds", "eval.sets=[]"]
    with pytest.raises(ConfigError, match=r"task.sources: rows of kind seeds have no prompt; name an environment"):
        load(None, rows, environ={})
    load(None, [*rows, "environment.name=dora.environments.lookup:Lookup"], environ={})
