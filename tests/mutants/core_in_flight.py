"""Mutations of the core where weights are updated in flight, and of deadlines and rooms that a resume changes."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

MUTANTS: Final[tuple[Mutant, ...]] = ()
