"""Options that stand for settings: the `--set`s that they are, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora.config.load import load
from dora.config.schema import Config
from dora.config.shorthand import Shorthand
from dora.errors import ConfigError


def loaded(*overrides: str, config: Path | None = None, **options: str) -> Config:
    return load(config, [*Shorthand(**options).settings(config), *overrides], environ={})


def test_they_are_settings_of_a_whole_job() -> None:
    given = Shorthand(model="models/m", data="rows.jsonl", prompt="question", answer="solution", reward="math")
    assert given.settings(None) == [
        'model.path="models/m"',
        'task.sources=[{kind="jsonl", path="rows.jsonl"}]',
        "eval.sets=[]",
        'task.sources.0.prompt="question"',
        'task.sources.0.answer="solution"',
        'task.rewards=[{kind="math"}]',
    ]
    config = load(None, given.settings(None), environ={})
    [source] = config.task.sources
    assert (source.kind, source.path, source.prompt, source.answer) == (
        "jsonl",
        Path("rows.jsonl"),
        "question",
        "solution",
    )
    assert source.description == "", "that of the default job is about sums"


def test_a_set_takes_precedence_and_may_refine_them() -> None:
    config = loaded("model.path=other", "task.sources.0.label=mine", model="m", data="r.parquet", reward="exact")
    assert config.model.path == "other"
    assert (config.task.sources[0].kind, config.task.sources[0].label) == ("parquet", "mine")


@pytest.mark.parametrize(
    ("data", "kind"),
    [("a.JSONL", "jsonl"), ("a.json", "jsonl"), ("a.parquet", "parquet"), ("o/n", "datasets"), ("n", "datasets")],
)
def test_the_end_of_a_name_tells_what_data_are(data: str, kind: str) -> None:
    assert loaded(data=data, reward="math").task.sources[0].kind == kind


def test_rows_and_rewards_may_come_from_functions() -> None:
    task = loaded(data="my rows.py:rows", reward="my rewards.py:score").task
    assert (task.sources[0].kind, task.sources[0].name) == ("function", "my rows.py:rows")
    assert (task.rewards[0].kind, task.rewards[0].name) == ("function", "my rewards.py:score")
    assert loaded(data="a.jsonl", reward="http://localhost:80/score").task.rewards[0].url == "http://localhost:80/score"


@pytest.mark.parametrize("text", ['a"b', "a\\b", "line\nbreak", "\x7f", "ü€\U0001f600", "[1, 2]", "}", ""])
def test_a_text_stays_a_text(text: str) -> None:
    assert loaded(data="a.jsonl", prompt=text, reward="math").task.sources[0].prompt == text


def test_held_out_sets_of_a_file_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[[eval.sets]]\nname = "dev"\nsource = {kind = "jsonl", path = "dev.jsonl"}\n')
    config = loaded(config=file, data="a.jsonl", reward="math")
    assert [one.name for one in config.eval.sets] == ["dev"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"data": "a.jsonl"},
            "--data: the configuration has 2 sources, and --data is for one; change the file, or use",
        ),
        ({"prompt": "q"}, "--prompt: the configuration has 2 sources"),
        ({"answer": "q"}, "--answer: the configuration has 2 sources"),
        ({"reward": "math"}, "--reward: the configuration has 2 rewards"),
    ],
)
def test_an_option_for_one_of_several_is_refused(tmp_path: Path, options: dict[str, str], says: str) -> None:
    file = tmp_path / "job.toml"
    file.write_text("[[task.sources]]\n[[task.sources]]\n[[task.rewards]]\n[[task.rewards]]\n")
    with pytest.raises(ConfigError, match=says):
        Shorthand(**options).settings(file)
    assert Shorthand(model="m").settings(file) == ['model.path="m"', 'model.revision=""']


@pytest.mark.parametrize("text", ["task = 3\n", "task = []\n", '[task]\nsources = "x"\n'])
def test_a_file_that_is_wrong_is_left_to_what_reads_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "job.toml"
    file.write_text(text)
    assert Shorthand(data="a.jsonl").settings(file) == ['task.sources=[{kind="jsonl", path="a.jsonl"}]']


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"reward": "maths"}, "--reward maths: expected math, exact, FILE.py:function or a URL; did you mean math?"),
        ({"reward": "score.py"}, "--reward score.py: expected math, exact, FILE.py:function or a URL"),
        ({"reward": ""}, "--reward : expected"),
        ({"data": "a.csv"}, "--data a.csv: is not a file that can be read; write .jsonl"),
        ({"data": "rows.py"}, "--data rows.py: is not a file that can be read; .*FILE.py:function"),
        ({"data": ""}, "--data: is empty"),
        ({"prompt": "q"}, "--prompt: names a column of your data; give --data, or a configuration file"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Shorthand(**options).settings(None)
