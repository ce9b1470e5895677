"""A decoder's rows as a test follows them: requests, their tokens, and log-probs to compare with a plain forward
pass."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest

from dora.embedded.batcher import Joiner
from dora.embedded.decoder import CausalDecoder
from tests.embedded.conftest import VOCAB, Reference

CLOSE = 1e-4  # fp32, required by the engine's promise


@dataclass
class Row:
    """A running request and the decoder's results for it."""

    joiner: Joiner
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.joiner.token_ids) + len(self.output_ids)

    def add(self, token: int, logprob: float) -> None:
        self.output_ids.append(token)
        self.logprobs.append(logprob)

    def agrees_with(self, reference: Reference) -> None:
        prompt = list(self.joiner.token_ids)
        temperature = self.joiner.temperature or 1.0
        expected = reference.logprobs(prompt + self.output_ids, temperature=temperature)[len(prompt) - 1 :]
        assert self.logprobs == pytest.approx(expected, abs=CLOSE)


def prompt_of(rng: random.Random, length: int, *, vocab: int = VOCAB) -> list[int]:
    return [rng.randrange(vocab) for _ in range(length)]


def join(decoder: CausalDecoder, rows: list[Row], joiners: list[Joiner]) -> list[int]:
    """Join all of them; return the number of cached tokens of each, in the order of the new rows."""
    joined = decoder.join(joiners)
    rows += [Row(joiners[one.joiner]) for one in joined]
    return [one.cached_tokens for one in joined]


def step(decoder: CausalDecoder, rows: list[Row]) -> None:
    for row, token, logprob in zip(rows, *decoder.step(), strict=True):
        row.add(token, logprob)


def verify(decoder: CausalDecoder, rows: list[Row], drafts: list[list[int]]) -> list[int]:
    """Return the number of new tokens of each row."""
    found = decoder.verify(drafts)
    for row, draft, (tokens, logprobs) in zip(rows, drafts, found, strict=True):
        assert tokens[:-1] == draft[: len(tokens) - 1]
        assert len(tokens) == len(logprobs) <= len(draft) + 1
        row.output_ids += tokens
        row.logprobs += logprobs
    return [len(tokens) for tokens, _ in found]


def leave(decoder: CausalDecoder, rows: list[Row], index: int) -> Row:
    decoder.leave(index)
    gone, last = rows[index], rows.pop()
    if gone is not last:
        rows[index] = last
    return gone


def churn(
    decoder: CausalDecoder,
    rng: random.Random,
    *,
    lengths: list[int],
    turns: int,
    vocab: int = VOCAB,
    room: int = 2000,
    adapters: int = 0,
) -> list[Row]:
    """Let rows join, decode and leave at random, and at `room` tokens; return all of them. Row by row, they have none
    of the adapters, or one of the places up to `adapters`. Every other step has random drafts, if it can."""
    place = itertools.cycle((None, *range(adapters)))
    rows: list[Row] = []
    gone: list[Row] = []
    for _ in range(turns):
        free = 8 - len(rows)
        if free and rng.random() < 0.3:
            joiners = [
                Joiner(
                    token_ids=prompt_of(rng, rng.choice(lengths), vocab=vocab),
                    namespace=str(adapter := next(place)),
                    seed=rng.randrange(2**63),
                    temperature=rng.choice([0.0, 0.7, 1.0, 1.3]),
                    top_p=rng.choice([1.0, 0.8]),
                    adapter=adapter,
                )
                for _ in range(rng.randint(1, free))
            ]
            join(decoder, rows, joiners)
        if rows and rng.random() < 0.2:
            gone.append(leave(decoder, rows, rng.randrange(len(rows))))
        for index in reversed([i for i, row in enumerate(rows) if row.num_tokens >= room]):
            gone.append(leave(decoder, rows, index))
        drafts = [prompt_of(rng, rng.randint(0, 4), vocab=vocab) for _ in rows]
        if any(drafts) and decoder.can_verify and rng.random() < 0.5:
            verify(decoder, rows, [draft[: room - row.num_tokens] for row, draft in zip(rows, drafts, strict=True)])
        elif rows:
            step(decoder, rows)
    assert len(gone) > 4
    assert rows
    return gone + rows
