"""Held-out evaluation as the shell sees it: which sample is which prompt of which set, and what a version scored.

Invariant: the samples are a fixed list for the whole run, so an evaluation id (core/ids.py) names version, set, prompt
and sample. Results are attributed to the version that generated them, whenever they arrive.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dora.core.ids import TrajectoryId, VersionId, evaluation_id, evaluation_index
from dora.tasks.prompts import Prompt


@dataclass(frozen=True, slots=True)
class EvalSet:
    """One held-out set with its prompts."""

    name: str
    prompts: Sequence[Prompt]
    samples: int  # n per prompt
    temperature: float
    num_skipped: int = 0  # rows left out, since their prompts are over the limit


@dataclass(frozen=True, slots=True)
class SetScore:
    """What one version scored on one set."""

    name: str
    mean: float  # mean@n: mean reward over all graded samples
    pass_at: dict[int, float]  # pass@k for k = 1, 2, 4, ... n: see `pass_at_k`
    num_samples: int  # graded
    num_failed: int  # grading failed
    mean_tokens: float
    max_tokens: int
    median_tokens: int

    @property
    def pass_at_n(self) -> float:
        """Share of prompts with at least one sample of reward >= 1."""
        return self.pass_at[max(self.pass_at)] if self.pass_at else 0.0


def pass_at_k(num_solved: Sequence[int], *, samples: int, k: int) -> float:
    """Chance that at least one of k samples solves a prompt, mean over prompts (unbiased; arXiv 2107.03374, §2.1)."""
    total = math.comb(samples, k)
    return sum(1.0 - math.comb(samples - solved, k) / total for solved in num_solved) / len(num_solved)


class Evaluations:
    """All samples of all sets, in the order of their ids."""

    def __init__(self, sets: Sequence[EvalSet]) -> None:
        self.sets = sets
        self._samples = [
            (s, p) for s, one in enumerate(sets) for p in range(len(one.prompts)) for _ in range(one.samples)
        ]

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """Prompt length of every sample."""
        return tuple(len(self.sets[s].prompts[p].tokens) for s, p in self._samples)

    @property
    def digest(self) -> str:
        """Of every prompt with its answer: scores are comparable only if it is the same."""
        digest = hashlib.blake2b(digest_size=16)
        for s, p in self._samples:
            digest.update(self.sets[s].prompts[p].digest)
        return digest.hexdigest()

    def locate(self, trajectory: TrajectoryId) -> tuple[EvalSet, int]:
        """The set of a sample, and the place of its prompt in it."""
        _, index = evaluation_index(trajectory, num_samples=len(self._samples))
        s, p = self._samples[index]
        return self.sets[s], p

    def set_index(self, trajectory: TrajectoryId) -> int:
        """Which set a sample belongs to."""
        return self._samples[evaluation_index(trajectory, num_samples=len(self._samples))[1]][0]

    def ids(self, version: VersionId) -> list[TrajectoryId]:
        """Ids of all samples of one version's evaluation."""
        total = len(self._samples)
        return [evaluation_id(version, i, num_samples=total) for i in range(total)]

    def scores(self, outcomes: Sequence[tuple[float | None, int]]) -> list[SetScore]:
        """Scores per set from (reward or None, number of tokens) of every sample, in id order."""
        return [self._score(s, outcomes) for s in range(len(self.sets))]

    def _score(self, chosen: int, outcomes: Sequence[tuple[float | None, int]]) -> SetScore:
        one = self.sets[chosen]
        rows = [(p, *outcomes[i]) for i, (s, p) in enumerate(self._samples) if s == chosen]
        rewards = [reward for _, reward, _ in rows if reward is not None]
        solved = Counter(p for p, reward, _ in rows if reward is not None and reward >= 1.0)
        num_solved = [solved[p] for p in range(len(one.prompts))]
        sizes = sorted({*(2**i for i in range(one.samples.bit_length())), one.samples})
        lengths = sorted(num_tokens for _, _, num_tokens in rows)
        return SetScore(
            name=one.name,
            mean=sum(rewards) / len(rewards) if rewards else 0.0,
            pass_at={k: pass_at_k(num_solved, samples=one.samples, k=k) for k in sizes},
            num_samples=len(rewards),
            num_failed=len(rows) - len(rewards),
            mean_tokens=sum(lengths) / len(lengths) if lengths else 0.0,
            max_tokens=lengths[-1] if lengths else 0,
            median_tokens=lengths[len(lengths) // 2] if lengths else 0,
        )
