"""Functions and classes that a configuration names by their file."""

import json
import sys
import warnings
from dataclasses import is_dataclass

import pytest

from dora.errors import ConfigError
from dora.functions import load_function

TEXT = """
from __future__ import annotations
from dataclasses import dataclass

loaded = []

@dataclass
class Thing:
    number: int

def first(): return loaded
"""


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


def test_a_file_is_imported_once_wherever_it_is(tmp_path, monkeypatch):
    (tmp_path / "things.py").write_text(TEXT)
    thing = load_function(f"{tmp_path}/things.py:Thing", field="f")
    assert is_dataclass(thing)
    monkeypatch.chdir(tmp_path)
    first = load_function("things.py:first", field="f")
    assert first() is load_function(f"{tmp_path}/things.py:first", field="f")()


def test_a_file_with_the_name_of_a_module_does_not_replace_it(tmp_path):
    (tmp_path / "json.py").write_text(TEXT)
    assert load_function(f"{tmp_path}/json.py:first", field="f")() == []
    assert sys.modules["json"] is json


def test_a_file_imports_the_modules_beside_it(tmp_path):
    (tmp_path / "judge.py").write_text(
        "from wordlist import WORDS\nfrom parts.inner import size\ndef score(): return WORDS, size"
    )
    (tmp_path / "wordlist.py").write_text("WORDS = ['yes']")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "inner.py").write_text("size = 3")
    assert load_function(f"{tmp_path}/judge.py:score", field="f")() == (["yes"], 3)
    assert str(tmp_path) not in sys.path


def test_files_of_two_folders_import_their_own_neighbors_of_the_same_name(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "judge.py").write_text("import wordlist\ndef score(): return wordlist.WORD")
        (tmp_path / name / "wordlist.py").write_text(f"WORD = '{name}'")
    found = {name: load_function(f"{tmp_path}/{name}/judge.py:score", field="f")() for name in ("one", "two", "one")}
    assert found == {"one": "one", "two": "two"}


def test_a_neighbor_with_the_name_of_a_module_of_python_is_not_imported_in_its_place(tmp_path):
    (tmp_path / "judge.py").write_text("import chunk\ndef score(): return chunk.__file__")
    (tmp_path / "chunk.py").write_text("")
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        assert not load_function(f"{tmp_path}/judge.py:score", field="f")().startswith(str(tmp_path))


def test_a_file_with_the_name_of_a_package_that_is_imported_later_does_not_replace_it(tmp_path):
    (tmp_path / "nturl2path.py").write_text(TEXT)
    load_function(f"{tmp_path}/nturl2path.py:first", field="f")
    assert "nturl2path" not in sys.modules


def test_a_file_whose_import_failed_is_imported_again_once_it_is_mended(tmp_path):
    (tmp_path / "judge.py").write_text("import wordlist\ndef score(): return 1")
    with pytest.raises(ConfigError, match=r"No module named 'wordlist' \(judge.py:1\)"):
        load_function(f"{tmp_path}/judge.py:score", field="f")
    (tmp_path / "wordlist.py").write_text("")
    assert load_function(f"{tmp_path}/judge.py:score", field="f")() == 1


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("things.py:frist", "has no function 'frist'; did you mean 'first'?"),
        ("none.py:first", "none.py: no such file"),
        ("things.py", "expected FILE.py:function or module:function, got '.*things.py'"),
        ("things.py:", "expected FILE.py:function or module:function"),
    ],
)
def test_a_name_that_is_wrong_is_one_line(tmp_path, name, says):
    (tmp_path / "things.py").write_text(TEXT)
    with pytest.raises(ConfigError, match=says):
        load_function(f"{tmp_path}/{name}", field="f")


def test_a_file_that_cannot_be_imported_is_one_line(tmp_path):
    (tmp_path / "broken.py").write_text("def")
    with pytest.raises(ConfigError, match=r"^f: cannot import '.*broken.py' \(SyntaxError: ") as raised:
        load_function(f"{tmp_path}/broken.py:first", field="f")
    assert "\n" not in str(raised.value)
