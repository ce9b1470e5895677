"""Tokens and log-probs of all trajectories in memory, which the decision core never sees.

Invariant: tokens are only appended, each with its log-prob, and by one attempt at a time. Tokens of an older attempt
are refused, because a server that was declared lost may still send some.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from dora.core.ids import GroupId, StepId, TrajectoryId, Truncation
from dora.engine.api import AskedRouting
from dora.journal.choices import READ_AGAIN, SAMPLED, Choices, runs
from dora.journal.rows import EpisodeRow, Fork, repeated, row_ids, rows_of
from dora.observe.tokens import TokenLedger
from dora.routing import Chosen, RoutingShape
from dora.tasks.prompts import Prompt


class TokenLog(Protocol):
    """A store of tokens for a resume and the audit."""

    def prompt(self, group: int, tokens: Sequence[int], *, digest: bytes, group_size: int) -> None: ...

    def append(
        self,
        trajectory: int,
        attempt: int,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        *,
        start: int,
        loss_mask: Sequence[int] | None = None,
        fork: Fork | None = None,
    ) -> None: ...

    def choose(self, trajectory: int, attempt: int, experts: bytes, marks: bytes, *, start: int) -> None: ...


class TrajectoryRecord:
    """The data of one trajectory."""

    __slots__ = (
        "attempt",
        "awaits_token",
        "began_at",
        "choices",
        "forks",
        "logprobs",
        "metrics",
        "observed",
        "prompt",
        "reward",
        "terms",
        "tokens",
        "truncated",
        "turn_rewards",
        "turn_tokens",
        "verdicts",
    )

    def __init__(self, prompt: Prompt, *, routing: RoutingShape | None = None) -> None:
        """`routing`: of the choices of experts that are kept; None: none are."""
        self.prompt = prompt
        self.choices = Choices(routing.row_bytes) if routing is not None else None
        self.tokens = array("i")  #: of the answer so far: sampled, and of observations
        self.logprobs = array("f")  #: behavior log-probs, one per token; 0 for those of observations
        self.observed: list[tuple[int, int]] = []  #: start and end of each observation
        self.forks: list[Fork] = []  #: where each row but the first begins
        self.attempt = -1  #: the attempt that may append
        self.awaits_token = False  #: its present request has got no token yet
        self.began_at: float | None = None  #: when this controller first sent a request for it
        self.turn_rewards: list[float] = []  #: rewards that the environment gave
        self.turn_tokens = 0  #: limit of the present turn; 0: that of the answer
        self.reward: float | None = None
        self.terms: tuple[tuple[str, float], ...] = ()  #: of the reward, by name, if this controller ordered it
        self.metrics: tuple[tuple[str, float], ...] = ()  #: what its environment measured, by name
        self.verdicts: tuple[tuple[str, str], ...] = ()  #: of judges: name of the term, and what it said
        self.truncated: Truncation = ""

    @property
    def turn_start(self) -> int:
        """Position of the first token of the current turn."""
        return self.observed[-1][1] if self.observed else 0

    @property
    def prompt_end(self) -> int:
        """Number of tokens of the answer that are a prompt of its own; 0 if it has that of its group."""
        return self.observed[0][1] if self.observed and not self.observed[0][0] else 0

    def parts(self) -> Iterator[tuple[Literal["policy", "environment"], int, int]]:
        """Yield the turns and observations of the answer in order: whose it is, and its start and end."""
        at, end = 0, len(self.tokens)
        for start, after in [*self.observed, (end, end)]:
            if at < start:
                yield "policy", at, start
            if start < after:
                yield "environment", start, after
            at = after

    def loss_mask(self) -> array[int]:
        """Return 1 for each sampled token and 0 for each of an observation."""
        mask = array("B", b"\x01") * len(self.tokens)
        for start, end in self.observed:
            mask[start:end] = array("B", bytes(end - start))
        return mask

    def context(self) -> array[int]:
        """Return the tokens that the next request continues: those of the latest row."""
        return row_ids(array("i", self.prompt.tokens), self.tokens, self.forks, len(self.forks))

    def rows(self) -> list[EpisodeRow]:
        """Return its rows for the trainer."""
        return self._rows(array("i", self.prompt.tokens), self.tokens)

    def _rows(self, prompt: array[int], answer: array[int]) -> list[EpisodeRow]:
        mask = self.loss_mask().tobytes()
        return rows_of(prompt, answer, mask=mask, logprobs=self.logprobs, forks=self.forks)

    def _places(self) -> tuple[array[int], array[int]]:
        """Return the places of the tokens of prompt and answer, counted through both."""
        first = len(self.prompt.tokens)
        return array("i", range(first)), array("i", range(first, first + len(self.tokens)))

    def context_places(self) -> NDArray[np.int64]:
        """Return the place of each token of `context`."""
        prompt, answer = self._places()
        return np.array(row_ids(prompt, answer, self.forks, len(self.forks)), np.int64)

    def row_places(self) -> list[NDArray[np.int64]]:
        """Return the place of each token of each of `rows`."""
        return [np.array(row.ids, np.int64) for row in self._rows(*self._places())]

    def rewards_to_go(self, reward: float | None) -> list[float]:
        """Return for each turn the sum of its and all later rewards. `reward`: the sum of all; None gives NaN."""
        left = math.nan if reward is None else reward
        num_earlier = len(self.observed) - bool(self.prompt_end)
        earlier = self.turn_rewards[:num_earlier]  # one for each observation after a turn; the last turn gets the rest
        return [left - given for given in accumulate(earlier, initial=0.0)]

    @property
    def repeated(self) -> int:
        """Number of tokens that rows repeat from earlier rows."""
        return repeated(self.forks)


class Trajectories:
    """All records, by trajectory id."""

    def __init__(
        self,
        log: TokenLog,
        *,
        group_size: int,
        ledger: TokenLedger | None = None,
        on_first_token: Callable[[TrajectoryId], None] = lambda trajectory: None,
        routing: RoutingShape | None = None,
    ) -> None:
        """`ledger`: the account of the run so far. `on_first_token` is called with the first tokens of each request.
        `routing`: what engines choose for each token of training, if that is kept."""
        self.ledger = ledger or TokenLedger(group_size=group_size)
        self._log = log
        self._on_first_token = on_first_token
        self.routing = routing
        self._group_size = group_size
        self.records: dict[TrajectoryId, TrajectoryRecord] = {}
        self.prompts: dict[GroupId, Prompt] = {}  #: of groups that are not forgotten, and of those not admitted yet
        self.refused_tokens = 0  #: of older attempts
        self._recalled: dict[StepId, list[GroupId]] = {}

    def admit(self, group: GroupId) -> None:
        """Create the records of a group's siblings."""
        prompt = self.prompts[group]
        self._log.prompt(group, prompt.tokens, digest=prompt.digest, group_size=self._group_size)
        for sibling in self.siblings(group):
            self.records[sibling] = TrajectoryRecord(prompt, routing=self.routing)

    def open(self, trajectory: TrajectoryId, prompt: Prompt) -> None:
        """Create a record, unless there is one."""
        routing = self.routing if trajectory >= 0 else None  # nothing is trained on evaluations
        self.records.setdefault(trajectory, TrajectoryRecord(prompt, routing=routing))

    def recall(self, group: GroupId, prompt: Prompt, *, step: StepId) -> None:
        """Create the records of a group of a step that is trained again."""
        self.prompts[group] = prompt
        for sibling in self.siblings(group):
            self.open(sibling, prompt)
        self._recalled.setdefault(step, []).append(group)

    def forget_recalled(self, *, before: StepId) -> None:
        """Delete the data of recalled groups of earlier steps, which have been trained again."""
        for step in [step for step in self._recalled if step < before]:
            self.forget(self._recalled.pop(step))

    def begin(self, trajectory: TrajectoryId, attempt: int) -> TrajectoryRecord:
        """Begin a new attempt; only it may append from now on."""
        record = self.records[trajectory]
        record.attempt = attempt
        record.awaits_token = True
        return record

    def append(self, trajectory: TrajectoryId, attempt: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append tokens; those of an older attempt are refused."""
        record = self.records.get(trajectory)
        if record is None or record.attempt != attempt:
            self.refused_tokens += len(tokens)
            return
        start = len(record.tokens)
        record.tokens.extend(tokens)
        record.logprobs.extend(logprobs)
        self.ledger.append(trajectory, len(tokens))
        self._log.append(trajectory, attempt, tokens, logprobs, start=start)
        if record.awaits_token:
            record.awaits_token = False
            self._on_first_token(trajectory)

    def asked_routing(self, record: TrajectoryRecord) -> AskedRouting | None:
        """Return which choices a request that continues the trajectory is asked for: those that are not known."""
        if record.choices is None or self.routing is None:
            return None
        places = record.context_places()
        return AskedRouting(self.routing, min(record.choices.first_unknown(places), len(places) - 1))

    def choose(
        self, trajectory: TrajectoryId, attempt: int, chosen: Chosen, *, num_context: int, was_reread: bool = False
    ) -> None:
        """Keep what the engine chose in a request that continued `num_context` tokens. `was_reread`: the server read
        tokens of the request a second time, it is not known which."""
        record = self.records.get(trajectory)
        if record is None or record.attempt != attempt or record.choices is None:
            return
        rows = len(chosen.experts)
        places = record.context_places()[chosen.start :][:rows]
        if len(places) < rows:
            raise ValueError(f"trajectory {trajectory}: choices for {rows} tokens, of which {len(places)} are known")
        sampled = np.concatenate([np.zeros(len(record.prompt.tokens), bool), np.array(record.loss_mask(), bool)])
        followed_by_sampled = sampled[record.context_places()][chosen.start + 1 :][:rows]
        is_earlier = np.arange(chosen.start + 1, chosen.start + 1 + rows) < num_context
        marks = np.where(followed_by_sampled & (is_earlier | was_reread), READ_AGAIN, SAMPLED).astype(np.uint8)
        experts = np.ascontiguousarray(chosen.experts.astype(chosen.experts.dtype.newbyteorder("<"), copy=False))
        for start, end in runs(places):
            data = experts[start:end].tobytes(), marks[start:end].tobytes()
            record.choices.put(int(places[start]), *data)
            self._log.choose(trajectory, attempt, *data, start=int(places[start]))

    def observe(
        self, trajectory: TrajectoryId, attempt: int, tokens: Sequence[int], *, fork: Fork | None = None
    ) -> None:
        """Append the tokens of an observation, which the policy did not sample; `attempt`: of the call.

        `fork`: the origin of the new row that begins with these tokens, if the answer could not be continued.
        """
        record = self.records[trajectory]
        start, end = len(record.tokens), len(record.tokens) + len(tokens)
        zeros = [0] * len(tokens)
        record.tokens.extend(tokens)
        record.logprobs.extend(zeros)
        record.observed.append((start, end))
        if fork is not None:
            record.forks.append(fork)
        logprobs = record.logprobs[start:end]
        self._log.append(trajectory, attempt, tokens, logprobs, start=start, loss_mask=zeros, fork=fork)

    def fence(self, trajectories: Iterable[TrajectoryId]) -> dict[TrajectoryId, int]:
        """End the current attempts; return the number of tokens of each trajectory."""
        counts = {}
        for trajectory in trajectories:
            record = self.records.get(trajectory)
            if record is not None:
                record.attempt = -1
                counts[trajectory] = len(record.tokens)
        return counts

    def siblings(self, group: GroupId) -> list[TrajectoryId]:
        """Return the ids of a group's trajectories."""
        first = group * self._group_size
        return [TrajectoryId(id) for id in range(first, first + self._group_size)]

    def forget(self, groups: Iterable[GroupId]) -> None:
        """Delete the data of trained or dropped groups."""
        for group in groups:
            self.prompts.pop(group, None)
            for sibling in self.siblings(group):
                self.records.pop(sibling, None)
