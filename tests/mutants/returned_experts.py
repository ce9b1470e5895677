"""Mutations of the choice of experts in the client and in the embedded engine."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, of

_WRONG: Final = "test_whatever_else_a_server_returns_is_one_line_that_names_it_and_what_to_do"
_DOUBTED: Final = "test_a_server_that_would_return_other_choices_is_doubted"
_CHURN: Final = "test_experts_are_those_of_a_plain_forward_while_rows_join_and_leave"

MUTANTS: Final[tuple[Mutant, ...]] = (
    *of(
        "dora/engine/sglang/routing.py",
        "tests/engine/test_returned_experts.py",
        (
            "experts-out-of-range",
            "            if not 0 <= expert < shape.num_experts:\n",
            "            if False:\n",
            _WRONG,
        ),
        ("experts-below-zero", "if not 0 <= expert <", "if not expert <", _WRONG),
        ("experts-twice", "        if shape.fault(experts[start:end]):\n", "        if False:\n", _WRONG),
        (
            "experts-of-the-first-layers",
            "    layers = slice(None) if len(shape.layers) == shape.num_layers else np.array(shape.layers)\n",
            "    layers = slice(len(shape.layers))\n",
            "test_the_choices_of_layers_with_experts_come_from_the_first_token_of_interest_on",
        ),
        (
            "escapes-not-read",
            "        text = memoryview(msgspec.json.decode(raw, type=str).encode())\n",
            "        pass\n",
            "test_choices_are_read_wherever_the_bytes_are_split",
        ),
        (
            "events-as-large-as-without-experts",
            "    return MAX_EVENT_BYTES + _text_bytes(rows * _row_bytes(asked.shape))\n",
            "    return MAX_EVENT_BYTES\n",
            "test_an_event_may_be_as_large_as_the_longest_request_makes_it",
        ),
        ("old-releases-not-doubted", "    if is_older(info.version, FIRST_RELEASE):\n", "    if False:\n", _DOUBTED),
        (
            "kernels-of-their-own-not-doubted",
            "    if (backend := info.moe_runner_backend) in _OWN_CHOICE:\n",
            "    if (backend := info.moe_runner_backend) == '':\n",
            _DOUBTED,
        ),
    ),
    *of(
        "dora/engine/sglang/client.py",
        "tests/engine/test_returned_experts.py",
        ("absent-experts-accepted", "            if result.was_stopped:  # in", "            if True:  # in", _WRONG),
        (
            "queued-answer-without-experts-refused",
            "            if result.was_stopped:  # in",
            "            if False:  # in",
            "test_a_stop_while_the_request_waits_to_be_continued_has_none",
        ),
        (
            "rows-of-the-prompt-counted-from-zero",
            "result.num_tokens - 1 - request.routing.start\n",
            "result.num_tokens - 1\n",
            "test_the_choices_of_layers_with_experts_come_from_the_first_token_of_interest_on",
        ),
    ),
    *of(
        "dora/routing.py",
        "tests/engine/test_returned_experts.py",
        (
            "experts-twice-in-neighboring-columns-alone",
            "        for gap in range(1, self.top_k):",
            "        for gap in range(1, min(2, self.top_k)):",
            "test_an_expert_twice_is_found_wherever_it_is",
        ),
        (
            "experts-of-two-layers-compared",
            " & (place[gap:] >= gap)\n",
            "\n",
            "test_an_expert_twice_is_found_wherever_it_is",
        ),
    ),
    *of(
        "dora/embedded/slots.py",
        "tests/embedded/test_kept_experts.py",
        (
            "experts-left-behind-in-a-move",
            "            self._experts[target, :length] = self._experts[source, :length]\n",
            "            pass\n",
            _CHURN,
        ),
        (
            "cached-tokens-without-experts",
            "                self._experts[row, :length] = saved.experts[:length]\n",
            "                pass\n",
            "test_cached_tokens_have_the_experts_that_were_chosen_when_they_were_computed",
        ),
        (
            "experts-lost-in-growth",
            "            experts[:, :old] = self._experts\n",
            "",
            "test_experts_stay_when_rows_outgrow_the_cache",
        ),
    ),
    *of(
        "dora/embedded/batcher.py",
        "tests/embedded/test_kept_experts.py",
        (
            "experts-of-a-retracted-request-returned",
            "        generation.experts = None\n",
            "",
            "test_a_retracted_request_has_those_of_its_second_reading_and_none_while_it_waits",
        ),
    ),
)
