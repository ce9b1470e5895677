"""All mutations: those of durability, lineage, resume, access and episodes are here, those of other parts in files of
their own."""

from __future__ import annotations

from typing import Final

from tests.mutants import (
    adapters,
    core_in_flight,
    core_sharing,
    divided_rows,
    durability,
    episodes,
    first_use,
    foreign_files,
    hosts,
    limits,
    losses,
    models,
    nodes,
    recorded_calls,
    relay,
    replayed_experts,
    returned_experts,
    served_adapters,
    shared_observers,
    speculation,
    takeovers,
    templates,
    trust,
    users,
)
from tests.mutants.mutant import Mutant, of

_CORE: Final = (
    *of(
        "dora/core/on_run.py",
        "tests/core/test_failures.py",
        (
            "waiting-counted-from-before-a-restart",
            "    state.feed.idle_s = state.feed.uneven_s = 0.0  # counted anew",
            "    # counted anew",
            "test_the_trainers_idle_time_is_counted_from_a_restart_on_like_the_steps_duration",
        ),
    ),
)

_JOURNAL: Final = (
    *of(
        "dora/files.py",
        "tests/journal/test_files.py",
        (
            "fdatasync-left-out",
            "        os.fdatasync(descriptor)\n",
            "",
            "test_a_sync_that_the_system_refuses_is_an_error",
        ),
        (
            "replaced-file-not-synced",
            "        write_new(written, data)\n        sync(written)\n",
            "        write_new(written, data)\n",
            "test_a_replacement_is_synced_before_it_gets_the_name",
        ),
    ),
    *of(
        "dora/journal/frames.py",
        "tests/journal/test_commits.py",
        (
            "journal-not-synced",
            "            files.sync(self.path, self._file.fileno())",
            "            files.sync(self.path, self._file.fileno()) if 'tokens' in self.path.name else None",
            "test_a_waiter_continues_when_both_files_are_on_the_disk",
        ),
        (
            "tokens-not-synced",
            "            files.sync(self.path, self._file.fileno())",
            "            files.sync(self.path, self._file.fileno()) if 'journal' in self.path.name else None",
            "test_a_waiter_continues_when_both_files_are_on_the_disk",
        ),
        (
            "failed-sync-swallowed",
            '            raise JournalError(f"{self.path}: cannot be written: {reason}") from err',
            "            return",
            "test_after_a_failed_sync_no_waiter_continues_and_nothing_is_written",
        ),
    ),
    *of(
        "dora/journal/commits.py",
        "tests/journal/test_commits.py",
        (
            "journal-stored-before-tokens",
            "                    self._tokens.store(tokens)\n",
            "                    self._journal.store(journal)\n                    journal = b''\n"
            "                    self._tokens.store(tokens)\n",
            "test_a_waiter_continues_when_both_files_are_on_the_disk",
        ),
        (
            "stored-twice-after-a-full-disk",
            '                    self._taken[0] = (b"", journal)\n',
            "",
            "test_a_commit_waits_for_space_and_stores_each_record_once",
        ),
        (
            "a-full-disk-ends-the-run",
            "                except JournalFull:\n                    raise\n",
            "",
            "test_a_commit_waits_for_space_and_stores_each_record_once",
        ),
        (
            "durable-before-the-sync",
            "            await self._store_patiently()\n",
            "            self._reached(position)\n            await self._store_patiently()\n",
            "test_after_a_failed_sync_no_waiter_continues_and_nothing_is_written",
        ),
        (
            "written-on-after-a-failure",
            "        self._failed = True\n",
            "        pass\n",
            "test_after_a_failed_sync_no_waiter_continues_and_nothing_is_written",
        ),
        (
            "position-not-compared",
            "            if wanted <= self.position:\n",
            "            if True:\n",
            "test_a_callback_runs_when_its_position_is_reached_and_not_before",
        ),
    ),
    *of(
        "dora/journal/frames.py",
        "tests/journal/test_frames.py",
        (
            "torn-end-not-cut-off",
            "                files.truncate(path, reader.num_bytes)\n",
            "                pass\n",
            "test_a_file_truncated_anywhere_keeps_every_whole_frame_and_can_be_continued",
        ),
        (
            "damaged-middle-taken-for-a-torn-end",
            "                    self._require_end(file, offset)\n",
            "",
            "test_a_flipped_bit_in_front_of_a_whole_frame_is_an_error_that_names_file_and_offset",
        ),
        (
            "checksum-of-payload-not-compared",
            "        return length if not left and found == payload_crc else None",
            "        return length if not left else None",
            "test_a_damaged_last_frame_is_a_torn_end_whatever_its_bytes",
        ),
        (
            "name-of-new-file-not-synced",
            "            files.sync_folder(path.parent)\n",
            "            pass\n",
            "test_the_name_of_a_new_file_is_synced_before_anything_is_stored_in_it",
        ),
        (
            "deleted-file-written-to",
            "            if not os.fstat(self._file.fileno()).st_nlink:",
            "            if False:",
            "test_writing_to_a_deleted_file_is_an_error",
        ),
    ),
    *of(
        "dora/journal/tokens.py",
        "tests/journal/test_tokens.py",
        (
            "late-chunk-of-an-attempt-taken",
            "        if (writer := epoch << 32 | attempt) < self._latest.get(trajectory, 0):",
            "        if (writer := epoch << 32) < self._latest.get(trajectory, 0):",
            "test_a_chunk_of_an_older_attempt_is_ignored_once_a_newer_one_began",
        ),
        (
            "epoch-of-chunks-ignored",
            "        if (writer := epoch << 32 | attempt) < self._latest.get(trajectory, 0):",
            "        if (writer := attempt) < self._latest.get(trajectory, 0):",
            "test_a_chunk_replaces_an_earlier_controllers_tokens_from_its_position_on",
        ),
        (
            "start-of-chunks-ignored",
            "            answer.put(record, kind, start=start, count=count)",
            "            answer.put(record, kind, start=known, count=count)",
            "test_a_chunk_replaces_an_earlier_controllers_tokens_from_its_position_on",
        ),
        (
            "admission-does-not-begin-a-group-again",
            "            for known in (self._store.counts, self._answers, self._observed, self._choices):",
            "            for known in (self._observed, self._choices):",
            "test_a_group_that_is_admitted_again_starts_empty",
        ),
        (
            "gap-in-tokens-accepted",
            "        if start > known:",
            "        if False:",
            "test_missing_records_are_an_error_that_names_the_trajectory",
        ),
        (
            "tokens-gathered-past-a-commit",
            "        for trajectory in [*self._gathered]:\n",
            "        for trajectory in ():\n",
            "test_what_an_attempt_has_sampled_between_two_commits_is_one_record",
        ),
        (
            "tokens-of-two-attempts-in-one-record",
            "(gathered.attempt, gathered.end) != (attempt, start)",
            "gathered.end != start",
            "test_a_record_ends_where_another_attempt_position_or_kind_begins",
        ),
    ),
)

