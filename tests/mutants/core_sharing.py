"""Mutations of the core where a server holds several adapters side by side."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, of

_RULES: Final = "tests/core/test_sharing.py"
_QUARANTINE: Final = "test_a_failed_load_is_unloaded_first_and_loaded_again_under_a_fresh_name"
_RELEASE: Final = "test_a_version_is_unloaded_when_no_trajectory_needs_it_and_released_when_every_server_has_confirmed"
_UNLOAD_FAILED: Final = "test_an_unload_that_failed_is_ordered_again_after_a_pause_and_at_last_the_server_is_condemned"

MUTANTS: Final[tuple[Mutant, ...]] = (
    *of(
        "dora/core/dispatch.py",
        _RULES,
        (
            "sharing-evaluation-waits-for-training",
            "    if evaluated is not None and evaluation.waiting and not _fill_evaluation(state, entries[evaluated]):\n"
            "        return\n"
            "    for entry in entries.values():\n"
            "        _fill_waiting(state, entry)\n",
            "    for entry in entries.values():\n"
            "        _fill_waiting(state, entry)\n"
            "    if evaluated is not None and evaluation.waiting:\n"
            "        _fill_evaluation(state, entries[evaluated])\n"
            "    for entry in entries.values():\n",
            "test_a_free_slot_goes_to_the_share_of_the_evaluation_first",
        ),
        (
            "sharing-training-overtakes-a-sample",
            "            return instance is None or not has_share\n",
            "            return True\n",
            "test_no_training_overtakes_a_sample_that_lacks_room",
        ),
        (
            "sharing-later-deadlines-first",
            "    for entry in entries.values():\n        _fill_waiting(state, entry)\n",
            "    for entry in reversed(entries.values()):\n        _fill_waiting(state, entry)\n",
            "test_a_free_slot_goes_to_waiting_trajectories_by_deadline",
        ),
        (
            "sharing-new-groups-before-waiting-ones",
            "    for entry in entries.values():\n        _fill_waiting(state, entry)\n",
            "    for entry in reversed(entries.values()):\n"
            "        _admit(state, entry)\n"
            "    for entry in entries.values():\n        _fill_waiting(state, entry)\n",
            "test_a_new_group_is_admitted_only_when_nothing_waits",
        ),
        (
            "sharing-small-ones-overtake",
            "        _fill_waiting(state, entry)\n        if _only_lacks_room(entry):\n            return\n",
            "        _fill_waiting(state, entry)\n",
            "test_nothing_overtakes_a_trajectory_that_lacks_room",
        ),
        (
            "sharing-waits-for-what-no-server-has",
            "    return entry.num_waiting > 0 and entry.roomiest() is not None\n",
            "    return entry.num_waiting > 0\n",
            "test_what_no_server_can_serve_yet_holds_up_nothing",
        ),
    ),
    *of(
        "dora/core/dispatch.py",
        "tests/core/test_shared_sweep.py",
        (
            "sharing-older-groups-overtake-what-was-admitted",
            "        _admit(state, entry)\n        if _only_lacks_room(entry):\n            return\n",
            "        _admit(state, entry)\n",
            "test_a_group_of_an_older_version_does_not_overtake_what_was_admitted_a_moment_before",
        ),
    ),
    *of(
        "dora/core/sharing.py",
        _RULES,
        (
            "sharing-newest-before-a-version-in-need",
            "0 if _lacks_instance(state, v) else 1 if",
            "1 if",
            "test_a_version_without_any_instance_comes_before_the_newest",
        ),
        (
            "sharing-unloads-what-is-needed",
            "if e.unfinished or v in",
            "if v in",
            _RELEASE,
        ),
        (
            "sharing-forgets-the-evaluation",
            "if e.unfinished or v in (newest, state.evaluation.version) or",
            "if e.unfinished or v == newest or",
            "test_an_evaluated_version_is_loaded_although_no_training_needs_it",
        ),
        (
            "sharing-loads-what-is-in-doubt",
            "    if any(holding.adapter == version for holding in instance.holdings):\n        return None\n",
            "    if any(version in (holding.version, holding.pushing) for holding in instance.holdings):\n"
            "        return None\n",
            _QUARANTINE,
        ),
        (
            "sharing-failures-spread-over-holdings",
            "return max(blank, key=lambda holding: holding.failures, default=None)",
            "return next(iter(blank), None)",
            "test_a_server_is_condemned_although_another_holding_is_empty_when_loads_fail",
        ),
        (
            "sharing-loads-on-drained-servers",
            "if i.is_member and not i.is_lost and not i.condemned",
            "if not i.is_lost and not i.condemned",
            "test_a_drained_server_loads_nothing_and_still_unloads_what_nobody_needs",
        ),
        (
            "sharing-retries-at-once",
            " or holding.retry_at > state.now",
            "",
            _UNLOAD_FAILED,
        ),
        (
            "sharing-doubtful-load-is-left",
            "if is_unused or holding.phase is WeightsPhase.QUARANTINED:",
            "if is_unused:",
            _QUARANTINE,
        ),
    ),
    *of(
        "dora/core/versions.py",
        _RULES,
        ("sharing-released-while-loaded", " or e.loading or e.held)", " or e.loading)", _RELEASE),
    ),
    *of(
        "dora/core/pushes.py",
        _RULES,
        (
            "sharing-lost-servers-hold-up-the-release",
            "        state.entry(holding.adapter).held -= 1\n",
            "        state.entry(holding.adapter).held -= holding.phase is WeightsPhase.UNLOADING\n",
            "test_a_version_is_released_when_the_server_that_had_not_confirmed_is_lost",
        ),
        (
            "sharing-a-name-is-used-again",
            "    leave_serving(state, instance, holding)\n"
            "    holding.move(WeightsPhase.UNLOADING, state.cause, instance=instance)\n"
            "    instance.attempt += 1\n",
            "    leave_serving(state, instance, holding)\n"
            "    holding.move(WeightsPhase.UNLOADING, state.cause, instance=instance)\n",
            _QUARANTINE,
        ),
        (
            "sharing-a-failed-load-stops-its-neighbors",
            "    if instance.is_shared:\n        return\n    instance.progress_at",
            "    instance.progress_at",
            "test_a_load_into_any_holding_does_not_stop_what_runs_beside_it_when_it_fails",
        ),
    ),
    *of(
        "dora/core/on_instances.py",
        _RULES,
        (
            "sharing-takes-servers-over",
            " and entry.digest == event.digest and not instance.is_shared:",
            " and entry.digest == event.digest:",
            "test_a_server_that_is_taken_over_counts_as_empty_as_its_loads_are_not_known",
        ),
    ),
    *of(
        "dora/core/tables.py",
        _RULES,
        (
            "sharing-loads-hold-up-the-watchdog",
            "return self.full.pushing is not None and not self.is_shared",
            "return self.full.pushing is not None",
            "test_a_load_under_way_does_not_keep_a_silent_server_from_being_condemned",
        ),
        (
            "sharing-leaves-during-a-load",
            "return any(holding.phase in IN_FLIGHT for holding in self.holdings)",
            "return self.full.phase in IN_FLIGHT",
            "test_a_server_leaves_when_no_load_or_unload_is_under_way",
        ),
    ),
)
