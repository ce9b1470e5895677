"""The offline proof of C1: log-probs of kept trajectories, recomputed under their version and under its neighbors.

Engine and trainer round differently, and an update can change less than that. Each token is therefore evidence in nats:
the log-likelihood ratio of two versions, with Laplace noise of the size that tokens of like probability show. A version
is confirmed or refuted by the sum (Wald 1945), an answer that a neighbor continued by its worst stretch (Page 1954),
and what rounding hides is told as such.

A kept trajectory is one JSON line in the run folder's `trajectories.jsonl`. What is compared must be what was recorded:
versions are read against the checksums in the journal, and kept trajectories against the token store. This module does
not import torch: the caller passes the scorer.
"""

from __future__ import annotations

import enum
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from dora import files, foreign
from dora.core.ids import GroupId, StepId, TrajectoryId, Truncation, VersionId, evaluation_index, group_of
from dora.errors import ConfigError, one_line
from dora.journal.rows import Fork, row_ids
from dora.journal.tokens import StoredAnswer, TokenStore

#: Largest median |Δ log-prob| between engine and scorer under the trajectory's own version, by the type in which they
#: compute: beyond it, the weights are others. Measured on a CPU with the seed policy and the embedded engine: 0 if both
#: compute in float32, 2e-6 to 8e-6 if both compute in bfloat16, 2e-5 to 6e-5 if one of them does. Deeper random models
#: differ by 7e-3 in bfloat16, and by 1.8e-2 in the mean if one of both computes in it (docs/TRAINER.md).
TOLERANCE: Final[Mapping[str, float]] = {"float32": 1e-4, "bfloat16": 5e-2}

#: Evidence that decides, in nats. Chance gives so much once in e^40 cases if the noise is as assumed; noise that is not
#: gave up to 28 in a stretch of 432 simulated runs of 20,000 tokens: heavy tails, unknown scales, neighbors that err
#: together.
DECISIVE: Final = 40.0
#: Most that one token says, as one that is rounded strangely says nothing about its version.
MOST_PER_TOKEN: Final = 3.0
#: The sum must also be so many standard deviations from 0: a neighbor that differs by rounding alone makes it a random
#: walk.
DEVIATIONS: Final = 5.0
#: Largest mean square of the evidence of a token in such a walk, as its steps are bounded.
MOST_SQUARE: Final = 4.0
#: Evidence per token that a stretch of an answer must have. There are many, so the worst one looks bad by chance.
LEAST_IN_STRETCH: Final = 1.0
#: Least rounding assumed: that of a log-prob in float32.
LEAST_ROUNDING: Final = 1e-6
#: Tokens of like probability from which their rounding is estimated.
ALIKE: Final = 64

#: (model folder, sequences of prompt and answer tokens, prompt lengths) -> log-probs of each answer's tokens, under the
#: sampling temperature of the run.
Score = Callable[[Path, Sequence[Sequence[int]], Sequence[int]], Sequence[npt.NDArray[np.float32]]]


#: Outcome of a sample of a held-out set, and the group that it belongs to.
EVALUATION: Final = "evaluation"
NO_GROUP: Final = GroupId(-1)


class KeptPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A turn of an episode, or what its environment answered."""

    role: Literal["policy", "environment"]
    text: str  #: control tokens included
    end: int  #: position after its last token; it begins where the part before ends
    calls: tuple[tuple[str, str], ...] = ()  #: of a turn: (name, JSON arguments), or ("", text) if invalid


class KeptTrajectory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One trajectory in full. Fields with their default are absent."""

    step: StepId  #: that trained it; dropped: the step trained next; evaluation: the step trained last
    group: GroupId  #: -1 for an evaluation sample
    trajectory: TrajectoryId
    version: VersionId
    reward: float | None
    truncated: Truncation  #: the budget that ended it
    prompt: str
    text: str
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  #: behavior log-probs, one per token
    observed: tuple[tuple[int, int], ...] = ()  #: start and end of each observation, whose tokens were not sampled
    forks: tuple[Fork, ...] = ()  #: where each row but the first begins
    turn_rewards: tuple[float, ...] = ()  #: rewards of the environment, one for each call after a turn
    calls_s: tuple[float, ...] = ()  #: seconds of each call under the controller that wrote this
    outcome: str = "trained"  #: trained, evaluation, or the "outcome: reason" of its dropped group
    answer: str = ""  #: the reference answer
    terms: tuple[tuple[str, float], ...] = ()  #: weighted terms of its reward, if known: name and value
    metrics: tuple[tuple[str, float], ...] = ()  #: what its environment measured, if this controller was told
    verdicts: tuple[tuple[str, str], ...] = ()  #: of models that judged it: name and text
    pieces: tuple[str, ...] = ()  #: each token as text; a part of a character is U+FFFD
    parts: tuple[KeptPart, ...] = ()  #: of an episode: its turns, and what the environment answered to each
    trainer_logprobs: tuple[float, ...] = ()  #: in the pass that trained the tokens, if the trainer sent them

    @property
    def is_sampled(self) -> npt.NDArray[np.bool_]:
        """Whether each token was sampled."""
        sampled = np.ones(len(self.tokens), np.bool_)
        for start, end in self.observed:
            sampled[start:end] = False
        return sampled

    def rows(self) -> list[tuple[list[int], int]]:
        """Return the tokens of each row, and how many of them come before the row's own part.

        Together, the own parts are the answer, in order. ValueError if the forks do not fit the answer.
        """
        prompt, answer = array("i", self.prompt_tokens), array("i", self.tokens)
        keeps = [len(self.prompt_tokens), *(fork.keep for fork in self.forks)]
        return [(row_ids(prompt, answer, self.forks, row).tolist(), keep) for row, keep in enumerate(keeps)]


