"""Mutations of limits of reward functions and what they start."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, of

_POOL = "tests/tasks/test_pool.py"

MUTANTS: Final[tuple[Mutant, ...]] = (
    *of(
        "dora/tasks/memory.py",
        _POOL,
        (
            "children-of-graders-not-measured",
            "    for each in found:  # the list grows in the loop\n        found += children(each)\n",
            "",
            "test_what_a_grader_starts_counts_towards_its_memory_even_in_other_sessions",
        ),
        (
            "shared-memory-counts-many-times",
            " and sum(map(_proportional, going)) > limit",
            "",
            "test_memory_that_processes_share_counts_once",
        ),
    ),
    *of(
        "dora/tasks/guard.py",
        _POOL,
        (
            "one-guard-alone",
            "    _watch(guard_again, ",
            "    _watch(lambda: _run(command, cgroup), ",
            "test_a_grader_that_kills_its_guard_ends_with_all_that_it_started",
        ),
    ),
    *of(
        "dora/tasks/child.py",
        _POOL,
        (
            "stopped-guards-stay-stopped",
            "signal.SIGCONT)",
            "0)",
            "test_a_grader_that_stops_its_guards_is_killed_with_all_that_it_started",
        ),
    ),
)
