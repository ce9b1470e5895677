"""Mutations of the core where weights are updated in flight, and of deadlines and rooms that a resume changes."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, of

_BUGS: Final = "tests/core/test_regressions.py"
_LONGER: Final = "test_a_job_without_a_bound_that_is_made_longer_trains_its_groups_until_the_new_end"
_ONLY: Final = "test_training_on_the_only_instance_does_not_wait_for_the_call_of_an_evaluation_sample"

MUTANTS: Final[tuple[Mutant, ...]] = (
    *of(
        "dora/core/updates.py",
        _BUGS,
        (
            "update-where-a-sample-moves-to",
            " or any(t.group is None for t in instance.reserved.values())",
            "",
            "test_an_update_leaves_out_the_instance_that_an_evaluation_sample_moves_to",
        ),
        (
            "update-last-instance-of-evaluation",
            "    if holding.version == evaluation.version and len(state.entry(evaluation.version).serving) == 1:\n"
            "        return evaluation.version\n",
            "",
            "test_the_instance_kept_for_an_evaluation_is_not_pushed_again_and_again_under_kv_pressure",
        ),
        ("update-waits-for-calls", " and t.phase in DECODING", "", f"{_ONLY}[keep]"),
        (
            "update-waits-for-samples-everywhere",
            "len(holders) == 1 and ",
            "",
            "test_where_samples_are_decoded_everywhere_those_of_one_instance_make_way_for_training",
        ),
        (
            "update-evaluation-takes-what-training-needs",
            "not is_busy or _has_another(state, newest, besides=instance)",
            "True",
            "test_an_evaluation_is_not_given_the_only_instance_while_training_calls",
        ),
        (
            "update-evaluation-takes-the-only-confirmed-instance",
            "        return len(state.entry(version).serving) > 1\n",
            "        return len(state.entry(version).serving) > 1 or state.entry(version).loading > 0\n",
            "test_an_evaluation_is_not_given_the_only_instance_that_is_confirmed_to_hold_the_newest_version",
        ),
        (
            "update-evaluation-takes-instance-under-pressure",
            "instance.is_empty and not instance.pressed",
            "instance.is_empty",
            "test_an_evaluation_is_not_given_an_instance_under_kv_pressure",
        ),
    ),
    *of(
        "dora/core/on_requests.py",
        _BUGS,
        (
            "move-to-another-version",
            "target.takes_work(trajectory.version)",
            "target.takes_work(target.full.version)",
            "test_a_trajectory_does_not_move_to_an_instance_that_an_evaluation_keeps_at_an_older_version",
        ),
        (
            "sample-is-no-progress",
            "        state.progress_at = state.now  # training may wait for the sample (`updates`)\n",
            "        pass\n",
            "test_training_on_the_only_instance_waits_for_an_evaluation_sample_that_is_decoded",
        ),
    ),
    *of(
        "dora/core/on_run.py",
        _BUGS,
        ("longer-job-keeps-deadlines", "        _renew_deadlines(state)\n", "", _LONGER),
        (
            "longer-job-keeps-queues",
            "    for earlier in list(state.complete):\n        state.complete[last] = state.complete.pop(earlier)\n",
            "",
            "test_so_are_its_groups_that_were_complete",
        ),
    ),
    *of(
        "dora/journal/audit_ledger.py",
        _BUGS,
        (
            "audit-longer-job-keeps-deadlines",
            "            for group in t.groups.values():\n"
            "                group.deadline = _last_step(t, VersionId(group.version))\n",
            "            pass\n",
            _LONGER,
        ),
    ),
)
