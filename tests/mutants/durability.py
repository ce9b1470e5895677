"""Mutations of what is synced, kept and told again after a crash or a full disk."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, of

MUTANTS: Final[tuple[Mutant, ...]] = (
    *of(
        "dora/controller/line_files.py",
        "tests/crash/test_lines.py",
        (
            "lines-not-synced-while-the-run-goes-on",
            "                await asyncio.to_thread(file.sync)\n",
            "                pass\n",
            "test_every_line_survives_a_power_failure_a_few_seconds_later",
        ),
        (
            "damaged-rows-kept",
            "        return False\n    if row.kind",
            "        return True\n    if row.kind",
            "test_a_step_that_is_trained_again_gets_the_row_that_it_has_lost",
        ),
    ),
    *of(
        "dora/observe/observed.py",
        "tests/crash/test_lines.py",
        (
            "no-row-for-a-step-that-is-trained-again",
            "        if step in self._told:\n",
            "        if step < state.feed.trained or step in self._told:\n",
            "test_a_step_that_is_trained_again_gets_the_row_that_it_has_lost",
        ),
    ),
    *of(
        "dora/app/opening.py",
        "tests/crash/test_lines.py",
        (
            "lost-rows-not-told",
            "            self.tell(lost)\n",
            "            pass\n",
            "test_a_resume_says_which_rows_are_gone_for_good",
        ),
    ),
    *of(
        "dora/controller/copies.py",
        "tests/crash/test_lines.py",
        (
            "copy-given-up-after-half-a-minute",
            "                if not self._may_wait(version):\n",
            "                if pause_s >= MAX_COPY_PAUSE_S or not self._may_wait(version):\n",
            "test_versions_that_found_no_room_are_copied_when_there_is_room_again",
        ),
        (
            "version-without-a-copy-deleted-at-the-end",
            "            self._only_in_memory.add(version)\n",
            "",
            "test_versions_for_which_there_never_was_room_stay_in_memory_at_the_end",
        ),
    ),
    *of(
        "dora/files.py",
        "tests/journal/test_files.py",
        (
            "refused-sync-taken-for-done",
            "                self._is_synced = False\n                if not is_full",
            "                if not is_full",
            "test_lines_that_the_system_refuses_to_sync_are_an_error_and_those_of_a_full_disk_wait",
        ),
    ),
    *of(
        "dora/transport/trainer_end.py",
        "tests/transport/test_stopped.py",
        (
            "rank-gives-up-a-stopped-controller",
            "limit_s = STOPPED_LIMIT_S if self._has_lease and self._epoch is not None else UNREACHABLE_LIMIT_S",
            "limit_s = UNREACHABLE_LIMIT_S",
            "test_a_rank_with_a_lease_waits_for_a_controller_that_is_stopped",
        ),
        (
            "rank-does-not-wait-for-the-window-of-a-stopped-controller",
            "limit_s = STOPPED_LIMIT_S if self._has_lease else SEND_TIMEOUT_S",
            "limit_s = SEND_TIMEOUT_S",
            "test_a_rank_with_a_lease_waits_for_a_controller_that_is_stopped",
        ),
    ),
    *of(
        "dora/node/supervise.py",
        "tests/node/test_supervise.py",
        (
            "cause-of-an-earlier-start-shown",
            "            self._log_begin = log.tell()\n",
            "",
            "test_the_line_in_which_a_process_says_why_it_ends_is_shown_not_what_others_add",
        ),
    ),
    *of(
        "dora/weights/store.py",
        "tests/weights/test_store.py",
        (
            "version-deleted-while-it-is-copied-not-lost",
            "        except StoreError:\n            self._require(version)\n            raise\n",
            "        except StoreError:\n            raise\n",
            "test_a_version_that_disappears_while_it_is_copied_is_lost_and_not_merely_uncopied",
        ),
    ),
    *of(
        "dora/transport/trainer_end.py",
        "tests/transport/test_ends.py",
        (
            "wake-up-of-a-thread-that-has-ended",
            "        if not self._called and self._fault is None:\n",
            "        if not self._called:\n",
            "test_a_rank_closes_while_its_thread_is_just_ending_after_a_fault",
        ),
    ),
    *of(
        "dora/observe/steps.py",
        "tests/observe/test_steps.py",
        (
            "groups-filtered-before-a-step-is-trained-again-forgotten",
            "        if step < self.next_step:\n            return 0\n",
            "",
            "test_groups_filtered_before_a_step_that_is_trained_again_belong_to_the_next_row",
        ),
    ),
    *of(
        "dora/observe/observed.py",
        "tests/observe/test_resumed.py",
        (
            "slots-of-a-replay-not-folded",
            "        self.slots.apply(state, event)\n",
            "        if not self.tokens._is_replay:\n            self.slots.apply(state, event)\n",
            "test_a_replay_knows_what_the_run_knew",
        ),
    ),
)