class Attribution(enum.Enum):
    """Whether a version generated its trajectories."""

    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    NOT_TOLD = "not told apart"  #: rounding hides what an update changed, or there are too few tokens


@dataclass(frozen=True, slots=True)
class Stretch:
    """Sampled tokens that another version generated: from `start` to before `end` in the answer of a trajectory."""

    trajectory: TrajectoryId
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class NeighborCheck:
    """The scorer's result under the version before or after that of the trajectories; medians over their tokens."""

    version: VersionId
    difference: float  #: median |Δ log-prob|
    k3: float  #: median of exp(Δ) - 1 - Δ
    evidence: float  #: against it and for the version of the trajectories, in nats
    needed: float  #: evidence that decides, for or against
    foreign: tuple[Stretch, ...]  #: that it generated; at most one of each trajectory


@dataclass(frozen=True, slots=True)
class VersionCheck:
    """The scorer's result for the trajectories of one version; medians over their tokens."""

    version: VersionId
    num_trajectories: int
    num_tokens: int  #: sampled
    difference: float  #: median |Δ log-prob| under the version
    k3: float  #: median of exp(Δ) - 1 - Δ under the version
    tolerance: float
    neighbors: tuple[NeighborCheck, ...]  #: that are stored; at least one

    @property
    def attribution(self) -> Attribution:
        """Whether the log-probs agree under the version, and better than under its neighbors."""
        if self.difference >= self.tolerance or any(n.foreign or n.evidence <= -n.needed for n in self.neighbors):
            return Attribution.REFUTED
        is_shown = all(n.evidence >= n.needed for n in self.neighbors)
        return Attribution.CONFIRMED if is_shown else Attribution.NOT_TOLD


@dataclass(frozen=True, slots=True)
class DeepReport:
    """One check per version that is still stored together with a neighbor."""

    checks: tuple[VersionCheck, ...]
    skipped: tuple[int, ...]  #: versions not compared: they or their neighbors are not stored completely
    altered: tuple[str, ...] = ()  #: a message for each file or line that differs from what was recorded

    @property
    def ok(self) -> bool:
        """Whether at least one version was confirmed, and nothing is violated. Other versions prove nothing."""
        return self.has_confirmed and not self.violations and not self.altered

    @property
    def has_confirmed(self) -> bool:
        """Whether at least one version was confirmed."""
        return any(check.attribution is Attribution.CONFIRMED for check in self.checks)

    @property
    def violations(self) -> tuple[VersionCheck, ...]:
        """The versions that did not generate all of their trajectories."""
        return tuple(check for check in self.checks if check.attribution is Attribution.REFUTED)


def encode_kept(kept: KeptTrajectory) -> bytes:
    """Return one line of `trajectories.jsonl`."""
    return msgspec.json.encode(kept) + b"\n"


def read_kept(path: Path) -> Iterator[KeptTrajectory]:
    """Return the lines of `trajectories.jsonl`; a torn last line is left out."""
    for number, line in enumerate(foreign.read_lines(path, max_bytes=files.MAX_TRAJECTORY_BYTES), start=1):
        try:
            kept = msgspec.json.decode(line, type=KeptTrajectory)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
            raise ConfigError(f"{path}, line {number}: not a kept trajectory: {err}") from err
        if len(kept.tokens) != len(kept.logprobs):
            raise ConfigError(f"{path}, line {number}: {len(kept.tokens)} tokens, {len(kept.logprobs)} log-probs")
        try:
            kept.rows()
        except (ValueError, OverflowError) as err:
            raise ConfigError(f"{path}, line {number}: trajectory {kept.trajectory}: {err}") from err
        yield kept