_ORDER: Final = (
    *of(
        "dora/controller/trainer_link.py",
        "tests/controller/test_trainer_link.py",
        (
            "wave-sent-without-waiting",
            "            await self.durable(position)\n",
            "",
            "test_a_wave_leaves_only_when_the_journal_is_on_the_disk",
        ),
        (
            "reports-of-another-history-believed",
            "        if chain != expected:",
            "        if False:",
            "test_output_of_another_history_ends_the_run",
        ),
    ),
    *of(
        "dora/controller/effects.py",
        "tests/crash/test_order.py",
        (
            "wave-waits-for-nothing",
            "self.trainer.train(self.lineage.add(wave), position=position)",
            "self.trainer.train(self.lineage.add(wave), position=0)",
            "test_waves_and_pushes_leave_after_their_cause_is_on_the_disk",
        ),
    ),
    *of(
        "dora/controller/orders.py",
        "tests/crash/test_order.py",
        (
            "push-without-waiting",
            "        self._begin(order, after=position)",
            "        self._begin(order)",
            "test_waves_and_pushes_leave_after_their_cause_is_on_the_disk",
        ),
    ),
    *of(
        "dora/controller/copies.py",
        "tests/crash/test_order.py",
        (
            "version-released-without-waiting",
            "        await self._commits.durable(position)\n        copy = self._copies",
            "        copy = self._copies",
            "test_deletions_and_metrics_follow_their_decision_on_the_disk",
        ),
        (
            "checkpoint-dropped-without-waiting",
            "        await self._commits.durable(position)\n        try:\n            await asyncio",
            "        try:\n            await asyncio",
            "test_deletions_and_metrics_follow_their_decision_on_the_disk",
        ),
        (
            "durable-version-pruned-without-waiting",
            "        await self._commits.durable(self._commits.written)  # including",
            "        # including",
            "test_deletions_and_metrics_follow_their_decision_on_the_disk",
        ),
    ),
    *of(
        "dora/controller/recorder.py",
        "tests/crash/test_order.py",
        (
            "metrics-row-written-at-once",
            "            self._then(position, partial(_write, row))",
            "            _write(row)",
            "test_deletions_and_metrics_follow_their_decision_on_the_disk",
        ),
        (
            "evaluation-row-written-at-once",
            '            row["pass_at_n"] = score.pass_at_n\n',
            '            row["pass_at_n"] = score.pass_at_n\n            position = 0\n',
            "test_deletions_and_metrics_follow_their_decision_on_the_disk",
        ),
    ),
    *of(
        "dora/controller/copies.py",
        "tests/controller/test_loop.py",
        (
            "keep-keeps-all",
            "        if not self._keep:\n            return\n",
            "        if self._keep != 1:\n            return\n",
            "test_the_newest_durable_versions_are_kept_as_configured",
        ),
        (
            "keep-keeps-one-too-few",
            "(self._window.newest or 0) - self._keep",
            "(self._window.newest or 0) - self._keep + 1",
            "test_the_newest_durable_versions_are_kept_as_configured",
        ),
    ),
    *of(
        "dora/core/training.py",
        "tests/core/test_training.py",
        (
            "checkpoint-dropped-one-too-early",
            "KEPT_CHECKPOINTS = 2",
            "KEPT_CHECKPOINTS = 1",
            "test_waves_are_kept_back_to_the_older_one_of_two_checkpoints",
        ),
        (
            "waves-of-the-newest-checkpoint-alone",
            "if s < min(self.checkpoints)]:",
            "if s < max(self.checkpoints)]:",
            "test_waves_are_kept_back_to_the_older_one_of_two_checkpoints",
        ),
    ),
)

