"""The words of docs/GLOSSARY.md are the words of the code: an avoided one in a name is an error.

A common word may be avoided for one thing and be the right word for another: those rooms are listed below.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Avoided words with another meaning: the rooms of dora/ where that is at home.
ELSEWHERE = {
    "accept": {"app", "cli", "engine", "observe"},  # of changed settings; the HTTP header; of drafts
    "action": {"sim", "embedded", "environments"},  # due at a simulated time; of an orphaned receiver; of OpenEnv
    "age": {"sim"},  # tokens that a simulated request has decoded
    "ban": {"embedded"},  # of tokens before min_new_tokens
    "broadcast": {"engine"},  # of tensors, to a server's ranks
    "flush": {"embedded", "engine", "paced"},  # of a prefix cache
    "history": {"app"},  # of weights, by their chain
    "interrupt": {"app", "controller"},  # of a run, by its user
    "lag": {
        "controller",
        "core",
        "observe",
        "status",
        "trainer",
    },  # of the event loop; AReaL's bound; the step minus the version
    "message": {"app", "config", "controller", "core", "embedded", "engine", "environments", "errors.py", "journal"}
    | {"node", "observe", "paced", "sim", "tasks", "trainer", "transport"},  # on a wire, of a chat, of an error
    "retry": {"core", "engine"},  # of a push, of a request
    "return": {"controller", "embedded"},  # of a lost server; SGLang's fields
    "sample": {
        "app",
        "cli",
        "config",
        "controller",
        "core",
        "embedded",
        "jobs",
        "journal",
        "observe",
        "sim",
        "status",
    },  # of an evaluation; a draw
    "submit": {"embedded", "environments"},  # of a request, to the batch; of a call, to a thread
    "sync": {"files.py", "journal", "sim"},  # of a file, to the disk; the strategy
    "task": {
        "app",
        "cli",
        "config",
        "controller",
        "environments",
        "observe",
        "paced",
        "sim",
        "status",
        "tasks",
        "transport",
    },  # of asyncio; what is learned
    "worker": {"sim"},  # of the graders
}
#: Names that stand in journals, in the answer of /status or in the API of OpenAI.
KEPT = {"late_completions", "completion_tokens", "max_completion_tokens", "return_token_ids"}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


@cache
def avoided_words() -> dict[tuple[str, ...], str]:
    """Avoided term -> the term to use; without those that are terms of the glossary with a meaning of their own."""
    rows = [cells(line) for line in (ROOT / "docs/GLOSSARY.md").read_text().splitlines() if line.startswith("| **")]
    terms = {term for row in rows for term in re.findall(r"\*\*`?(.+?)`?\*\*", row[0])}
    words = {word.strip(): row[0] for row in rows for word in row[2].split(",") if word.strip()}
    return {tuple(re.split(r"[ -]", word)): term for word, term in words.items() if word not in terms}


def names(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every name that is defined in `source`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name


def words_of(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+", name)]


def avoided_in(name: str, *, room: str) -> list[str]:
    words = words_of(name) if name not in KEPT else []
    singular = [word.removesuffix("s") for word in words]
    return [
        f"{name}: say {term}, not {' '.join(avoided)}"
        for avoided, term in avoided_words().items()
        if room not in ELSEWHERE.get(avoided[0], ())
        for start in range(len(words))
        if avoided in (tuple(words[start : start + len(avoided)]), tuple(singular[start : start + len(avoided)]))
    ]


def test_no_name_has_an_avoided_word() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {problem}"
        for path in sorted((ROOT / "dora").rglob("*.py"))
        for line, name in names(path.read_text())
        for problem in avoided_in(name, room=path.relative_to(ROOT / "dora").parts[0])
    ]
    assert found == []


@pytest.mark.parametrize(
    "name", ["replicas", "num_iterations", "StealRequest", "current_version", "async_level", "dead"]
)
def test_an_avoided_word_is_found(name: str) -> None:
    assert avoided_in(name, room="core")


@pytest.mark.parametrize("name", ["instances", "step", "epoch", "version", "deadline", "shipment", "current"])
def test_other_words_are_not(name: str) -> None:
    assert avoided_in(name, room="core") == []


def test_every_exception_is_about_an_avoided_word() -> None:
    assert set(ELSEWHERE) <= {" ".join(word) for word in avoided_words()}
