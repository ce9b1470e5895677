"""Random sequences for the check of the forward pass, and the rows that they make under a layout.

Some share their prompt. Most are short. For each length beyond which the model computes in another way
(dora/trainer/thresholds.py), one sequence is just longer than it, unless no sequence of the run is that long.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from dora.trainer.packing import Layout, Row, make_row, prompts_of, split_passes
from dora.trainer.thresholds import thresholds

#: The lengths of the short sequences and of their prompts; prompts of the same length are equal.
LENGTHS: Final = (5, 40, 17, 64, 9)
PROMPTS: Final = (1, 11, 11, 11, 1)
#: Number of tokens by which a longer sequence exceeds its threshold.
BEYOND: Final = 8

MembersAndRow = tuple[list[int], Row]


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences of which every token after the prompt is trained."""

    lengths: tuple[int, ...]
    prompts: tuple[int, ...]  # number of tokens
    vocab_size: int

    @property
    def responses(self) -> tuple[int, ...]:
        """The number of trained tokens of each sequence."""
        return tuple(length - prompt for length, prompt in zip(self.lengths, self.prompts, strict=True))

    def rows(
        self, layout: Layout | None, device: torch.device, *, changed: Collection[int] = ()
    ) -> list[MembersAndRow]:
        """Return rows, each with the indices of its sequences; without a layout, each sequence has a row of its own.

        `changed`: sequences to which other responses of the same length are given.
        """
        sequences = [
            np.concatenate([self._draw(prompt), self._draw(response, salt=int(n in changed))])
            for n, (prompt, response) in enumerate(zip(self.prompts, self.responses, strict=True))
        ]
        mask = [np.arange(length) >= prompt for length, prompt in zip(self.lengths, self.prompts, strict=True)]
        if layout is None:
            passes, layout = [[n] for n in range(len(sequences))], Layout()
        else:
            trained = np.concatenate(mask).nonzero()[0]
            prompts = prompts_of(np.concatenate(sequences), lengths=self.lengths, trained=trained)
            budget = len(LENGTHS) * max(LENGTHS) + max(self.lengths)
            passes = split_passes(self.lengths, prompts=prompts, layout=layout, budget=budget)
        rows = []
        for members in passes:
            tokens, trained = (np.concatenate([column[n] for n in members]) for column in (sequences, mask))
            lengths = [self.lengths[n] for n in members]
            row = make_row(tokens, lengths=lengths, trained=trained.nonzero()[0], layout=layout, device=device)
            rows.append((members, row))
        return rows

    def in_order(self, members: list[int], row: Row) -> list[int]:
        """Return the sequences of a row by their places in it."""
        ends = np.cumsum([self.responses[n] for n in members])
        places = row.predictors_P[torch.from_numpy(ends - 1).to(row.predictors_P.device)].tolist()
        return [members[i] for i in np.argsort(places)]

    def _draw(self, count: int, *, salt: int = 0) -> np.ndarray[Any, Any]:
        return np.random.default_rng([count, salt]).integers(0, self.vocab_size, count)


def sequences_for(config: Any, *, longest: int) -> Sequences:
    """Return the sequences for a model in a run whose longest request has `longest` tokens."""
    beyond = {min(limit + BEYOND, longest) for limit in thresholds(config).values() if max(LENGTHS) <= limit < longest}
    lengths = (*LENGTHS, *sorted(beyond))
    prompts = (*PROMPTS, *range(2, 2 + len(beyond)))
    return Sequences(lengths, prompts, config.get_text_config(decoder=True).vocab_size)
