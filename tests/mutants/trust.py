"""Mutations of who may have a received folder executed."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

MUTANTS: Final[tuple[Mutant, ...]] = ()