_RESUME: Final = (
    *of(
        "dora/app/resume.py",
        "tests/crash/test_trust.py",
        (
            "token-counts-not-compared",
            "    if found < known or (is_exact and found != known):",
            "    if False:",
            "test_a_token_count_that_differs_from_the_journal_is_refused",
        ),
        (
            "surplus-of-tokens-accepted",
            "    if found < known or (is_exact and found != known):",
            "    if found < known:",
            "test_a_token_count_that_differs_from_the_journal_is_refused",
        ),
        (
            "prompts-not-compared",
            "    if prompt is None or prompt.digest != known.digest:",
            "    if prompt is None:",
            "test_other_data_under_the_same_name_is_refused",
        ),
        (
            "changes-accepted-unasked",
            "if change.alters_experiment and not is_accepted]:",
            "if False]:",
            "test_a_change_that_alters_the_experiment_must_be_accepted",
        ),
        (
            "changes-not-listed",
            "    return tuple(str(change) for change in found)",
            "    return ()",
            "test_an_operational_change_needs_no_consent_but_is_reported_and_recorded",
        ),
        (
            "settings-of-decisions-may-change",
            "    if fixed:\n",
            "    if False:\n",
            "test_settings_that_decisions_depend_on_cannot_change",
        ),
        (
            "steps-trained-again-under-other-settings",
            "        if lineage_settings(before := _parse(text)) != settings:",
            "        if lineage_settings(before := _parse(text)) is None:",
            "test_steps_that_must_be_trained_again_are_trained_as_they_were",
        ),
        (
            "unknown-version-adopted",
            "    if aside := store.set_aside(known):",
            "    if aside := []:",
            "test_a_version_that_the_journal_does_not_know_is_set_aside",
        ),
        (
            "damaged-versions-not-looked-for",
            "        for path in store.damaged(version):",
            "        for path in []:",
            "test_a_damaged_copy_of_a_version_is_deleted_and_recomputed",
        ),
        (
            "unknown-checkpoint-left-in-place",
            '            aside.append(str(checkpoints.set_aside(path, why="aside")))',
            "            pass",
            "test_a_checkpoint_that_the_journal_does_not_know_is_set_aside",
        ),
        (
            "checkpoint-of-another-chain-used",
            "        elif (manifest.step, manifest.chain) != (step, chain):",
            "        elif manifest.step != step:",
            "test_a_checkpoint_of_another_history_is_set_aside_for_an_older_one",
        ),
        (
            "start-behind-a-lost-version",
            "        if not kept[step] or step > latest:",
            "        if not kept[step]:",
            "test_missing_versions_are_recomputed_from_an_older_checkpoint",
        ),
        (
            "epoch-used-twice",
            "default=-1) + 1,",
            "default=0),",
            "test_an_unchanged_run_continues_under_a_new_epoch",
        ),
        (
            "altered-journal-continued",
            "    if found.difference is not None:",
            "    if False:",
            "test_a_journal_that_was_altered_is_not_continued",
        ),
    ),
    *of(
        "dora/config/changes.py",
        "tests/crash/test_trust.py",
        (
            "no-change-alters-the-experiment",
            "        return not is_operational(",
            "        return False and not is_operational(",
            "test_a_change_that_alters_the_experiment_must_be_accepted",
        ),
    ),
    *of(
        "dora/app/opening.py",
        "tests/crash/test_trust.py",
        (
            "another-model-accepted",
            "        if recorded.base_chain not in (None, model_chain):",
            "        if False:",
            "test_another_model_is_refused",
        ),
        (
            "fence-not-raised",
            "        raise_fence(folder.fence, epoch=self.term)  # before",
            "        # before",
            "test_an_unchanged_run_continues_under_a_new_epoch",
        ),
        (
            "changes-not-recorded",
            "Epoch(job.epoch, job.started_at, dump(job.config), job.changes)",
            "Epoch(job.epoch, job.started_at, dump(job.config))",
            "test_an_operational_change_needs_no_consent_but_is_reported_and_recorded",
        ),
    ),
    *of(
        "dora/weights/store.py",
        "tests/crash/test_trust.py",
        (
            "known-number-with-other-bytes-adopted",
            "(manifest.files, manifest.chain) == known.get(version):",
            "version in known:",
            "test_a_version_with_other_bytes_than_in_the_journal_is_set_aside_and_recomputed",
        ),
    ),
    *of(
        "dora/cli/run.py",
        "tests/controller/test_resume.py",
        (
            "lock-not-taken-before-reading",
            "            held.enter_context(hold_run(own.lock))",
            "            pass",
            "test_a_run_locked_by_another_process_is_not_read",
        ),
    ),
    *of(
        "dora/node/lease.py",
        "tests/node/test_lease.py",
        (
            "lock-shared",
            "        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)",
            "        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)",
            "test_a_held_lease_cannot_be_taken_again",
        ),
    ),
    *of(
        "dora/journal/run_folder.py",
        "tests/node/test_lease.py",
        (
            "lease-shared-with-the-next-controller",
            'f"lease-{epoch}-{os.getpid()}"',
            'f"lease-{epoch}"',
            "test_a_child_stopped_across_a_resume_does_not_take_the_next_controller_for_its_own[0]",
        ),
    ),
)

