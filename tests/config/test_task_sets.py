"""Task sets of verifiers in a configuration: their own tasks are the default, and contradictions are named."""

from __future__ import annotations

import pytest

from dora.config.load import load
from dora.config.schema import Config
from dora.errors import ConfigError

GIVEN = ("environment.kind=verifiers", "environment.name=my-tasks", "environment.episode_timeout_s=60")


def job(*changes: str) -> Config:
    return load(None, [*GIVEN, *changes], environ={})


def test_its_tasks_are_the_default_sources_and_nothing_else_grades():
    config = job()
    [source], [held_out] = config.task.sources, config.eval.sets
    assert (source.kind, source.split) == ("verifiers", "train")
    assert (held_out.source.kind, held_out.source.split, held_out.name) == ("verifiers", "eval", "heldout")
    assert not config.task.rewards
    assert config.environment.own_prompts
    assert not job("eval.sets=[]").eval.sets
    assert job("eval.sets.0.prompts=2", 'environment.kind = "verifiers"').eval.sets[0].source.kind == "verifiers"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (["environment.name=''"], r"environment.name: kind 'verifiers' needs the id of a task set, or its FILE.py"),
        (["environment.command=['node']"], r"environment.command: kind 'verifiers' has a host of its own; remove"),
        (["task.sources=[{kind='seeds'}]"], r"task.sources.0.kind: 'seeds' has no tasks of the task set my-tasks; use"),
        (
            ["task.sources=[{kind='verifiers', split='eval'}]"],
            r"task.sources.0.split: kind 'verifiers' has train or all",
        ),
        (
            ["eval.sets=[{source={kind='verifiers'}}]"],
            r"eval.sets.0.source.split: kind 'verifiers' has eval or all here, not 'train'",
        ),
        (
            ["task.sources=[{kind='verifiers', split='all'}]"],
            r"eval.sets.0.source: task.sources trains on the same task",
        ),
        (["environment.kind=python", "environment.name=a:b"], r"task.sources.0.kind: tasks of verifiers are played by"),
    ],
)
def test_a_contradiction_is_named(changes: list[str], problem: str):
    named = ["task.sources=[{kind='verifiers'}]"] if "environment.kind=python" in changes else []
    with pytest.raises(ConfigError, match=problem) as raised:
        job(*named, *changes)
    assert all(line.count(": ") for line in str(raised.value).splitlines())


def test_other_tasks_may_be_held_out_by_other_options():
    held_out = "eval.sets=[{source={kind='verifiers', split='all', options={split='test'}}}]"
    assert job("task.sources=[{kind='verifiers', split='all'}]", held_out).eval.sets[0].source.options == {
        "split": "test"
    }


def test_the_time_of_its_episodes_is_limited():
    with pytest.raises(ConfigError, match=r"environment.episode_timeout_s: agents that drive themselves need one"):
        load(None, GIVEN[:2], environ={})
