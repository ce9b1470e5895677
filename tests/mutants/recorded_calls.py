"""Mutations of what is read of the calls of a recorded run."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, of

_READ: Final = "test_turns_and_endings_of_an_environment_are_read"
_KEPT: Final = "test_a_server_that_has_the_answer_reads_only_the_result"
_BEGUN: Final = "test_episodes_begin_with_a_call_and_siblings_share_its_prompt"
_FIRST: Final = "test_the_first_reading_of_a_prompt_is_none_of_lost_kv"
_ENDED: Final = "test_an_answer_whose_last_call_ends_it_is_complete_with_its_result"

MUTANTS: Final[tuple[Mutant, ...]] = (
    *of(
        "dora/sim/recorded.py",
        "tests/sim/test_recorded_calls.py",
        (
            "a-call-timed-from-its-turn",
            "self._calling[command.trajectory] = command.attempt, at\n",
            "self._calling.setdefault(command.trajectory, (command.attempt, 0.0))\n",
            _READ,
        ),
        (
            "answers-that-calls-end-have-no-length",
            "        if (event.ended or event.failed) and id >= 0:\n",
            "        if False:\n",
            _READ,
        ),
        ("a-lost-server-keeps-answers", "self._turns[id] = None, self._turns[id][1]", "pass", _KEPT),
        (
            "a-server-reads-answers-again",
            "produced=command.num_tokens - read, at=at",
            "produced=command.num_tokens, at=at",
            _KEPT,
        ),
        (
            "own-prompts-counted-twice",
            "return max(self.lengths[id] - max(0, self.prompt_of(id) - 1), int(id in self.begun))",
            "return self.lengths[id]",
            _BEGUN,
        ),
    ),
    *of(
        "dora/sim/world.py",
        "tests/sim/test_recorded_calls.py",
        (
            "an-answer-that-a-call-ends-goes-on",
            "        ended = not request.calls and request.offset == request.total\n",
            "        ended = False\n",
            _ENDED,
        ),
        (
            "an-answer-that-a-call-ended-keeps-its-kv",
            "            self._forget(order.trajectory, self.instances[request.order.instance])\n",
            "",
            _ENDED,
        ),
    ),
    *of(
        "dora/sim/instance.py",
        "tests/sim/test_recorded_calls.py",
        (
            "an-own-prompt-is-read-again",
            "new = request.unread if request.offset > request.unread else need",
            "new = request.unread if request.offset else need",
            _FIRST,
        ),
    ),
)
