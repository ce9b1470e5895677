"""Mutations of the replay of experts: what is answered, to which tokens, in which passes, and what is counted."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, of

_EQUAL: Final = "test_own_choice_is_replayed_to_the_bit_and_others_as_by_a_plain_loop"
_STEP: Final = "test_a_step_replays_in_all_policies_and_counts_what_it_replays"

MUTANTS: Final[tuple[Mutant, ...]] = (
    *of(
        "dora/routers.py",
        "tests/trainer/test_routers.py",
        (
            "experts-of-other-groups-have-no-score",
            "        if self._masked is not None and self._masked[0] is scores_TE:\n",
            "        if False:\n",
            _EQUAL,
        ),
        (
            "own-choice-in-the-order-of-the-table",
            "torch.where(is_own_T[:, None], own_Tk, table_Tk)",
            "torch.where(table_Tk < 0, own_Tk, table_Tk)",
            _EQUAL,
        ),
        (
            "another-table-in-backward",
            "                value.register_hook(partial(self._require_unchanged, table, version))\n",
            "                pass\n",
            "test_another_table_in_backward_is_noticed",
        ),
        (
            "table-changed-in-place",
            "        if self.table is not table or _version(table) != version:\n",
            "        if self.table is not table:\n",
            "test_another_table_in_backward_is_noticed",
        ),
        (
            "any-number-of-choices",
            "            if answer.hits != 1:\n",
            "            if not answer.hits:\n",
            "test_a_router_that_chooses_twice_is_refused",
        ),
    ),
    *of(
        "dora/trainer/batch.py",
        "tests/trainer/test_replay.py",
        (
            "unknown-tokens-replayed",
            "    experts[batch.routed == 0] = -1\n",
            "    experts[batch.routed == 0] = np.arange(routing.top_k)\n",
            "test_the_experts_of_a_row_are_those_of_its_tokens",
        ),
        (
            "ids-not-checked",
            "routing.fault(_ids(batch, routing)[batch.routed != 0])",
            '""',
            "test_a_micro_batch_whose_experts_do_not_fit_is_refused",
        ),
    ),
    *of(
        "dora/trainer/packing.py",
        "tests/trainer/test_replay.py",
        (
            "prompts-shared-whatever-their-experts",
            '        chosen = b"" if experts is None else experts[start:stop].tobytes()\n',
            '        chosen = b""\n',
            "test_prompts_are_shared_only_where_their_experts_are_equal",
        ),
        (
            "padding-replayed",
            "np.full((num_lines, width, *experts.shape[1:]), -1, np.int16)",
            "np.full((num_lines, width, *experts.shape[1:]), 0, np.int16)",
            "test_the_experts_of_a_row_are_those_of_its_tokens",
        ),
    ),
    *of(
        "dora/trainer/copies.py",
        "tests/trainer/test_replay.py",
        (
            "reference-chooses-by-itself",
            "        with replayed(self.model, row):\n            return logprobs(",
            "        if True:\n            return logprobs(",
            _STEP,
        ),
    ),
    *of(
        "dora/trainer/probe.py",
        "tests/trainer/test_replay.py",
        (
            "probe-chooses-by-itself",
            "self._under(version), replayed(self._policy.model, row), torch.no_grad()",
            "self._under(version), torch.no_grad()",
            "test_the_probe_replays_the_same_experts",
        ),
    ),
    *of(
        "dora/trainer/balance.py",
        "tests/trainer/test_replay.py",
        (
            "loads-of-the-trainers-choice",
            "            chosen_TLk = torch.where(is_replayed_TLk, table_TLk, own_TLk)\n",
            "",
            "test_loads_are_those_of_the_tokens_of_the_step",
        ),
        (
            "last-tokens-count-as-unknown",
            "        is_read[np.cumsum(batch.lengths) - 1] = False\n",
            "",
            _STEP,
        ),
    ),
    *of(
        "dora/trainer/replay.py",
        "tests/trainer/test_replay.py",
        (
            "table-kept-after-backward",
            "        yield\n    finally:\n        routers.replay(None)\n",
            "        yield\n    finally:\n        pass\n",
            _STEP,
        ),
    ),
)
