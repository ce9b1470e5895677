"""Held-out sets: the mapping from evaluation ids to prompts, and the scores of a version.

Invariant: the list of samples is fixed for the whole run, so that an evaluation id (core/ids.py) identifies version,
set, prompt and sample. A result counts for the version that generated it, whenever it arrives.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dora.core.ids import TrajectoryId, VersionId, evaluation_id, evaluation_index
from dora.observe.scores import SetScore
from dora.tasks.prompts import Prompt


@dataclass(frozen=True, slots=True)
class EvalSet:
    """One held-out set with its prompts."""

    name: str
    prompts: Sequence[Prompt]
    samples: int  # n per prompt
    temperature: float
    num_skipped: int = 0  # rows whose prompts are over the limit, or cannot be rendered
    unreadable: Sequence[str] = ()  # what is wrong with each row that cannot be read

    @property
    def digest(self) -> str:
        """Digest of the prompts with their answers, in order. The scores of two sets with the same can be paired."""
        digest = hashlib.blake2b(digest_size=16)
        for prompt in self.prompts:
            digest.update(prompt.digest)
        return digest.hexdigest()

    @property
    def facts(self) -> dict[str, str | int | float]:
        """What the journal notes of the set."""
        return {
            "name": self.name,
            "source": self.prompts[0].source if self.prompts else "",
            "prompts": len(self.prompts),
            "samples": self.samples,
            "temperature": self.temperature,
            "skipped": self.num_skipped,
            "digest": self.digest,
        }


def pass_at_k(counts: Sequence[tuple[int, int]], *, k: int) -> float | None:
    """Return the mean over prompts of the unbiased estimate of pass@k (arXiv 2107.03374, §2.1).

    `counts`: (samples solved, samples graded) by prompt. Prompts with fewer than k graded samples are left out; the
    result is None if no prompt is left.
    """
    found = [1.0 - math.comb(graded - solved, k) / math.comb(graded, k) for solved, graded in counts if graded >= k]
    return sum(found) / len(found) if found else None


class Evaluations:
    """All samples of all sets, in the order of their ids."""

    def __init__(self, sets: Sequence[EvalSet]) -> None:
        self.sets = sets
        self._samples = [  # (index of the set, index of the prompt in it, number among the samples of the prompt)
            (s, p, n) for s, one in enumerate(sets) for p in range(len(one.prompts)) for n in range(one.samples)
        ]

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """Prompt lengths of all samples."""
        return tuple(len(self.sets[s].prompts[p].tokens) for s, p, _ in self._samples)

    @property
    def digest(self) -> str:
        """Digest of every prompt with its answer. Scores with different digests cannot be compared."""
        digest = hashlib.blake2b(digest_size=16)
        for s, p, _ in self._samples:
            digest.update(self.sets[s].prompts[p].digest)
        return digest.hexdigest()

    def locate(self, trajectory: TrajectoryId) -> tuple[EvalSet, int]:
        """Return the set of a sample, and the index of its prompt in the set."""
        _, index = evaluation_index(trajectory, num_samples=len(self._samples))
        s, p, _ = self._samples[index]
        return self.sets[s], p

    def key(self, trajectory: TrajectoryId) -> str:
        """Return what a sample is, whichever the version, and whichever other sets and samples there are: its set, its
        row, and its number among the samples of its prompt."""
        _, index = evaluation_index(trajectory, num_samples=len(self._samples))
        s, p, number = self._samples[index]
        return f"{self.sets[s].name} {self.sets[s].prompts[p].position} {number}"

    def set_index(self, trajectory: TrajectoryId) -> int:
        """Return the index of a sample's set."""
        return self._samples[evaluation_index(trajectory, num_samples=len(self._samples))[1]][0]

    def ids(self, version: VersionId) -> list[TrajectoryId]:
        """Return the ids of all samples of a version's evaluation."""
        total = len(self._samples)
        return [evaluation_id(version, i, num_samples=total) for i in range(total)]

    def scores(self, outcomes: Sequence[tuple[float | None, int]]) -> list[SetScore]:
        """Return the scores by set, given (reward or None, number of tokens) of every sample in id order."""
        return [self._score(s, outcomes) for s in range(len(self.sets))]

    def _score(self, chosen: int, outcomes: Sequence[tuple[float | None, int]]) -> SetScore:
        eval_set = self.sets[chosen]
        rows = [(p, *outcomes[i]) for i, (s, p, _) in enumerate(self._samples) if s == chosen]
        rewards = [reward for _, reward, _ in rows if reward is not None]
        solved = Counter(p for p, reward, _ in rows if reward is not None and reward >= 1.0)
        graded = Counter(p for p, reward, _ in rows if reward is not None)
        counts = [(solved[p], graded[p]) for p in range(len(eval_set.prompts))]
        sizes = sorted({*(2**i for i in range(eval_set.samples.bit_length())), eval_set.samples})
        lengths = sorted(num_tokens for _, _, num_tokens in rows)
        return SetScore(
            name=eval_set.name,
            mean=sum(rewards) / len(rewards) if rewards else None,
            pass_at={k: share for k in sizes if (share := pass_at_k(counts, k=k)) is not None},
            num_samples=len(rewards),
            num_failed=len(rows) - len(rewards),
            mean_tokens=sum(lengths) / len(lengths) if lengths else 0.0,
            max_tokens=lengths[-1] if lengths else 0,
            median_tokens=lengths[len(lengths) // 2] if lengths else 0,
            is_accuracy=all(reward in (0.0, 1.0) for reward in rewards),
        )
