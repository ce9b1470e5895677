"""Mutations of drafts in the embedded engine, and of the check of servers with speculative decoding."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, of

_SAME: Final = "test_drafts_change_no_token_and_no_logprob[right at times]"
_ENDS: Final = "test_a_draft_is_cut_at_a_stop_token_and_never_goes_beyond_the_limit"
_GREEDY: Final = "test_a_server_that_takes_the_most_probable_token_is_refused"

MUTANTS: Final[tuple[Mutant, ...]] = (
    *of(
        "dora/embedded/decoder.py",
        "tests/embedded/test_decoder.py",
        (
            "noise-of-drafts-one-place-early",
            "settings, position_BT.flatten() + 1)",
            "settings, position_BT.flatten())",
            _SAME,
        ),
        (
            "a-token-more-kept-than-agrees",
            "        counts = [1 + _agreement",
            "        counts = [2 + _agreement",
            _SAME,
        ),
        (
            "kept-drafts-masked",
            "            self._mask[row, self._lengths[row] : self._lengths[row] + count] = 0.0\n",
            "",
            _SAME,
        ),
        (
            "padding-written-into-rows",
            "flat_BT.masked_fill(offset_T > drafted_B1, self._slots * self._cache.capacity)",
            "flat_BT",
            _SAME,
        ),
        ("banned-tokens-sampled-after-drafts", "max(0, ban[0] - self._lengths[row] - 1)", "0", _SAME),
        (
            "nan-of-a-draft-kept",
            "                self._cache.clear(row, begin=length, end=length + width)\n",
            "                pass\n",
            "test_a_rejected_draft_that_gives_no_numbers_affects_nothing",
        ),
    ),
    *of(
        "dora/embedded/sampling.py",
        "tests/embedded/test_decoder.py",
        (
            "settings-of-other-rows",
            "each.repeat_interleave(times, dim=0)",
            "each.repeat(times, *[1] * (each.dim() - 1))",
            _SAME,
        ),
    ),
    *of(
        "dora/embedded/slots.py",
        "tests/embedded/test_decoder.py",
        (
            "mask-of-heads-in-another-order",
            "attention_mask.repeat(1, 1, heads // kv_heads, 1)",
            "attention_mask.repeat_interleave(heads // kv_heads, dim=2)",
            _SAME,
        ),
    ),
    *of(
        "dora/embedded/batcher.py",
        "tests/embedded/test_batcher.py",
        (
            "draft-beyond-the-limit",
            "drafts.draft(generation, most)[: left - 1]",
            "drafts.draft(generation, most)",
            _ENDS,
        ),
        (
            "tokens-after-a-stop-kept",
            "if any(self._ends(row, token, logprob) for token, logprob in zip(*pairs, strict=True)):",
            "if [1 for token, logprob in zip(*pairs, strict=True) if self._ends(row, token, logprob)]:",
            _ENDS,
        ),
    ),
    *of(
        "dora/embedded/drafts.py",
        "tests/embedded/test_drafts.py",
        (
            "drafts-of-other-clients",
            "key = generation.cache_key, tuple",
            'key = "", tuple',
            "test_siblings_that_have_ended_or_run_are_read_and_others_are_not",
        ),
        (
            "full-batches-tried-always",
            "        if fewer is not None and self._batches[fewer].best == 0:",
            "        if False:",
            "test_many_rows_cost_nothing_once_drafts_do_not_pay_with_fewer",
        ),
        (
            "kept-without-a-bound",
            "        while self._tokens > self._budget_tokens:",
            "        while False:",
            "test_what_is_kept_stays_within_the_budget",
        ),
    ),
    *of(
        "dora/engine/sglang/speculation.py",
        "tests/engine/test_speculation.py",
        ("greedy-servers-accepted", "< NO_CHANCE:", "< -1e9:", _GREEDY),
        (
            "certain-models-refused",
            "< NO_CHANCE:",
            "<= 0:",
            "test_a_model_that_is_certain_of_every_token_may_repeat_itself",
        ),
        (
            "wrong-logprobs-accepted",
            "    if not mean <= limit:",
            "    if False:",
            "test_logprobs_that_are_not_those_of_plain_decoding_are_refused[0.2]",
        ),
    ),
)
