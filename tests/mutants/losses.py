"""Mutations of what happens when the trainer is lost: incarnations, the bound, and what replaced ranks may still do."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, of

MUTANTS: Final[tuple[Mutant, ...]] = (
    *of(
        "dora/core/on_training.py",
        "tests/core/test_lost_trainer.py",
        (
            "late-loss-believed",
            "    if event.incarnation != feed.incarnation:\n",
            "    if False:\n",
            "test_what_an_earlier_start_says_late_changes_nothing",
        ),
        (
            "losses-without-a-bound",
            "    if feed.losses > len(RESTART_PAUSES_S):\n",
            "    if False:\n",
            "test_after_some_losses_in_a_row_the_run_ends_and_can_be_resumed",
        ),
        (
            "run-that-gave-up-cannot-be-resumed",
            '        state.stalled = True\n        fail(state, f"the trainer was lost',
            '        fail(state, f"the trainer was lost',
            "test_after_some_losses_in_a_row_the_run_ends_and_can_be_resumed",
        ),
        (
            "loss-counts-as-silence",
            "    feed.lost()\n    state.counters.trainer_losses += 1\n    state.progress_at = state.now\n",
            "    feed.lost()\n    state.counters.trainer_losses += 1\n",
            "test_a_loss_gives_the_ranks_the_time_without_progress_anew",
        ),
    ),
    *of(
        "dora/core/steps.py",
        "tests/core/test_lost_trainer.py",
        (
            "losses-never-forgiven",
            "    state.feed.losses = 0\n",
            "",
            "test_a_step_that_is_trained_for_the_first_time_forgives_the_losses_before_it",
        ),
    ),
    *of(
        "dora/controller/trainer_link.py",
        "tests/controller/test_lost_trainer.py",
        (
            "lost-checkpoint-waited-for",
            "(self._checkpoint, self._start.lost)]",
            "(self._checkpoint,)]",
            "test_a_checkpoint_that_lost_ranks_cannot_write_is_not_waited_for",
        ),
        (
            "final-failure-repeated",
            "                    if message.is_final:\n",
            "                    if False:\n",
            "test_a_failure_that_would_come_again_ends_the_run",
        ),
    ),
    *of(
        "dora/controller/trainer_link.py",
        "tests/controller/test_trainer_link.py",
        (
            "checkpoint-awaited-from-copies",
            "                    if rank < (order.settings.shard_ranks or found):",
            "                    if rank < found:",
            "test_a_node_with_copies_of_the_weights_reports_no_checkpoint",
        ),
    ),
    *of(
        "dora/controller/trainer_link.py",
        "tests/controller/test_lost_trainer.py",
        (
            "wave-for-all-ranks-though-fewer-are-left",
            "spread(wave, num_ranks=start.num_ranks,",
            "spread(wave, num_ranks=self.num_ranks,",
            "test_fewer_ranks_train_all_parts_of_a_wave",
        ),
        (
            "replaced-node-never-trains-again",
            "        is_needed = not self._is_ending and message.step < self._start.steps",
            "        is_needed = False",
            "test_ranks_that_should_start_again_do_so_after_a_checkpoint",
        ),
    ),
    *of(
        "dora/trainer/step.py",
        "tests/trainer/test_independent.py",
        (
            "norm-counts-every-copy",
            "dist.all_reduce(squares, group=self._policy.sharding.get_group())",
            "dist.all_reduce(squares)",
            "test_weights_and_metrics_are_those_of_the_formulas_with_copies_of_the_weights",
        ),
    ),
    *of(
        "dora/trainer/model.py",
        "tests/trainer/test_layouts_exact.py",
        (
            "gradients-alike-summed",
            "float(units.alike)",
            "1.0",
            "test_gradients_and_weights_are_the_same",
        ),
        (
            "gradients-of-heads-divided",
            "(*units.divided, *units.of_heads)",
            "units.divided",
            "test_gradients_and_weights_are_the_same",
        ),
        (
            "gradients-averaged",
            "            module.set_gradient_divide_factor(1.0 if module in differ else float(units.alike))\n",
            "",
            "test_gradients_and_weights_are_the_same",
        ),
    ),
    *of(
        "dora/trainer/resharding.py",
        "tests/trainer/test_divided.py",
        (
            "experts-in-the-order-of-ranks",
            "return of_groups if dimension == 1 else [[file for files in of_groups for file in files]]",
            "return of_groups if dimension == 1 else [[*range(self.num_files)]]",
            "test_files_in_the_order_of_experts",
        ),
        (
            "columns-as-rows",
            "return of_groups if dimension == 1 else [[file",
            "return [[file",
            "test_files_of_columns",
        ),
    ),
    *of(
        "dora/transport/controller_end.py",
        "tests/transport/test_incarnations.py",
        (
            "replaced-rank-admitted",
            "        if hello.incarnation != self._incarnation:\n",
            "        if False:\n",
            "test_a_rank_that_was_replaced_is_refused_and_what_it_sends_is_dropped_and_counted",
        ),
        (
            "message-of-a-replaced-rank-taken",
            "(frame.epoch, frame.incarnation) != (self._epoch, self._incarnation)",
            "frame.epoch != self._epoch",
            "test_frames_of_another_incarnation_are_dropped_even_from_an_admitted_rank",
        ),
    ),
    *of(
        "dora/weights/fence.py",
        "tests/weights/test_store.py",
        (
            "fence-without-incarnation",
            '    if held != f"{epoch}.{incarnation}":\n',
            '    if held.partition(".")[0] != str(epoch):\n',
            "test_a_rank_that_was_replaced_makes_no_version_visible",
        ),
    ),
    *of(
        "dora/controller/vitals.py",
        "tests/controller/test_vitals.py",
        (
            "silent-rank-overlooked",
            "            if at - rank.heard_at > SILENT_S:\n",
            "            if False:\n",
            "test_a_rank_that_is_silent_is_found_at_once",
        ),
        (
            "own-standstill-held-against-ranks",
            "        if gap > GAP_S or are_cut_off:\n",
            "        if are_cut_off:\n",
            "test_a_controller_that_stood_still_judges_nobody_by_that_time",
        ),
        (
            "standstill-of-one-is-that-of-all",
            "        still_s = min(at - rank.changed_at for rank in self._ranks)\n",
            "        still_s = max(at - rank.changed_at for rank in self._ranks)\n",
            "test_as_long_as_one_rank_makes_progress_the_others_may_wait_for_it",
        ),
        (
            "slow-disk-is-a-standstill",
            '        if doing & (OWN_LIMIT - {"waiting"}) or doing == {"waiting"}:\n',
            '        if doing == {"waiting"}:\n',
            "test_what_has_a_limit_of_its_own_is_not_judged",
        ),
        (
            "compiling-is-a-standstill",
            "        return FIRST_S if longest is None else max(STILL_S, STILL_FACTOR * longest)\n",
            "        return max(STILL_S, STILL_FACTOR * (longest or 0.0))\n",
            "test_the_first_time_may_take_long_because_kernels_are_compiled",
        ),
    ),
    *of(
        "dora/controller/trainer_link.py",
        "tests/controller/test_lost_trainer.py",
        (
            "ranks-of-a-host-that-is-cut-off-judged",
            ", are_cut_off=self.ranks.are_cut_off):",
            "):",
            "test_ranks_whose_host_is_cut_off_are_not_judged_before_it_is_back",
        ),
    ),
    *of(
        "dora/trainer/pulse.py",
        "tests/trainer/test_pulse.py",
        (
            "flight-record-with-every-pulse",
            "still_s >= FLIGHT_S and not has_sent and",
            "still_s >= FLIGHT_S and",
            "test_the_flight_record_is_sent_once_for_each_standstill_in_what_may_be_a_collective",
        ),
        (
            "backward-without-beats",
            "            first.register_hook(on_gradient)\n",
            "            pass\n",
            "test_each_layer_of_a_pass_is_a_beat_forward_and_backward",
        ),
    ),
)
