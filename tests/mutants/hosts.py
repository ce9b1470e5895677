"""Mutations of checkpoints on several hosts, and of their copies."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, of

MUTANTS: Final[tuple[Mutant, ...]] = (
    *of(
        "dora/trainer/checkpoint.py",
        "tests/trainer/test_hosts.py",
        (
            "manifests-of-hosts-not-compared",
            "    if len({*digests} - {nothing}) > 1:",
            "    if False:",
            "test_a_host_with_the_checkpoint_of_another_run_is_not_believed_and_neither_is_the_other",
        ),
        (
            "name-of-a-checkpoint-not-compared",
            "    if manifest is None or path != folder_of(path.parent, step=manifest.step, chain=manifest.chain):",
            "    if manifest is None:",
            "test_both_with_the_checkpoint_of_another_history_under_this_name_do_not_believe_it",
        ),
        (
            "checkpoint-loaded-though-another-host-has-lost-it",
            "        if all(undamaged):",
            "        if not reason:",
            "test_a_checkpoint_that_one_host_has_lost_is_skipped_by_both[lose_the_folder-1]",
        ),
        (
            "checkpoint-set-aside-for-the-damage-of-another-host",
            "        if storage.is_first and not all(undamaged[rank] for rank in storage.here) and path.exists():",
            "        if storage.is_first and path.exists():",
            "test_a_checkpoint_that_one_host_has_lost_is_skipped_by_both[lose_the_folder-1]",
        ),
        (
            "checkpoint-not-written-again-where-a-host-lacks-it",
            '    if set(meeting.gather("has it" if has_it else "", what="a look for a checkpoint")) == {"has it"}:',
            '    if "has it" in meeting.gather("has it" if has_it else "", what="a look for a checkpoint"):',
            "test_a_checkpoint_that_one_host_alone_has_renamed_is_not_used_and_then_completed",
        ),
    ),
    *of(
        "dora/weights/checkpoints.py",
        "tests/trainer/test_hosts.py",
        (
            "folder-cleared-of-what-is-no-checkpoint",
            "        if path.name in names or not path.name.startswith(_PREFIXES):",
            "        if path.name in names:",
            "test_a_folder_is_cleared_of_all_checkpoints_but_those_that_are_named",
        ),
    ),
    *of(
        "dora/controller/trainer_link.py",
        "tests/controller/test_trainer_link.py",
        (
            "checkpoint-saved-before-all-hosts-have-it",
            "not all(self._start.written.values()):",
            "not self._start.written[0]:",
            "test_a_checkpoint_is_saved_when_every_folder_has_it",
        ),
        (
            "checkpoint-saved-before-it-is-copied",
            "        if self.keep is None:\n            await",
            "        if True:\n            await",
            "test_a_checkpoint_counts_once_it_is_copied_and_training_goes_on_meanwhile",
        ),
        (
            "checkpoint-that-was-not-copied-kept-by-its-hosts",
            "                if name != Path(reports[0].folder).name:",
            "                if False:",
            "test_a_checkpoint_counts_once_it_is_copied_and_training_goes_on_meanwhile",
        ),
    ),
    *of(
        "dora/controller/copies.py",
        "tests/controller/test_end.py",
        (
            "checkpoint-not-deleted-on-the-hosts-of-ranks",
            "        if self._drop_elsewhere is not None:",
            "        if False:",
            "test_a_run_that_was_copied_deletes_its_own_checkpoints_and_not_those_of_the_original",
        ),
    ),
    *of(
        "dora/app/checkpoint_time.py",
        "tests/app/test_checkpoint_time.py",
        (
            "checkpoint-slower-than-its-interval-accepted",
            "    if interval is not None and taken > interval:",
            "    if False:",
            "test_a_checkpoint_that_takes_longer_than_the_interval_is_refused_with_what_to_set",
        ),
    ),
)
