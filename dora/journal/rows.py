"""Rows: the sequences that the trainer gets of one answer.

An answer that only grows is one row: its prompt, then all its tokens. Where the tokens so far cannot be continued, the
answer forks: a new row begins with the first tokens of an earlier row, and then has the next tokens of the answer, its
own part. Invariant: every token of the answer is in the own part of exactly one row; tokens that a row repeats from an
earlier row have mask and log-prob 0.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Fork(NamedTuple):
    """Where a row begins: the first `keep` tokens of row `parent`, prompt included, then the answer from `start` on."""

    start: int
    parent: int
    keep: int


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """One sequence for the trainer. All fields have the same length, and the last token was sampled."""

    ids: array[int]
    mask: bytearray  # 1 for the tokens that were sampled in this row
    logprobs: array[float]  # behavior log-probs; 0 where the mask is 0


def row_ids(prompt: array[int], answer: array[int], forks: Sequence[Fork], number: int) -> array[int]:
    """Return the tokens of a row, prompt included. ValueError if the row's fork is impossible."""
    start, end = own_part(forks, number, len(answer))
    if number == 0:
        return prompt + answer[:end]
    fork = forks[number - 1]
    if not (0 <= fork.parent < number and start <= end):
        raise ValueError(f"{fork} cannot begin row {number}")
    before = row_ids(prompt, answer, forks, fork.parent)
    if not 0 <= fork.keep <= len(before):
        raise ValueError(f"{fork} repeats more than the {len(before)} tokens of its parent")
    return before[: fork.keep] + answer[start:end]


def own_part(forks: Sequence[Fork], number: int, num_tokens: int) -> tuple[int, int]:
    """Return the start and the end of a row's own part in an answer of `num_tokens` tokens."""
    start = forks[number - 1].start if number else 0
    return start, forks[number].start if number < len(forks) else num_tokens


def repeated(forks: Sequence[Fork]) -> int:
    """Return the number of tokens that rows repeat from earlier rows."""
    return sum(fork.keep for fork in forks)


def answer_bound(max_tokens: int, *, prompt: int, forks: Sequence[Fork], max_row_tokens: int | None) -> int:
    """Return the maximum length of an answer whose rows together have at most `max_row_tokens` tokens (None: no bound).

    An answer without a fork is bounded by `max_tokens` alone.
    """
    if max_row_tokens is None or not forks:
        return max_tokens
    return min(max_tokens, max_row_tokens - prompt - repeated(forks))


def rows_of(
    prompt: array[int], answer: array[int], *, mask: bytes | bytearray, logprobs: array[float], forks: Sequence[Fork]
) -> list[EpisodeRow]:
    """Return the rows whose own part has sampled tokens. A row ends with the last sampled token of its own part."""
    rows = []
    for number in range(len(forks) + 1):
        start, end = own_part(forks, number, len(answer))
        length = mask.rfind(1, start, end) + 1 - start
        if length > 0:
            keep = forks[number - 1].keep if number else len(prompt)
            own = slice(start, start + length)
            rows.append(
                EpisodeRow(
                    ids=row_ids(prompt, answer, forks, number)[: keep + length],
                    mask=bytearray(keep) + mask[own],
                    logprobs=array("f", bytes(4 * keep)) + logprobs[own],
                )
            )
    return rows
