"""What Python gives becomes what `dora run` reads: tables, `--set`, and functions by name."""

from __future__ import annotations

import enum
import functools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dora.config.load import as_toml, dump, load, set_key
from dora.config.schema import Config
from dora.errors import ConfigError
from dora.functions import load_function
from dora.jobs.settings import as_overrides, configuration


def reward(response: str) -> float:
    return float(len(response))


class Color(enum.StrEnum):
    DORA = "dora"


def made(source: Any = None, /, **settings: Any) -> Config:
    return configuration(source, settings)


def in_file(path: Path, name: str = "graded", *, module: str = "") -> Any:
    """A function of a file, as a notebook that imported the file has it."""
    path.write_text(f"def {name}(response):\n    return 1.0\n")
    loaded = ModuleType(module or path.stem)
    loaded.__file__ = str(path)
    exec(path.read_text(), loaded.__dict__)
    sys.modules[loaded.__name__] = loaded
    return getattr(loaded, name)


def test_keyword_arguments_are_settings_nested_or_with_two_underscores() -> None:
    assert made(run__steps=8, rollout={"group_size": 4}) == made(
        **{"run.steps": 8, "rollout": {"group_size": 4}}  # type: ignore[arg-type]
    )
    assert made(run__steps=8).run.steps == 8


def test_settings_change_keys_of_a_file_and_keep_the_others(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[run]\nsteps = 3\nname = 'mine'\n")
    assert [made(p, run={"steps": 5}).run.name for p in (path, str(path))] == ["mine", "mine"]
    assert made(path, run={"steps": 5}).run.steps == 5


def test_tables_count_as_a_file() -> None:
    tables = {
        "run": {"steps": 3, "folder": Path("there")},
        "task": {"sources": [{"kind": "seeds"}]},
        "eval": {"sets": ()},
    }
    config = made({**tables, "environment": {"name": "a.py:b"}})
    assert config.task.rewards == (), "as with a file, an environment has no default reward"
    assert (config.run.steps, config.run.folder, config.task.sources[0].kind) == (3, Path("there"), "seeds")


def test_a_configuration_is_taken_as_it_is() -> None:
    config = load(None, ["run.steps=3", 'objective.preset="dapo"'], environ={})
    assert made(config) == config


def test_the_configuration_for_the_process_says_all_that_was_given(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    config = made(run__steps=3, task={"sources": [{"kind": "jsonl", "path": tmp_path / "a.jsonl"}]},
                  eval__sets=[], objective__preset="dapo", **{"task.rewards.0": {"kind": "exact"}})  # fmt: skip
    path.write_text(dump(config))
    assert load(path, environ={}) == config


def test_the_status_endpoint_gets_a_free_port_unless_it_is_given(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[status]\nport = 8421\n")
    assert [made().status.port, made(path).status.port] == [0, 0]
    assert [made(path, status__port=9).status.port, made({"status": {"port": 9}}).status.port] == [9, 9]


VALUES = [
    *(True, 3, -1, 1e22, float("inf"), "a", "3", "true", 'quo"te', "tab\there\x7f", "ä\u2028", "[1]", ""),
    *([], [1, 2], [[1], ["x"]], [{"kind": "exact", "a b": {"c": [1.5]}}]),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_every_value_is_read_as_it_was_given(value: Any) -> None:
    data: dict[str, Any] = {}
    set_key(data, f"a={as_toml(value)}")
    assert data["a"] == value
    assert type(data["a"]) is type(value)


def test_numbers_of_numpy_enumerations_tuples_and_none() -> None:
    given = {"a": np.int64(3), "b": np.float64(0.5), "c": np.bool_(True), "d": Color.DORA, "e": (1, 2), "f": None}
    assert [*as_overrides(given)] == ["a=3", "b=0.5", "c=true", 'd="dora"', "e=[1, 2]"]


@pytest.mark.parametrize("name", ["a.b", "a=b", " a ", "", "1 2", "ä\n"])
def test_names_that_no_option_can_spell_arrive_as_they_are(name: str) -> None:
    options = {"plain": 1, "deep": {name: {"x": [1, {name: "y"}]}, "other": True}}
    found = made(environment__name="m:f", environment__options=options)
    assert found.environment.options == options


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", np.zeros(3), 1j])
def test_what_is_no_setting_is_refused_with_its_key(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^task\.options\.0\.a: a \w+ is not a setting; "):
        made(task={"options": [{"a": value}]})
    with pytest.raises(ConfigError, match="the name of a setting is text, not 3"):
        made({3: value})


def test_an_unknown_key_is_refused_with_the_nearest_one_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key rollout\.grup_size; did you mean rollout\.group_size\?"):
        made({"rollout": {"grup_size": 4}, "run": {"folder": tmp_path}})
    with pytest.raises(ConfigError, match=r"no such file"):
        made(tmp_path / "gone.toml")
    assert [*tmp_path.iterdir()] == []


# -- functions ---------------------------------------------------------------------------------------------------------


def reward_of(function: object) -> str:
    return made(task__rewards=[{"kind": "function", "name": function}]).task.rewards[0].name


def test_a_function_of_a_file_is_named_by_the_file_and_loads_from_there(tmp_path: Path) -> None:
    name = reward_of(in_file(tmp_path / "shop_rewards.py"))
    assert name == f"{tmp_path}/shop_rewards.py:graded"
    assert load_function(name, field="task.rewards.0.name")(response="") == 1.0


def test_a_function_of_a_package_is_named_by_its_module() -> None:
    assert reward_of(reward) == "tests.python.test_settings:reward"


@pytest.mark.parametrize("by_name", [False, True])
def test_a_function_of_a_notebook_is_refused_with_how_to_move_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_name: bool
) -> None:
    monkeypatch.setattr(reward, "__module__", "__main__")
    with pytest.raises(ConfigError) as refused:
        reward_of("__main__:reward" if by_name else reward)
    assert str(refused.value) == (
        "task.rewards.0.name: 'reward' is defined in a notebook or the script itself (__main__), where other processes "
        "cannot import it; move it to a file of its own (in a notebook: a cell that begins with %%writefile "
        "functions.py) and give 'functions.py:reward'"
    )


def test_the_run_itself_does_not_import_from_main_either() -> None:
    with pytest.raises(ConfigError, match=r"^task\.rewards\.0\.name: 'reward' is defined in a notebook"):
        load_function("__main__:reward", field="task.rewards.0.name")


@pytest.mark.parametrize("function", [lambda response: 1.0, functools.partial(reward, "a"), Color.DORA.__class__.mro])
def test_a_function_without_a_place_in_a_file_is_refused(function: object) -> None:
    with pytest.raises(ConfigError, match=r"^task\.rewards\.0\.name: .*define a function at the top level of a file"):
        reward_of(function)