_LINEAGE: Final = (
    *of(
        "dora/controller/lineage.py",
        "tests/controller/test_lineage.py",
        (
            "chain-without-settings",
            "parent.encode() + self._settings,",
            "parent.encode(),",
            "test_a_chain_is_a_digest_of_the_chain_before_the_settings_and_the_waves",
        ),
        (
            "chain-without-parent",
            "parent.encode() + self._settings,",
            "self._settings,",
            "test_a_chain_is_a_digest_of_the_chain_before_the_settings_and_the_waves",
        ),
        (
            "chain-without-waves",
            "            _digest_batch(self._digest, batch)\n",
            "            pass\n",
            "test_a_chain_is_a_digest_of_the_chain_before_the_settings_and_the_waves",
        ),
        (
            "chain-of-the-last-wave-alone",
            "        if first.index == 0:",
            "        if True:",
            "test_a_chain_is_a_digest_of_the_waves_of_its_step_from_the_first",
        ),
        (
            "chain-of-shapes-alone",
            '            digest.update(little.data if little.size else b"")\n',
            "",
            "test_every_field_of_a_wave_is_in_the_chain",
        ),
        (
            "replay-with-another-chain-accepted",
            "        if chain != known:",
            "        if False:",
            "test_training_a_step_again_on_different_data_ends_the_run",
        ),
        (
            "waves-do-not-name-their-history",
            "replace(batch, parent=parent, chain=chain)",
            "replace(batch, chain=chain)",
            "test_every_wave_names_the_chain_before_its_step_and_the_last_one_the_chain_with_it",
        ),
    ),
    *of(
        "dora/trainer/step.py",
        "tests/trainer/test_history.py",
        (
            "wave-of-another-parent-trained",
            "        if batch.parent != self._chain:",
            "        if False:",
            "test_a_wave_of_another_history_is_not_trained",
        ),
    ),
    *of(
        "dora/trainer/publish.py",
        "tests/trainer/test_history.py",
        (
            "other-bytes-of-a-replay-not-reported",
            'checksum_of_files(made) if replayed and made != manifest.files else ""',
            '""',
            "test_a_version_recomputed_with_other_bytes_keeps_the_first_and_reports_the_difference",
        ),
    ),
    *of(
        "dora/engine/names.py",
        "tests/controller/test_published.py",
        (
            "label-without-digest",
            'f"{run_id}/{version}-{digest}"',
            'f"{run_id}/{version}"',
            "test_a_label_names_the_bytes_of_its_version",
        ),
    ),
    *of(
        "dora/controller/published.py",
        "tests/controller/test_published.py",
        (
            "digest-of-labels-ignored",
            "self._digests or self.label(version) != label:",
            "self._digests:",
            "test_a_label_names_the_bytes_of_its_version",
        ),
        (
            "lost-version-taken-back-with-other-bytes",
            "        if self._files.setdefault(version, files) != files and is_needed:",
            "        if False:",
            "test_a_version_rewritten_with_other_bytes_ends_the_run_if_answers_need_it",
        ),
        (
            "lost-version-not-waited-for",
            "            await self._missing[version].wait()",
            "            return",
            "test_a_lost_version_is_awaited_until_it_is_written_again",
        ),
    ),
    *of(
        "dora/weights/store.py",
        "tests/weights/test_store.py",
        (
            "fence-not-asked-by-the-store",
            "    fence()\n    while",
            "    while",
            "test_a_process_of_a_controller_that_was_replaced_makes_no_version_visible",
        ),
        (
            "version-visible-before-its-bytes-are-synced",
            "        files.sync_folder(path) if path.is_dir() else files.sync(path)\n",
            "        pass\n",
            "test_every_byte_of_a_version_is_on_the_disk_before_it_is_visible",
        ),
        (
            "damaged-copy-of-a-version-not-deleted",
            "                _delete(path)\n                found",
            "                found",
            "test_a_copy_that_does_not_match_its_checksums_is_deleted_and_named",
        ),
        (
            "published-version-overwritten",
            "        if (existing := self._find(version)) is not None:",
            "        if (existing := None) is not None:",
            "test_a_version_that_is_only_durable_keeps_its_first_bytes_too",
        ),
        (
            "copy-not-read-back",
            "                if checksum_of(copy / name) != checksum:",
            "                if False:",
            "test_a_live_version_whose_bytes_changed_is_never_copied",
        ),
    ),
    *of(
        "dora/trainer/checkpoint.py",
        "tests/trainer/test_checkpoint.py",
        (
            "fence-not-asked-by-checkpoints",
            "            storage.fence()\n            files.remove(target)",
            "            files.remove(target)",
            "test_a_rank_of_a_replaced_controller_makes_no_checkpoint_visible",
        ),
        (
            "checkpoint-not-synced",
            "        files.wrote(path)\n        files.sync(path)\n",
            "        files.wrote(path)\n",
            "test_every_byte_of_a_checkpoint_is_on_the_disk_before_it_is_visible",
        ),
        (
            "damaged-checkpoint-loaded",
            "    if state_hash(stored) != manifest.state_checksums[rank]:",
            "    if False:",
            "test_a_damaged_checkpoint_is_skipped_and_set_aside[flip_a_byte-does not match its checksum]",
        ),
        (
            "damaged-checkpoint-not-passed-over",
            "            reason = str(err)\n",
            "            raise\n",
            "test_a_damaged_checkpoint_is_skipped_and_set_aside",
        ),
    ),
    *of(
        "dora/journal/audit_lineage.py",
        "tests/journal/test_audit_lineage.py",
        (
            "audit-ignores-the-chain-of-steps",
            "    if event.chain != known:",
            "    if False:",
            "test_a_step_trained_again_with_another_chain_is_named",
        ),
        (
            "audit-ignores-the-chain-of-versions",
            "    expected = t.chains.get(version - 1, event.chain)",
            "    expected = event.chain",
            "test_a_version_of_another_chain_than_its_step_is_named",
        ),
        (
            "audit-ignores-the-chain-of-checkpoints",
            "    expected = t.chains.get(event.step - 1, event.chain)",
            "    expected = event.chain",
            "test_a_checkpoint_of_another_chain_is_named",
        ),
        (
            "audit-ignores-other-bytes-of-a-replay",
            "        if t.settings.deterministic:",
            "        if False:",
            "test_other_bytes_of_a_replay_are_counted_and_a_violation_where_the_trainer_is_deterministic",
        ),
        (
            "audit-ignores-other-bytes-served",
            "    if is_other and version in t.stored:",
            "    if False:",
            "test_a_version_served_with_other_bytes_than_it_was_published_with_is_named",
        ),
        (
            "audit-calls-other-bytes-of-a-released-version-served",
            "    if is_other and version in t.stored:",
            "    if is_other:",
            "test_other_bytes_of_a_replay_are_counted_if_the_version_was_released",
        ),
        (
            "audit-ignores-deleted-checkpoints",
            "    if order.step not in t.checkpoints or newer < KEPT_CHECKPOINTS:",
            "    if order.step not in t.checkpoints:",
            "test_a_checkpoint_deleted_while_fewer_than_two_newer_ones_are_kept_is_named",
        ),
    ),
    *of(
        "dora/journal/deep.py",
        "tests/journal/test_deep.py",
        (
            "a-deep-check-of-nothing-is-ok",
            "        return self.has_confirmed and not self.violations",
            "        return not self.violations",
            "test_a_check_that_compared_nothing_is_not_ok_and_says_why",
        ),
        (
            "a-deep-check-sees-only-the-next-version",
            "for n in (version - 1, version + 1) if n >= 0}",
            "for n in (version + 1,) if n >= 0}",
            "test_trajectories_sampled_by_a_neighbor_are_flagged_and_only_they",
        ),
        (
            "a-deep-check-takes-a-random-walk-for-evidence",
            "needed=max(DECISIVE, DEVIATIONS * walk)",
            "needed=DECISIVE",
            "test_a_neighbor_that_only_rounds_anew_is_not_told_apart",
        ),
        (
            "a-deep-check-ignores-who-continued-an-answer",
            "any(n.foreign or n.evidence <= -n.needed for n in self.neighbors)",
            "any(n.evidence <= -n.needed for n in self.neighbors)",
            "test_one_answer_among_many_that_a_neighbor_continued_is_named_with_its_tokens",
        ),
    ),
    *of(
        "dora/cli/run.py",
        "tests/e2e/test_exit_codes.py",
        (
            "exit-code-0-of-a-run-with-violations",
            "    if outcome.violations:",
            "    if False:",
            "test_an_outcome_that_is_not_good_has_an_exit_code_of_its_own",
        ),
    ),
    *of(
        "dora/cli/audit.py",
        "tests/e2e/test_exit_codes.py",
        (
            "exit-code-0-of-an-audit-with-violations",
            "    if is_violated:",
            "    if False:",
            "test_an_audit_that_finds_a_violation_exits_with_3",
        ),
    ),
)

