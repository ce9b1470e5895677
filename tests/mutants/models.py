"""Mutations of layouts of stateful layers, position limits and kinds of models."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

MUTANTS: Final[tuple[Mutant, ...]] = ()
