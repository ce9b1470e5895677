"""The static checks, as tests, so that one command runs every check, locally and in CI."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    """Run a tool of this environment on the whole repository."""
    return subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "tool",
    [
        ("ruff", "format", "--check", "."),
        ("ruff", "check", "."),
        pytest.param(("mypy",), marks=pytest.mark.deep),
    ],
    ids=["ruff-format", "ruff-check", "mypy-strict"],
)
@pytest.mark.timeout(600)
def test_the_code_passes(tool: tuple[str, ...]):
    result = run("-m", *tool)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.timeout(300)
def test_imports_go_downwards_only():
    result = run("-c", "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("module", ["dora.cli.app", "dora.app.job", "dora.controller.loop", "dora.core.state"])
def test_importing_it_loads_neither_torch_nor_transformers(module: str):
    heavy = f"import sys, {module}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert run("-c", heavy).stdout.strip() == "[]"


def test_dora_imports_what_it_declares_and_declares_what_it_imports():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: listed for name, listed in project["optional-dependencies"].items() if name not in ("bench", "dev")}
    base = {*map(module_of, project["dependencies"])}
    optional = {module_of(package) for listed in extras.values() for package in listed}
    imported = {name for path in (ROOT / "dora").rglob("*.py") for name in imports_of(path)}
    # pydantic brings the second; the Python of the hosts (environment.python) has the others.
    elsewhere = {"_typeshed", "pydantic_core", "verifiers", "openenv"}
    assert imported - optional - elsewhere == base


def module_of(requirement: str) -> str:
    """Return the module of a package that a requirement names."""
    name = re.match(r"[\w-]+", requirement)[0].replace("-", "_")
    return {"pyzmq": "zmq"}.get(name, name)


def imports_of(path: Path) -> set[str]:
    """Return the packages of others that a module imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"dora"}


def test_the_application_writes_to_no_terminal():
    for path in (ROOT / "dora" / "app").glob("*.py"):
        text = path.read_text()
        assert "sys.std" not in text, path
        assert "print(" not in text, path


def test_no_error_is_raised_where_older_pythons_wrap_it_in_a_group():
    trees = (ast.parse(path.read_text()) for path in (ROOT / "dora").rglob("*.py"))
    assert not [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.TryStar)]


def test_every_test_folder_is_run():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert set(settings["testpaths"]) == {f"tests/{path.parent.name}" for path in ROOT.glob("tests/*/test_*.py")}