_ACCESS: Final = (
    *of(
        "dora/controller/effects.py",
        "tests/controller/test_effects.py",
        (
            "request-ids-without-the-epoch",
            "request_id(self.run_id, epoch=self.epoch,",
            "request_id(self.run_id, epoch=0,",
            "test_requests_of_two_controllers_have_different_ids",
        ),
        (
            "broken-stream-taken-for-a-lost-server",
            "            server_gone = not await self._is_as_it_was(order.instance)",
            "            server_gone = True",
            "test_a_broken_stream_does_not_lose_a_healthy_server",
        ),
        (
            "server-started-again-taken-for-the-same",
            "        return label is not None and self.fleet.is_known(label, instance=instance)",
            "        return label is not None",
            "test_a_server_that_was_started_again_under_a_stream_is_lost_with_its_weights",
        ),
        (
            "final-refusal-retried",
            "            is_final = isinstance(err, RequestRefused) and not err.retryable",
            "            is_final = False",
            "test_a_refusal_that_the_next_server_would_repeat_is_final",
        ),
    ),
    *of(
        "dora/controller/trajectories.py",
        "tests/controller/test_trajectories.py",
        (
            "tokens-of-an-old-attempt-taken",
            "        if record is None or record.attempt != attempt:",
            "        if record is None:",
            "test_tokens_of_an_older_attempt_are_refused",
        ),
    ),
    *of(
        "dora/embedded/server.py",
        "tests/embedded/test_guard.py",
        (
            "key-of-an-engine-not-demanded",
            "    if key is not None and request.path",
            "    if False and request.path",
            "test_a_caller_without_the_key_changes_nothing_and_running_requests_continue[None]",
        ),
    ),
    *of(
        "dora/guard.py",
        "tests/status/test_endpoint.py",
        (
            "origin-not-looked-at",
            '    if headers.get("Origin") not in own or headers',
            "    if headers",
            "test_a_request_of_another_sites_page_is_refused_even_with_the_token",
        ),
        (
            "any-host-taken",
            '    return 421, "the Host',
            '    return None and 421, "the Host',
            "test_a_page_that_rebinds_its_name_to_this_machine_reads_nothing",
        ),
        (
            "forms-taken",
            '        if refusal is None and request.body_exists and request.content_type != "application/json":',
            "        if False:",
            "test_a_request_of_another_sites_page_is_refused_even_with_the_token",
        ),
    ),
    *of(
        "dora/status/server.py",
        "tests/status/test_endpoint.py",
        (
            "status-token-not-demanded",
            "        if not knows(self.token, request.headers):",
            "        if False:",
            "test_a_request_without_the_token_is_refused_and_changes_nothing",
        ),
    ),
    *of(
        "dora/engine/sglang/client.py",
        "tests/engine/test_client.py",
        (
            "key-sent-to-other-servers",
            "        key = self.keys.get(url, self._api_key)",
            "        key = next(iter(self.keys.values()), self._api_key)",
            "test_the_key_of_one_server_is_sent_to_no_other",
        ),
        (
            "key-follows-a-redirect",
            "headers=self._headers(url), allow_redirects=False",
            "headers=self._headers(url)",
            "test_the_api_key_is_sent_and_never_follows_a_redirect",
        ),
    ),
    *of(
        "dora/app/managed.py",
        "tests/e2e/test_ports.py",
        (
            "one-key-for-every-start",
            "        key = self._api_key or draw_key()",
            "        key = self._api_key = self._api_key or draw_key()",
            "test_every_start_of_a_server_has_a_key_of_its_own",
        ),
    ),
    *of(
        "dora/journal/access.py",
        "tests/journal/test_access.py",
        (
            "run-folder-open-to-all",
            "    folder.chmod(0o700 if group is None else 0o2750)",
            "    folder.chmod(0o755 if group is None else 0o2750)",
            "test_a_run_folder_is_closed_to_others_under_any_umask",
        ),
    ),
    *of(
        "dora/node/plan.py",
        "tests/node/test_plan.py",
        (
            "children-inherit-secrets",
            'for key, value in environ.items() if not key.startswith("DORA_")}',
            "for key, value in environ.items()}",
            "test_a_child_gets_the_environment_without_our_own_variables_and_what_it_needs",
        ),
    ),
    *of(
        "dora/transport/curve.py",
        "tests/transport/test_strangers.py",
        (
            "curve-off",
            "    router.setsockopt(zmq.CURVE_SECRETKEY, _controller_key(token))\n"
            "    router.setsockopt(zmq.CURVE_SERVER, 1)\n"
            "    _limit(router, MAX_TO_CONTROLLER_BYTES)\n\n\n"
            "def guard_trainer(dealer: zmq.Socket[Any], token: str, *, max_bytes: int = MAX_TO_TRAINER_BYTES)"
            " -> None:\n"
            '    """Connect only to a holder of the token; call before `connect`."""\n'
            "    dealer.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(_controller_key(token)))\n"
            "    public, secret = zmq.curve_keypair()\n"
            "    dealer.setsockopt(zmq.CURVE_PUBLICKEY, public)\n"
            "    dealer.setsockopt(zmq.CURVE_SECRETKEY, secret)\n",
            "    _limit(router, MAX_TO_CONTROLLER_BYTES)\n\n\n"
            "def guard_trainer(dealer: zmq.Socket[Any], token: str, *, max_bytes: int = MAX_TO_TRAINER_BYTES)"
            " -> None:\n",
            "test_a_wrong_token_is_named_on_both_ends_and_logged_once",
        ),
        (
            "same-keys-for-every-token",
            "hashlib.scrypt(token.encode(),",
            'hashlib.scrypt(b"",',
            "test_a_wrong_token_is_named_on_both_ends_and_logged_once",
        ),
        (
            "handshakes-without-an-end",
            "    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)",
            "    socket.setsockopt(zmq.HANDSHAKE_IVL, 0)",
            "test_idle_connections_are_closed_after_the_time_limit_of_a_handshake",
        ),
    ),
    *of(
        "dora/transport/curve.py",
        "tests/transport/test_broken_ranks.py",
        (
            "frames-without-a-limit",
            "    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes + CURVE_BYTES)",
            "    socket.setsockopt(zmq.MAXMSGSIZE, -1)",
            "test_a_frame_beyond_the_limit_closes_the_connection_even_of_a_holder_of_the_token",
        ),
    ),
    *of(
        "dora/tasks/guard.py",
        "tests/tasks/test_pool.py",
        (
            "what-a-grader-started-lives-on",
            "    _kill_descendants()\n    _exit_like",
            "    _exit_like",
            "test_what_a_grader_started_in_other_sessions_ends_with_it",
        ),
    ),
    *of(
        "dora/controller/episodes.py",
        "tests/environments/test_episode_replays.py",
        (
            "replays-not-compared",
            "    is_same = episode.tokens[start:] == record.tokens[start:end]",
            "    is_same = True",
            "test_an_environment_that_answers_in_another_way_has_failed",
        ),
        (
            "replays-without-consent",
            "        if record.observed and not self._pool.can_replay:",
            "        if False:",
            "test_an_environment_that_cannot_be_replayed_is_called_once",
        ),
    ),
    *of(
        "dora/app/resume.py",
        "tests/controller/test_resume.py",
        (
            "observation-without-its-event",
            "        end = trajectory.num_tokens if has_unknown else len(answer.tokens)",
            "        end = len(answer.tokens)",
            "test_what_a_call_gave_is_not_known_without_its_event",
        ),
    ),
    *of(
        "dora/core/admission.py",
        "tests/core/test_calls.py",
        (
            "more-episodes-than-room",
            "    if not state.hosts_have_room(state.settings.group_size):",
            "    if False:",
            "test_groups_are_admitted_while_the_hosts_have_room_for_all_unfinished_episodes",
        ),
    ),
    *of(
        "dora/environments/pool.py",
        "tests/environments/test_environment_pool.py",
        (
            "prompts-dilute-failures",
            "            if known.was_answered:  # otherwise the environment has only given a prompt",
            "            if True:",
            "test_what_only_gives_a_prompt_does_not_dilute_the_failures",
        ),
    ),
    *of(
        "dora/environments/failures.py",
        "tests/environments/test_environment_pool.py",
        (
            "every-episode-of-a-lost-host-counts",
            "            if source in death.sources:\n",
            "            if False:\n",
            "test_a_lost_host_is_one_failure_of_a_source_and_is_logged",
        ),
    ),
    *of(
        "dora/tasks/child.py",
        "tests/tasks/test_pool.py",
        (
            "graders-inherit-tokens",
            ' for name, value in os.environ.items() if not name.startswith("DORA_")}',
            " for name, value in os.environ.items()}",
            "test_graders_inherit_neither_sockets_nor_tokens",
        ),
    ),
    *of(
        "dora/environments/process.py",
        "tests/environments/test_environment_pool.py",
        (
            "a-host-that-hangs-lives-on",
            '            self._lose(f"killed, because a call did not return within {limit_s:g} s")\n',
            "",
            "test_a_call_that_cannot_be_left_costs_the_host_and_names_itself",
        ),
        (
            "every-row-is-blamed-for-a-host",
            "is_own=not self._was_calling",
            "is_own=True",
            "test_a_row_is_not_blamed_for_a_host_that_died_in_a_call_of_another",
        ),
    ),
    *of(
        "dora/environments/pool.py",
        "tests/environments/test_environment_pool.py",
        (
            "a-cancelled-wait-keeps-its-place",
            "                self._leave(turn.result(), host=None)\n            else:",
            "                pass\n            else:",
            "test_a_cancelled_wait_takes_no_place",
        ),
        (
            "a-host-keeps-its-stuck-threads",
            "(host.num_episodes or not host.num_stuck)",
            "True",
            "test_a_host_with_many_stuck_threads_takes_no_more_episodes_and_is_replaced_when_it_is_empty",
        ),
    ),
    *of(
        "dora/environments/host.py",
        "tests/environments/test_environment_pool.py",
        (
            "output-without-a-limit",
            "            if len(data) > limit:",
            "            if False:",
            "test_long_output_is_cut_with_a_mark_that_the_model_sees",
        ),
        (
            "a-call-that-is-closed-goes-on",
            "            episode.call.cancel()\n",
            "            return\n",
            "test_a_cancelled_call_ends_its_episode_and_leaves_no_reply_behind",
        ),
    ),
)

