"""`import dora` gives what docs/PYTHON.md lists, at once, and imports nothing before it is used."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import dora
from dora.errors import ConfigError
from dora.journal.run_folder import RunFolder

PAGE = Path(__file__).parents[2] / "docs" / "PYTHON.md"
FUNCTIONS = [name for name in dora.__all__ if inspect.isfunction(getattr(dora, name))]
METHODS = [name for name, _ in inspect.getmembers(dora.Run, inspect.isfunction) if not name.startswith("_")]


def modules_after(code: str) -> set[str]:
    shown = "import sys; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", f"{code}; {shown}"], capture_output=True, text=True, check=True, timeout=60
    )
    return set(found.stdout.split())


def test_import_dora_imports_nothing_but_a_few_modules_of_python() -> None:
    imported = modules_after("import dora") - modules_after("pass")
    assert {name for name in imported if name.startswith("dora")} == {"dora"}
    assert {name.split(".")[0] for name in imported} <= {"dora", *sys.stdlib_module_names}
    assert len(imported) < 40, "about 0.01 s"


def test_starting_and_reading_runs_needs_no_torch() -> None:
    names = ", ".join(f"dora.{name}" for name in dora.__all__)
    assert not {"torch", "transformers", "zmq"} & modules_after(f"import dora; {names}")


def test_what_is_public_is_listed_once_and_is_there() -> None:
    assert sorted(dora.__all__) == dora.__all__
    assert sorted(name for names in dora._HOMES.values() for name in names) == dora.__all__
    assert set(dora.__all__) <= set(dir(dora))
    with pytest.raises(AttributeError, match="module 'dora' has no attribute 'jobs_'"):
        _ = dora.jobs_  # type: ignore[attr-defined]


def test_the_page_names_all_that_is_public_and_nothing_else() -> None:
    page = PAGE.read_text()
    named = set(re.findall(r"\bdora\.([A-Za-z]\w*)", page)) - {"config"}
    assert named == set(dora.__all__)
    assert set(re.findall(r"^\| `(\w+)\(", page, re.MULTILINE)) >= {*METHODS}


@pytest.mark.parametrize(
    "function", [getattr(dora, name) for name in FUNCTIONS] + [getattr(dora.Run, m) for m in METHODS]
)
def test_public_functions_are_typed_and_described(function: Callable[..., object]) -> None:
    parameters = inspect.signature(function).parameters.values()
    assert all(p.annotation is not p.empty for p in parameters if p.name != "self")
    assert inspect.signature(function).return_annotation is not inspect.Signature.empty
    assert function.__doc__


def test_errors_are_the_same_classes_as_in_the_package() -> None:
    with pytest.raises(dora.ConfigError):
        RunFolder.open(Path("gone"))
    assert dora.ConfigError is ConfigError
