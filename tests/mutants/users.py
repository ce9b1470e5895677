"""Mutations of what users may ask of a run, and of who is told to have asked."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, of

MUTANTS: Final[tuple[Mutant, ...]] = (
    *of(
        "dora/core/on_users.py",
        "tests/core/test_users.py",
        (
            "request-is-done-again",
            "    elif event.request.id and event.request.id in state.requests:\n",
            "    elif False:\n",
            "test_what_comes_again_under_an_id_is_refused_by_the_next_controller_too",
        ),
        (
            "refused-request-is-forgotten",
            "        if event.request.id:\n            state.requests.append(event.request.id)\n"
            "        if reason := _GRANT[type(event)](state, event):\n            refuse(state, event, reason)\n",
            "        if reason := _GRANT[type(event)](state, event):\n            refuse(state, event, reason)\n"
            "        elif event.request.id:\n            state.requests.append(event.request.id)\n",
            "test_an_id_that_was_refused_is_not_granted_later",
        ),
        (
            "request-while-stopping",
            "    if state.stopping:\n",
            "    if False:\n",
            "test_a_stop_ends_the_run_once_and_everything_else_is_then_refused",
        ),
        (
            "version-is-evaluated-again",
            "    if newest == state.evaluated:\n",
            "    if False:\n",
            "test_a_version_that_is_asked_for_is_evaluated_as_one_that_is_due",
        ),
    ),
    *of(
        "dora/core/on_run.py",
        "tests/core/test_users.py",
        (
            "stopped-for-ever",
            "    state.stopping = False\n",
            "",
            "test_the_next_controller_is_not_stopped",
        ),
    ),
    *of(
        "dora/core/core.py",
        "tests/core/test_users.py",
        (
            "request-to-an-ended-run-is-silent",
            "        if isinstance(event, ev.UserRequest):\n            on_users.refuse(state, event, ev.ENDED)\n",
            "",
            "test_a_request_to_a_run_that_has_ended_changes_nothing[new]",
        ),
    ),
    *of(
        "dora/controller/user_requests.py",
        "tests/controller/test_user_requests.py",
        (
            "two-additions-at-once",
            "        async with self._adding:\n",
            "        if True:\n",
            "test_an_address_that_is_added_twice_at_once_joins_once",
        ),
    ),
)