#: Bugs that the crash points found, each with the point that shows it.
_FOUND: Final = tuple(
    Mutant(name, file, old, new, (f"tests/crash/test_found.py::{test}",))
    for name, file, old, new, test in (
        (
            "finished-before-its-result-is-kept",
            "dora/controller/loop.py",
            "            await self._orders.copies.keep_result(event)\n",
            "            pass\n",
            "test_a_run_that_the_journal_calls_finished_has_its_result_on_the_disk",
        ),
        (
            "finished-without-the-lost-result",
            "dora/core/decide.py",
            "    if result in state.missing:\n        return",
            "    if False:\n        return",
            "test_a_result_that_was_lost_before_its_evaluation_ended_is_recomputed_first",
        ),
        (
            "deletion-of-a-version-not-synced",
            "dora/weights/store.py",
            "        files.sync_folder(path.parent)  # else",
            "        pass  # else",
            "test_no_power_failure_leaves_half_a_version_or_checkpoint_under_its_name",
        ),
        (
            "deletion-of-a-checkpoint-not-synced",
            "dora/weights/checkpoints.py",
            "    files.sync_folder(folder.parent)  # else",
            "    # else",
            "test_no_power_failure_leaves_half_a_version_or_checkpoint_under_its_name",
        ),
        (
            "what-is-read-not-synced",
            "dora/journal/frames.py",
            "            files.sync(path)  # later records",
            "            # later records",
            "test_what_a_resume_has_read_survives_a_power_failure",
        ),
        (
            "names-that-are-found-not-synced",
            "dora/weights/store.py",
            "            files.sync_folder(root)  # later steps rely on the names found here",
            "            # later steps rely on the names found here",
            "test_the_result_survives_a_power_failure_even_if_the_process_that_copied_it_was_killed",
        ),
        (
            "half-deleted-checkpoint-comes-back",
            "dora/weights/checkpoints.py",
            "    files.sync_folder(parent)  # else",
            "    # else",
            "test_what_a_kill_left_half_deleted_does_not_come_back_by_a_power_failure",
        ),
        (
            "finished-rollouts-resumed",
            "dora/app/resume.py",
            "(recorded.rollout_only or steps <= recorded.settings.steps)",
            "(steps <= recorded.settings.steps)",
            "test_a_finished_run_of_rollouts_is_not_resumed",
        ),
        (
            "live-copies-not-looked-at",
            "dora/weights/store.py",
            "        for root in (self._memory, self._durable):\n",
            "        for root in (self._durable,):\n",
            "test_a_kill_loses_no_version",
        ),
        (
            "metrics-not-synced-at-the-end",
            "dora/files.py",
            "                sync(self.path, self._file.fileno())\n",
            "                pass\n",
            "test_a_power_failure_after_the_end_of_a_run_leaves_its_metrics",
        ),
        (
            "name-of-a-run-folder-not-synced",
            "dora/journal/run_folder.py",
            "            files.sync_folder(self.root.parent)\n",
            "",
            "test_the_name_of_a_new_run_folder_is_synced_before_the_run_begins",
        ),
        (
            "fence-raised-after-a-look-at-the-folder",
            "dora/app/opening.py",
            "        raise_fence(folder.fence, epoch=self.term)  # before reading anything that an old rank could "
            "still change\n        model_chain = base_chain(weights_digest(job.inputs))\n"
            "        self.start = self._restore(model_chain)  #: where the trainer starts\n",
            "        model_chain = base_chain(weights_digest(job.inputs))\n"
            "        self.start = self._restore(model_chain)\n"
            "        raise_fence(folder.fence, epoch=self.term)\n",
            "test_a_rank_of_an_older_controller_publishes_nothing_into_a_resumed_run",
        ),
    )
)

