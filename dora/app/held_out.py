"""The answers to held-out prompts, one by one, from the journal of a run; and the results of an evaluation.

Invariant: results are a function of the journal, so they are the same on every reading, and do not depend on how often
an evaluation was resumed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec

from dora import files, foreign
from dora.config.recorded import read_recorded
from dora.controller.evaluations import pass_at_k
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import TrajectoryId, VersionId, evaluation_id
from dora.core.on_calls import RESTARTED
from dora.core.phases import TrajectoryPhase
from dora.core.state import State
from dora.core.tables import Trajectory
from dora.errors import ConfigError, RunFailed, kind_of, one_line
from dora.journal.codec import Note
from dora.journal.reader import Journal
from dora.journal.replay import replay
from dora.journal.run_folder import RunFolder
from dora.observe.estimates import Interval, interval

#: The note about a held-out set.
HELD_OUT_SET: Final = "held-out set"
#: Number of causes of failures that are told apart.
MAX_CAUSES: Final = 20
#: A million answers take 6 MB.
MAX_RESULTS_BYTES: Final = 64 << 20
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]


class SetFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the journal notes of a held-out set (`EvalSet.facts`)."""

    name: str
    source: str
    prompts: _Count
    samples: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
    temperature: float
    skipped: _Count  #: rows without a prompt, or with one over the limit
    digest: str


@dataclass(frozen=True, slots=True)
class HeldOutAnswer:
    """What became of one sample."""

    reward: float | None  #: None: it failed
    num_tokens: int
    truncated: bool  #: a budget ended it
    failure: str  #: why it has no reward; "" if it has one


