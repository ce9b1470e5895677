"""Drafts: what may come next in an answer, by its prompt, itself and the answers of its siblings.

A draft is what followed the last tokens where they last occurred (prompt lookup; arXiv 2411.04975 does so with the
answers of others). It decides nothing: the decoder samples each token, and a draft only lets it sample several in one
step. How long drafts are depends on what steps have taken. Invariant: drafts come from requests with the same prompt
and the same namespace.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from dora.embedded.generation import Generation

#: Numbers of last tokens that are looked up, the highest first.
CONTEXTS: Final = (3, 2, 1)
#: Number of last tokens of a prompt that are read. A token costs about 1 us, once.
PROMPT_TOKENS: Final = 4096


class _Siblings:
    """What the answers to one prompt have in common."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.tokens = len(prompt_ids)
        self.unread: list[list[int]] = []  # answers that ended before any of their siblings needed a draft
        self._prompt = list(prompt_ids[-PROMPT_TOKENS:])
        self._after: dict[tuple[int, ...], tuple[list[int], int]] = {}  # context -> where it last occurred
        self._read(self._prompt, 0)

    def begin(self) -> list[int]:
        """Return the text of a new answer, to which its tokens are to be added."""
        for output_ids in self.unread:
            self.extend(list(self._prompt), output_ids)
        self.unread.clear()
        return list(self._prompt)

    def extend(self, text: list[int], token_ids: Sequence[int]) -> None:
        begin = len(text)
        text += token_ids
        self._read(text, begin)

    def _read(self, text: list[int], begin: int) -> None:
        for at in range(begin, len(text)):
            for context in CONTEXTS:
                if context <= at:
                    self._after[tuple(text[at - context : at])] = text, at

    def draft(self, text: list[int], most: int) -> list[int]:
        for context in CONTEXTS:
            found = self._after.get(tuple(text[-context:]))
            if found is not None:
                other, at = found
                return other[at : at + most]
        return []


@dataclass(slots=True)
class _Answer:
    siblings: _Siblings
    text: list[int]  # its prompt and the tokens that were read
    read: int = 0  # number of its tokens that were read


class Drafts:
    """The drafts of all requests of an engine."""

    def __init__(self, *, budget_tokens: int) -> None:
        """`budget_tokens`: of all prompts and answers that are kept; the prompt used least lately is forgotten
        first."""
        self._budget_tokens = budget_tokens
        self._tokens = 0
        self._families: OrderedDict[tuple[str, tuple[int, ...]], _Siblings] = OrderedDict()
        self._answers: dict[Generation, _Answer] = {}

    def draft(self, generation: Generation, most: int) -> list[int]:
        """Return at most `most` tokens that may come next."""
        answer = self._answers.get(generation)
        if answer is None:
            siblings = self._siblings_of(generation)
            answer = self._answers[generation] = _Answer(siblings, siblings.begin())
        new = generation.output_ids[answer.read :]
        answer.siblings.extend(answer.text, new)
        answer.read += len(new)
        return answer.siblings.draft(answer.text, most)

    def end(self, generation: Generation) -> None:
        """Keep an answer for its siblings."""
        answer = self._answers.pop(generation, None)
        siblings = self._siblings_of(generation)
        if answer is None:
            siblings.unread.append(generation.output_ids)
        siblings.tokens += len(generation.output_ids)
        self._tokens += len(generation.output_ids)
        while self._tokens > self._budget_tokens:
            self._tokens -= self._families.popitem(last=False)[1].tokens

    def _siblings_of(self, generation: Generation) -> _Siblings:
        key = generation.cache_key, tuple(generation.prompt_ids)
        siblings = self._families.get(key)
        if siblings is None:
            siblings = self._families[key] = _Siblings(generation.prompt_ids)
            self._tokens += siblings.tokens
        self._families.move_to_end(key)
        return siblings


#: Steps of each length that are tried at first, and the first and the last number of steps between later trials.
FIRST_TRIALS: Final = 3
TRIAL_AFTER: Final = (16, 1024)
#: How much of a figure is left after one more step of the same kind.
MEMORY: Final = 0.95
#: The measured speed-up from which drafts are made: figures of single steps are noisy.
WORTH: Final = 1.05


@dataclass(slots=True)
class _Pace:
    """What steps of one kind took lately."""

    steps: int = 0
    seconds: float = 0.0
    tokens: float = 0.0  # of each row

    def add(self, seconds: float, tokens: float) -> None:
        self.steps += 1
        self.seconds = MEMORY * self.seconds + seconds
        self.tokens = MEMORY * self.tokens + tokens

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class _Batches:
    """Steps with about the same number of rows: their pace, by the length of drafts."""

    paces: dict[int, _Pace]
    last: int = 0  # the length that was best when it was last tried
    steps: int = 0
    trial_at: int = TRIAL_AFTER[0]
    between: int = TRIAL_AFTER[0]
    tried: int = 0  # number of trials after the first ones

    @property
    def best(self) -> int:
        best = max(self.paces, key=lambda length: self.paces[length].rate)
        return best if self.paces[best].rate > WORTH * self.paces[0].rate else 0


@dataclass(slots=True)
class DraftLengths:
    """The length of drafts that makes most tokens a second, by number of rows, as measured while serving.

    The more rows, the less a draft saves. So with more rows drafts are tried only once they have paid with fewer."""

    most: int
    _batches: dict[int, _Batches] = field(default_factory=dict)

    def length(self, rows: int) -> int:
        """Return how many tokens to draft for each row in the next step."""
        place = _place(rows)
        batches = self._batches.get(place)
        if batches is None:
            batches = self._batches[place] = _Batches({length: _Pace() for length in _lengths(self.most)})
        fewer = max((other for other in self._batches if other < place), default=None)
        if fewer is not None and self._batches[fewer].best == 0:
            return 0
        for length, pace in batches.paces.items():
            if pace.steps < FIRST_TRIALS:
                return length
        best = batches.best
        batches.steps += 1
        if batches.steps < batches.trial_at:
            return best
        batches.between = min(2 * batches.between, TRIAL_AFTER[1]) if best == batches.last else TRIAL_AFTER[0]
        batches.last, batches.trial_at = best, batches.steps + batches.between
        batches.tried += 1
        others = [length for length in batches.paces if length != best]
        return others[batches.tried % len(others)]

    def took(self, rows: int, length: int, *, seconds: float, tokens: int) -> None:
        """Note a step with drafts of at most `length` that gave `tokens` in all."""
        self._batches[_place(rows)].paces[length].add(seconds, tokens / rows)


def _place(rows: int) -> int:
    """1, 2, 3, 4, 5 and 6, 7 and 8, 9 to 12, ...: numbers of rows within a third of each other."""
    return math.floor(2 * math.log2(rows) + 0.5)


def _lengths(most: int) -> list[int]:
    """0, 2, 4, 8, ... and `most`."""
    found = [0]
    while 2 * max(found[-1], 1) < most:
        found.append(2 * max(found[-1], 1))
    return [*found, most]