_EPISODES: Final = (
    *of(
        "dora/core/on_calls.py",
        "tests/core/test_calls.py",
        (
            "call-made-again-after-a-restart",
            "    elif replayable:\n",
            "    elif True:\n",
            "test_a_call_without_a_result_fails_with_the_controller_unless_it_can_be_repeated",
        ),
        (
            "late-result-of-a-call-taken",
            "trajectory is None or trajectory.attempt != event.attempt or trajectory.phase is not _CALLING",
            "trajectory is None or trajectory.phase is not _CALLING",
            "test_a_late_or_repeated_result_changes_nothing",
        ),
        (
            "slot-kept-for-nothing",
            "        hold(state, trajectory, kept)\n    else:\n        _hold_for_a_while(state, trajectory, kept)\n",
            "        hold(state, trajectory, kept)\n    else:\n        hold(state, trajectory, None)\n",
            "test_a_slot_is_kept_for_the_time_that_a_prefill_elsewhere_would_cost_all_slots",
        ),
    ),
    *of(
        "dora/core/patience.py",
        "tests/core/test_calls.py",
        (
            "last-instance-given-away-at-once",
            "    if state.now - entry.quiet_since < patience_s(state, entry):\n",
            "    if False:\n",
            "test_a_trajectory_that_comes_back_within_the_patience_keeps_the_instance",
        ),
        (
            "version-in-need-waits-for-ever",
            "    return is_due or state.now - since >= patience_s(state, entry)",
            "    return False",
            "test_a_version_in_need_is_given_the_next_vacant_instance_of_the_newest_which_stops_admitting",
        ),
    ),
    *of(
        "dora/journal/audit_calls.py",
        "tests/journal/test_audit_calls.py",
        (
            "audit-ignores-a-call-made-twice",
            "        answer.intent = False\n",
            "",
            "test_a_call_made_twice_is_named",
        ),
        (
            "audit-lets-every-call-be-repeated",
            "        elif trajectory in event.replayable:\n",
            "        elif True:\n",
            "test_a_new_controller_repeats_only_calls_that_can_be_repeated",
        ),
    ),
    *of(
        "dora/environments/episode.py",
        "tests/environments/test_episode_rows.py",
        (
            "observations-trained",
            "        self.mask.extend(bytes(len(added)))\n",
            '        self.mask.extend(b"\\x01" * len(added))\n',
            "test_a_sampled_end_token_is_trained_and_the_same_token_of_a_template_is_not",
        ),
        (
            "sampled-tokens-made-again-from-text",
            "self._extended(conversation, matching) or self._rendered(conversation, matching)",
            "self._rendered(conversation, matching)",
            "test_going_back_continues_the_sampled_tokens_themselves",
        ),
        (
            "observation-without-room-for-a-turn",
            "        room = max(0, bound - len(self.tokens) - 1)\n",
            "        room = max(0, bound - len(self.tokens))\n",
            "test_an_observation_is_cut_so_that_one_token_can_follow",
        ),
    ),
    *of(
        "dora/journal/rows.py",
        "tests/environments/test_episode_rows.py",
        (
            "repeated-tokens-trained-again",
            "                    mask=bytearray(keep) + mask[own],\n",
            "                    mask=bytearray(b'\\x01' * keep) + mask[own],\n",
            "test_each_sampled_token_is_trained_once_after_what_it_saw_however_the_conversation_changes",
        ),
    ),
    *of(
        "dora/trainer/batch.py",
        "tests/trainer/test_row.py",
        (
            "turns-counted-anew-in-each-row",
            "    firsts = firsts_of(batch)\n    before",
            "    firsts = np.arange(len(batch.lengths))\n    before",
            "test_turns_are_counted_over_all_rows_of_a_trajectory",
        ),
    ),
    *of(
        "dora/trainer/packing.py",
        "tests/trainer/test_row.py",
        (
            "rows-of-an-episode-in-several-passes",
            "    found = [part for part in owned.values() if len(part) > 1]\n",
            "    found: list[list[int]] = []\n",
            "test_sequences_of_one_owner_are_in_one_pass_whatever_the_budget",
        ),
    ),
)

MUTANTS: Final = (
    *(*_CORE, *_JOURNAL, *_ORDER, *_RESUME, *_LINEAGE, *_ACCESS, *_EPISODES, *_FOUND),
    *core_in_flight.MUTANTS,
    *core_sharing.MUTANTS,
    *shared_observers.MUTANTS,
    *adapters.MUTANTS,
    *served_adapters.MUTANTS,
    *recorded_calls.MUTANTS,
    *speculation.MUTANTS,
    *durability.MUTANTS,
    *episodes.MUTANTS,
    *first_use.MUTANTS,
    *foreign_files.MUTANTS,
    *hosts.MUTANTS,
    *limits.MUTANTS,
    *divided_rows.MUTANTS,
    *losses.MUTANTS,
    *models.MUTANTS,
    *nodes.MUTANTS,
    *takeovers.MUTANTS,
    *templates.MUTANTS,
    *relay.MUTANTS,
    *replayed_experts.MUTANTS,
    *returned_experts.MUTANTS,
    *trust.MUTANTS,
    *users.MUTANTS,
)