def altered_rows(
    path: Path, stored: TokenStore, *, tags: Mapping[GroupId, VersionId], group_size: int, evaluated: Sequence[int]
) -> Iterator[str]:
    """Yield a message for each line of `trajectories.jsonl` that differs from the records or repeats a trajectory.

    `tags`: versions of groups. `evaluated`: prompt lengths of the samples of one evaluation.
    """
    seen = set()
    for number, kept in enumerate(read_kept(path), start=1):
        answer, prompt = stored.answers.get(kept.trajectory), stored.prompts.get(kept.group)
        is_same = (
            (
                _is_of_evaluation(kept, evaluated)
                if kept.trajectory < 0
                else (
                    prompt is not None
                    and kept.outcome != EVALUATION
                    and kept.group == group_of(kept.trajectory, group_size=group_size)
                    and kept.version == tags.get(kept.group)
                    and kept.prompt_tokens == tuple(prompt.tokens)
                )
            )
            and (_has(answer, kept) if answer is not None else not kept.tokens)  # its environment failed at once
        )
        if not is_same:
            yield f"{path}, line {number}: trajectory {kept.trajectory} is not what journal and token store have"
        if kept.trajectory in seen:
            yield f"{path}, line {number}: trajectory {kept.trajectory} is there a second time"
        seen.add(kept.trajectory)


def _has(answer: StoredAnswer, kept: KeptTrajectory) -> bool:
    """Whether an answer is the kept one. That of a dropped group may have got more tokens until its request stopped."""
    end = len(answer.tokens) if kept.outcome in ("trained", EVALUATION) else len(kept.tokens)
    return (
        kept.tokens == tuple(answer.tokens[:end])
        and np.array_equal(np.asarray(kept.logprobs, np.float32), answer.logprobs[:end])
        and np.array_equal(kept.is_sampled, answer.loss_mask[:end])
        and kept.forks == tuple(fork for fork in answer.forks if fork.start < end)
    )


def _is_of_evaluation(kept: KeptTrajectory, evaluated: Sequence[int]) -> bool:
    """Whether version and prompt length are those of the sample's id; the token store does not have its prompt."""
    if not evaluated:
        return False
    version, index = evaluation_index(kept.trajectory, num_samples=len(evaluated))
    found = (kept.outcome, kept.group, kept.version, len(kept.prompt_tokens))
    return found == (EVALUATION, NO_GROUP, version, evaluated[index])


def deep_check(
    kept: Iterable[KeptTrajectory],
    *,
    score: Score,
    versions: Callable[[VersionId], Path | None],
    dtypes: Sequence[str] = ("float32",),
) -> DeepReport:
    """Recompute log-probs under v, v - 1 and v + 1.

    `versions` returns a version's model folder, or None if it is no longer stored; `dtypes`: of engine and scorer.
    """
    tolerance = max(TOLERANCE[dtype] for dtype in dtypes)
    by_version: dict[VersionId, list[KeptTrajectory]] = {}
    for trajectory in kept:
        # A held-out set has its own temperature.
        if trajectory.is_sampled.any() and trajectory.outcome != EVALUATION:
            by_version.setdefault(trajectory.version, []).append(trajectory)
    checks: list[VersionCheck] = []
    skipped: list[int] = []
    for version, trajectories in sorted(by_version.items()):
        folder = versions(version)
        stored = {VersionId(n): versions(VersionId(n)) for n in (version - 1, version + 1) if n >= 0}
        neighbors = {n: found for n, found in stored.items() if found is not None}
        if folder is None or not neighbors:
            skipped.append(version)
        else:
            checks.append(
                _check(version, trajectories, score=score, folder=folder, neighbors=neighbors, tolerance=tolerance)
            )
    return DeepReport(tuple(checks), tuple(skipped))


