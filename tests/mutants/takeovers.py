"""Mutations of what lets a server outlive its controller: labels, the take-over, and what core and audit make of it."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, of

MUTANTS: Final[tuple[Mutant, ...]] = (
    *of(
        "dora/core/on_instances.py",
        "tests/core/test_takeovers.py",
        (
            "digest-of-a-taken-over-server-ignored",
            "entry is not None and entry.digest == event.digest",
            "entry is not None",
            "test_a_server_with_other_bytes_of_the_version_is_pushed_like_an_empty_one",
        ),
        (
            "taken-over-server-leaves-its-version-given-away",
            "        state.given_away.pop(entry.number, None)\n",
            "",
            "test_a_version_that_was_given_away_is_at_home_again_on_an_adopted_server",
        ),
    ),
    *of(
        "dora/core/pushes.py",
        "tests/core/test_takeovers.py",
        (
            "drained-server-serves-once-it-is-back",
            "    if instance.is_member:  # else it was drained in the meantime\n"
            "        serve(state, instance, holding)",
            "    serve(state, instance, holding)",
            "test_a_drained_server_that_comes_back_gets_no_work_until_it_is_recalled_with_the_version_that_it_holds",
        ),
    ),
    *of(
        "dora/journal/audit_fleet.py",
        "tests/journal/test_audit.py",
        (
            "audit-believes-labels",
            "    if event.digest != journaled:",
            "    if files is None:",
            "test_a_server_taken_over_with_other_bytes_than_the_journaled_ones_is_named",
        ),
        (
            "audit-lets-released-versions-be-served",
            "    return t.stored & {event.version} if",
            "    return {event.version} if",
            "test_a_server_taken_over_with_a_version_that_nothing_needs_holds_none",
        ),
    ),
    *of(
        "dora/engine/sglang/push.py",
        "tests/engine/test_push.py",
        (
            "label-kept-while-weights-change",
            "    await server.set_label(UNCONFIRMED)\n",
            "",
            "test_a_push_goes_through_its_stages_in_order_and_leaves_the_server_serving",
        ),
    ),
    *of(
        "dora/engine/sglang/push.py",
        "tests/engine/test_push_over_http.py",
        (
            "taken-over-although-requests-run",
            "await server.flush_cache(timeout_s=timeout_s) and await server.is_empty()",
            "True",
            "test_requests_are_aborted_until_the_server_flushes_and_counts_none",
        ),
        (
            "update-gate-left-open",
            "                    await server.end_update()",
            "                    pass",
            "test_the_gate_of_an_update_that_was_not_ended_is_closed",
        ),
    ),
    *of(
        "dora/engine/sglang/distributed.py",
        "tests/engine/test_distributed.py",
        (
            "label-before-the-weights-are-verified",
            "        if live:\n            await server.set_label(label)",
            "        await server.set_label(label)",
            "test_a_version_moves_and_its_label_comes_once_it_is_verified",
        ),
        (
            "label-kept-by-weights-found-wrong",
            "                await server.set_label(UNCONFIRMED)\n",
            "                pass\n",
            "test_weights_that_lack_a_bucket_are_found_by_their_log_probs_and_leave_no_label",
        ),
    ),
    *of(
        "dora/controller/fleet.py",
        "tests/controller/test_fleet.py",
        (
            "kept-server-not-taken-over",
            "        if started.is_kept:\n            version, digest",
            "        if False:\n            version, digest",
            "test_a_kept_server_is_taken_over_and_comes_up_with_the_version_that_its_label_names",
        ),
        (
            "unfit-kept-server-ends-the-run",
            "            if started.is_kept:  # perhaps",
            "            if False:  # perhaps",
            "test_a_kept_server_unfit_for_this_configuration_is_started_again_for_it",
        ),
        (
            "servers-join-without-connections",
            "        if needed > limits.streams:",
            "        if False:",
            "test_servers_join_while_this_host_allows_a_connection_for_each_of_their_slots",
        ),
    ),
    *of(
        "dora/controller/effects.py",
        "tests/controller/test_effects.py",
        (
            "tokens-after-a-failed-push-foreign",
            "        if unconfirmed:",
            "        if False:",
            "test_tokens_of_a_push_that_failed_have_no_version",
        ),
    ),
)
