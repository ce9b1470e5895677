"""Mutations of failures of episodes, their hosts and messages."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, of

MUTANTS: Final[tuple[Mutant, ...]] = (
    *of(
        "dora/environments/failures.py",
        "tests/environments/test_failures.py",
        (
            "row-blamed-for-each-sibling",
            "        if is_own and (death is None or row not in death.rows):\n",
            "        if is_own:\n",
            "test_a_row_is_suspected_once_of_the_loss_of_a_host_however_many_of_its_episodes_called",
        ),
        (
            "suspicion-stays",
            "        self._suspected.pop(row, None)\n",
            "",
            "test_an_episode_that_goes_well_clears_its_row_of_the_loss_of_hosts_but_not_of_failures_of_its_own",
        ),
    ),
    *of(
        "dora/app/resume.py",
        "tests/app/test_resumed_turn.py",
        (
            "a-resume-forgets-the-limit-of-a-turn",
            "    record.turn_tokens = trajectory.turn_tokens\n",
            "",
            "test_the_limit_of_a_turn_outlives_the_controller",
        ),
    ),
    *of(
        "dora/core/on_calls.py",
        "tests/core/test_calls.py",
        (
            "the-call-for-a-prompt-has-a-reward",
            "    if trajectory.num_tokens or not state.settings.own_prompts:  # else no turn came before\n",
            "    if True:\n",
            "test_the_call_for_a_prompt_of_its_own_has_no_reward_and_limits_the_first_turn",
        ),
    ),
    *of(
        "dora/tasks/prompts.py",
        "tests/environments/test_first_prompts.py",
        (
            "rows-of-agents-are-not-in-the-digest",
            "            parts.append(self.row)\n",
            "            pass\n",
            "test_a_row_whose_prompt_is_not_known_yet_is_known_by_all_of_its_columns",
        ),
    ),
    *of(
        "dora/controller/episodes.py",
        "tests/controller/test_ends_of_turns.py",
        (
            "silent-agents-have-no-limit",
            "            async with asyncio.timeout(left_s) as limit:\n",
            "            async with asyncio.timeout(None) as limit:\n",
            "test_an_episode_whose_agent_is_silent_ends_at_its_time_and_not_at_that_of_a_call",
        ),
    ),
    *of(
        "dora/environments/episode.py",
        "tests/environments/test_token_calls.py",
        (
            "forks-of-tokens-are-all-rewritten",
            'return "branched" if before and keep >= before[-1].end else "rewritten"',
            'return "rewritten"',
            "test_one_that_differs_forks_after_what_both_have",
        ),
    ),
    *of(
        "dora/controller/episodes.py",
        "tests/environments/test_episode_replays.py",
        (
            "replayed-death-is-a-failure",
            "self._step(trajectory, record, may_replay=may_replay)\n",
            "self._step(trajectory, record, may_replay=False)\n",
            "test_a_row_is_not_blamed_for_a_death_that_its_replay_made_good",
        ),
        (
            "unrendered-messages-count-for-nothing",
            '            self._pool.fail(order.trajectory, EnvironmentFailed("invalid", str(err)))\n',
            "",
            "test_messages_that_cannot_be_rendered_are_failures_of_the_environment",
        ),
        (
            "every-turn-ended-by-itself",
            "        is_cut = episode.tokens[-1] not in self._renderer.stop_ids\n",
            "        is_cut = False\n",
            "test_a_turn_that_its_server_cut_is_told_so",
        ),
        (
            "replays-counted-where-there-are-none",
            "        replays = int(self._pool.can_replay and bool(record.observed)",
            "        replays = int(bool(record.observed)",
            "test_no_replay_is_counted_where_none_was_possible",
        ),
    ),
    *of(
        "dora/environments/watch.py",
        "tests/environments/test_user_code.py",
        (
            "blocked-loop-is-left",
            "            if looks >= self._num_looks:\n",
            "            if looks < 0:\n",
            "test_an_async_call_that_blocks_the_loop_costs_itself_alone",
        ),
    ),
    *of(
        "dora/environments/host.py",
        "tests/environments/test_user_code.py",
        (
            "blocked-loop-costs-the-others",
            "                limit.reschedule(until)\n",
            "                pass\n",
            "test_calls_that_are_done_when_the_loop_goes_on_have_not_timed_out",
        ),
    ),
    *of(
        "dora/environments/api.py",
        "tests/environments/test_user_code.py",
        (
            "methods-race",
            "(in_loop if is_async else in_order if is_method else in_threads)",
            "(in_loop if is_async else in_threads)",
            "test_methods_that_share_the_state_of_an_episode_run_one_after_the_other_in_the_order_of_the_calls",
        ),
        (
            "answers-in-the-order-of-their-ends",
            "        return [answers[number] for number in range(len(calls))]\n",
            "        return [*answers.values()]\n",
            "test_answers_have_the_order_of_the_calls_whichever_is_done_first",
        ),
    ),
    *of(
        "dora/config/load.py",
        "tests/config/test_load.py",
        (
            "environment-graded-as-arithmetic",
            '            task.setdefault("rewards", [])  # the default is for tasks without an environment\n',
            '            task.setdefault("rewards", rewards)\n',
            "test_without_terms_of_the_reward_an_environment_is_graded_by_no_one_else",
        ),
    ),
)
