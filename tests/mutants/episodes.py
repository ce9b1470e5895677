"""Mutations of failures of episodes, their hosts and messages."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

MUTANTS: Final[tuple[Mutant, ...]] = ()