def _check(
    version: VersionId,
    trajectories: Sequence[KeptTrajectory],
    *,
    score: Score,
    folder: Path,
    neighbors: Mapping[VersionId, Path],
    tolerance: float,
) -> VersionCheck:
    rows = [row for t in trajectories for row in t.rows()]
    is_sampled = np.concatenate([t.is_sampled for t in trajectories])
    recorded = np.concatenate([np.asarray(t.logprobs, np.float64) for t in trajectories])[is_sampled]
    borders = np.cumsum([int(t.is_sampled.sum()) for t in trajectories])[:-1]

    def delta(model: Path) -> npt.NDArray[np.float64]:
        scored = _scored(score, model, rows).astype(np.float64)[is_sampled] - recorded
        finite_or_inf: npt.NDArray[np.float64] = np.nan_to_num(scored, nan=np.inf)
        return finite_or_inf

    def compare(neighbor: VersionId, model: Path) -> NeighborCheck:
        there = delta(model)
        evidence = _evidence(np.abs(own), np.abs(there), recorded)
        walk = math.sqrt(min(float((evidence**2).sum()), MOST_SQUARE * len(evidence)))
        answers = zip(trajectories, np.split(evidence, borders), strict=True)
        return NeighborCheck(
            neighbor,
            difference=float(np.median(np.abs(there))),
            k3=_k3(there),
            evidence=float(evidence.sum()),
            needed=max(DECISIVE, DEVIATIONS * walk),
            foreign=tuple(found for answer, nats in answers if (found := _foreign(answer, nats)) is not None),
        )

    own = delta(folder)
    return VersionCheck(
        version=version,
        num_trajectories=len(trajectories),
        num_tokens=len(recorded),
        difference=float(np.median(np.abs(own))),
        k3=_k3(own),
        tolerance=tolerance,
        neighbors=tuple(compare(neighbor, model) for neighbor, model in neighbors.items()),
    )


def _k3(delta: npt.NDArray[np.float64]) -> float:
    finite = np.clip(delta, -100.0, 100.0)
    return float(np.median(np.expm1(finite) - finite))


def _evidence(
    own: npt.NDArray[np.float64], other: npt.NDArray[np.float64], logprobs: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return each token's log-likelihood ratio of its own version to another one, from both |Δ log-prob|."""
    evidence = np.empty_like(own)
    for alike in np.array_split(np.argsort(logprobs, kind="stable"), max(1, len(logprobs) // ALIKE)):
        here, there = np.minimum(own[alike], 1e9), np.minimum(other[alike], 1e9)  # a log-prob may be NaN
        rounding = max(LEAST_ROUNDING, float(np.median(np.minimum(here, there))) / math.log(2))
        evidence[alike] = np.clip((there - here) / rounding, -MOST_PER_TOKEN, MOST_PER_TOKEN)
    return evidence


def _foreign(trajectory: KeptTrajectory, evidence: npt.NDArray[np.float64]) -> Stretch | None:
    """Return the stretch with most evidence against the version, if that is decisive."""
    against = np.concatenate(([0.0], np.cumsum(-evidence - LEAST_IN_STRETCH)))
    rises = against - np.minimum.accumulate(against)
    last = int(rises.argmax())
    if rises[last] < DECISIVE:
        return None
    positions = np.flatnonzero(trajectory.is_sampled)
    first = int(against[: last + 1].argmin())
    return Stretch(trajectory.trajectory, int(positions[first]), int(positions[last - 1]) + 1)


def _scored(score: Score, model: Path, rows: Sequence[tuple[Sequence[int], int]]) -> npt.NDArray[np.float32]:
    """Return the log-probs of the own parts of all rows; 0 for the first token of one that begins without a prompt."""
    scored = score(model, [ids for ids, _ in rows], [max(1, keep) for _, keep in rows])
    parts = [np.pad(part, (0 if keep else 1, 0)) for (_, keep), part in zip(rows, scored, strict=True)]
    return np.concatenate(parts)


def render_deep(report: DeepReport) -> str:
    """Return the report as lines for a terminal."""
    lines = []
    for c in report.checks:
        under = "".join(f", {n.difference:.2e} under {n.version}" for n in c.neighbors)
        lines.append(
            f"version {c.version}: {c.num_trajectories} trajectories, {c.num_tokens} tokens, median |Δ log-prob| "
            f"{c.difference:.2e} under it{under}{_said(c)}"
        )
        lines += [
            f"  trajectory {found.trajectory}: tokens {found.start} to {found.end - 1} are of version {n.version}"
            for n in c.neighbors
            for found in n.foreign
        ]
    lines += [f"VIOLATION damage: {message}" for message in report.altered]
    if report.skipped:
        lines.append(f"versions {list(report.skipped)}: not checked, they or their neighbors are not stored")
    if not report.checks:
        skipped, empty = "keep more versions (weights.keep = 0: all)", "no trajectory with tokens was kept"
        lines.append(f"NOTHING WAS COMPARED: {skipped if report.skipped else empty}")
    elif not report.has_confirmed and not report.violations:
        lines.append("NOTHING WAS PROVED: keep more trajectories of each step (log.trajectories_per_step)")
    return "\n".join(map(one_line, lines))


def _said(check: VersionCheck) -> str:
    if check.attribution is Attribution.REFUTED:
        return "  VIOLATION C1: not all generated by this version"
    if check.attribution is Attribution.CONFIRMED:
        return ""
    is_short = MOST_PER_TOKEN * check.num_tokens < 2 * DECISIVE
    return f"  NOT TOLD APART: {'too few tokens' if is_short else 'rounding hides what an update changed'}"