class SetResult(msgspec.Struct, frozen=True, kw_only=True):
    """The score on one set."""

    name: str
    source: str
    prompts: int
    samples: int  #: answers per prompt
    temperature: float
    skipped: int
    digest: str  #: of the prompts with their answers
    mean: float | None  #: over all graded answers; None if there is none
    interval: Interval | None  #: of the mean, 95 %
    pass_at: dict[int, float]  #: pass@k for k = 1, 2, 4, ... samples; a right answer has a reward of at least 1
    graded: int  #: answers
    failed: dict[str, int]  #: answers without a reward, by cause
    truncated: int  #: answers that the budget of tokens, turns or time has ended
    mean_tokens: float
    max_tokens: int
    rewards: list[list[float | None]]  #: of each prompt in order; None: failed


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of results.json."""

    run_id: str
    model: str
    seed: int
    seconds: float  #: time taken, that of earlier controllers included
    sets: list[SetResult]


class HeldOut:
    """All evaluations of a run that have ended."""

    def __init__(self, folder: RunFolder) -> None:
        """RunFailed if this version of DORA does not decide as the journal says."""
        journal = Journal(folder.journal)
        self.run_id = journal.header.run_id
        self.sets = [*_sets(journal)]
        self._size = len(journal.header.settings.eval_prompt_tokens)
        if sum(one.prompts * one.samples for one in self.sets) != self._size:
            raise ConfigError(f"{folder.root}: its journal does not say which held-out prompts the answers belong to")
        noted = _Noted()
        found = replay(journal.header.settings, journal, projection=noted)
        if found.difference is not None:
            raise RunFailed(f"{folder.root}: the journal cannot be read: {found.difference}")
        self.seconds = found.state.now
        self._ended = noted.ended
        self._failures = noted.failures

    @property
    def versions(self) -> list[VersionId]:
        return sorted(self._ended)

    def answers(self, version: VersionId, chosen: SetFacts) -> list[list[HeldOutAnswer]]:
        """Return the answers to each prompt of a set."""
        first = sum(one.prompts * one.samples for one in self.sets[: self.sets.index(chosen)])
        samples = [self._answer(version, first + i) for i in range(chosen.prompts * chosen.samples)]
        return [samples[i : i + chosen.samples] for i in range(0, len(samples), chosen.samples)]

    def rewards(self, version: VersionId, chosen: SetFacts) -> list[list[float]]:
        """Return the rewards of the graded answers to each prompt of a set."""
        return [[answer.reward for answer in one if answer.reward is not None] for one in self.answers(version, chosen)]

    def _answer(self, version: VersionId, index: int) -> HeldOutAnswer:
        id = evaluation_id(version, index, num_samples=self._size)
        sample = self._ended[version][id]
        failure = self._failures.get(id, "unknown") if sample.reward is None else ""
        return HeldOutAnswer(sample.reward, sample.num_tokens, bool(sample.truncated), failure)


@dataclass
class _Noted:
    """A projection that keeps the samples of evaluations, and why some of them failed."""

    ended: dict[VersionId, dict[TrajectoryId, Trajectory]] = field(default_factory=dict)
    failures: dict[TrajectoryId, str] = field(default_factory=dict)
    _running: dict[TrajectoryId, Trajectory] = field(default_factory=dict)

    def before(self, state: State, event: ev.Event) -> None:
        match event:
            case ev.TrajectoryGraded(reward=None):
                self._note(event.trajectory, f"grading: {event.reason}")
            case ev.GenerationFailed():
                self._note(event.trajectory, f"generation: {event.reason}")
            case ev.CallFinished(failed=failed) if failed:
                self._note(event.trajectory, f"environment: {failed}")
            case ev.ControllerRestarted():
                for id, sample in state.evaluation.trajectories.items():
                    if sample.phase is TrajectoryPhase.CALLING and id not in event.replayable:
                        self._note(id, f"environment: {RESTARTED}")

    def _note(self, trajectory: TrajectoryId, failure: str) -> None:
        if trajectory < 0:
            self.failures[trajectory] = one_line(failure)

    def apply(self, state: State, event: ev.Event, commands: Sequence[cmd.Command]) -> None:
        for command in commands:
            if isinstance(command, cmd.ReportEvaluation):
                self.ended[command.version] = self._running
        if state.evaluation.trajectories:
            self._running = state.evaluation.trajectories


def _sets(journal: Journal) -> Iterator[SetFacts]:
    for record in journal.records():
        if isinstance(record, Note) and record.name == HELD_OUT_SET:
            try:
                yield msgspec.convert(record.values, SetFacts)
            except msgspec.ValidationError as err:
                raise ConfigError(f"{journal.path}: a note about a held-out set is damaged: {err}") from err


# -- results ----------------------------------------------------------------------------------------------------------


def results(folder: RunFolder) -> Results:
    """Return the results of an evaluation; ConfigError if it has not ended."""
    held_out = HeldOut(folder)
    if not held_out.versions:
        raise ConfigError(f"{folder.root}: the evaluation has not ended; continue it with dora eval --resume")
    config = read_recorded(folder.config, environ={})
    return Results(
        run_id=held_out.run_id,
        model=config.model.path,
        seed=config.run.seed,
        seconds=held_out.seconds,
        sets=[set_result(one, held_out.answers(held_out.versions[-1], one)) for one in held_out.sets],
    )


def set_result(facts: SetFacts, answers: Sequence[Sequence[HeldOutAnswer]]) -> SetResult:
    """Return the score on a set, given the answers to each prompt."""
    rewards = [[answer.reward for answer in one] for one in answers]
    graded = [[reward for reward in one if reward is not None] for one in rewards]
    counts = [(sum(reward >= 1.0 for reward in one), len(one)) for one in graded]
    flat = [answer for one in answers for answer in one]
    known = [reward for one in graded for reward in one]
    sizes = sorted({*(2**i for i in range(facts.samples.bit_length())), facts.samples})
    lengths = [answer.num_tokens for answer in flat]
    return SetResult(
        **msgspec.structs.asdict(facts),
        mean=sum(known) / len(known) if known else None,
        interval=interval(graded),
        pass_at={k: share for k in sizes if (share := pass_at_k(counts, k=k)) is not None},
        graded=len(known),
        failed=_by_cause([answer.failure for answer in flat if answer.reward is None]),
        truncated=sum(answer.truncated for answer in flat),
        mean_tokens=sum(lengths) / len(lengths) if lengths else 0.0,
        max_tokens=max(lengths, default=0),
        rewards=rewards,
    )


def _by_cause(failures: Sequence[str]) -> dict[str, int]:
    """Count failures by cause, the most frequent ones first. A cause is told as its first failure."""
    first: dict[str, str] = {}
    counts = Counter(first.setdefault(kind_of(failure), failure) for failure in failures).most_common()
    found = dict(counts[:MAX_CAUSES])
    if len(counts) > MAX_CAUSES:
        found["other causes"] = sum(count for _, count in counts[MAX_CAUSES:])
    return found


def write_results(folder: RunFolder) -> Results:
    """Compute the results of an evaluation that has ended, and write them into its folder."""
    found = results(folder)
    files.replace(folder.results, msgspec.json.encode(found) + b"\n")
    return found


def read_results(folder: RunFolder) -> Results:
    """Return the contents of results.json."""
    try:
        return msgspec.json.decode(foreign.read(folder.results, max_bytes=MAX_RESULTS_BYTES), type=Results)
    except FileNotFoundError:
        raise ConfigError(
            f"{folder.root}: has no {folder.results.name}: it is not an evaluation that has ended"
        ) from None
    except OSError as err:
        raise ConfigError(f"{folder.results}: cannot be read: {err.strerror}") from err
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise ConfigError(f"{folder.results}: does not have the results of an evaluation: {err}") from err
