"""One mutation: a text to replace, and the tests of which one must then fail.

Invariant: the text occurs exactly once in its file; test_mutants.py fails if the code has changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mutation."""

    name: str
    file: str
    old: str
    new: str
    killers: tuple[str, ...]  # pytest node ids, at least one of which must fail


def of(file: str, killed_by: str, *mutations: tuple[str, str, str, str]) -> Iterator[Mutant]:
    """Mutations (name, old, new, test) of one file, killed by tests in one file."""
    for name, old, new, test in mutations:
        yield Mutant(name, file, old, new, (f"{killed_by}::{test}",))
