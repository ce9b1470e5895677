"""Functions and classes that a configuration names by their file."""

import json
import sys
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


def test_a_file_that_cannot_be_imported_is_one_line(tmp_path):
    (tmp_path / "broken.py").write_text("def")
    with pytest.raises(ConfigError, match=r"^f: cannot import '.*broken.py' \(SyntaxError: ") as raised:
        load_function(f"{tmp_path}/broken.py:first", field="f")
    assert "\n" not in str(raised.value)
