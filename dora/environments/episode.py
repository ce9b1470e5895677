"""The tokens of one episode, and the rows that it becomes for the trainer.

Invariants: the answer is only appended to; it has every sampled token (mask 1) and every token between turns (mask 0).
A request continues the tokens of the current row, never text. A row that can no longer be continued stays unchanged,
and a fork begins a new row with a prefix of an earlier row. So each sampled token has mask 1 in exactly one row.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import msgspec

from dora.core.ids import ForkCause
from dora.environments.api import Turn
from dora.environments.messages import arguments_key, assistant_message
from dora.environments.renderer import Message, Renderer, RenderingFailed, Tool
from dora.environments.shapes import MessageShape, shapes_of
from dora.journal.rows import EpisodeRow, Fork, answer_bound, row_ids, rows_of


@dataclass(frozen=True, slots=True)
class _TurnAt:
    """The place of a sampled turn: tokens [start, end) of its row, after `num_messages` messages."""

    start: int
    end: int
    num_messages: int


#: The number of messages that are equal, the row, and the turn after which they end or before which they end.
_Match = tuple[int, int, _TurnAt]


@dataclass(slots=True)
class _Branch:
    """The conversation of one row."""

    fork: Fork
    messages: list[Message]
    cause: ForkCause = ""
    shapes: list[MessageShape] = field(default_factory=list)  # of messages before the last turn, which are as they are
    turns: list[_TurnAt] = field(default_factory=list)


class _Continuation(NamedTuple):
    """Where a conversation continues: the first `keep` tokens of a row, and the tokens to append."""

    cause: ForkCause  # why a new row begins, if one has to
    row: int
    keep: int
    added: list[int]


class Episode:
    """The tokens of an episode in the order in which they came, with log-probs and loss mask.

    `append` and `end_turn` record a sampled turn; then `observe` or `rewrite` adds what follows it.
    """

    __slots__ = (
        "_branches",
        "_num_calls",
        "_renderer",
        "_start",
        "logprobs",
        "mask",
        "max_row_tokens",
        "max_tokens",
        "prompt",
        "tokens",
        "tools",
        "truncated",
    )

    def __init__(
        self,
        renderer: Renderer,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        max_row_tokens: int | None = None,
        tools: Sequence[Tool] = (),
        prompt: Sequence[int] = (),
        own_prompt: bool = False,
    ) -> None:
        """`messages`: the first prompt, if it is not tokens; `prompt`: its tokens, if they are known. `own_prompt`: the
        prompt is part of the answer, and `begin` adds it.

        `max_tokens`: bound of the answer, observations included. `max_row_tokens`: bound of all rows together; None: no
        bound.
        RenderingFailed: `messages` cannot be rendered.
        """
        conversation = conversation_of(messages) if messages or not (prompt or own_prompt) else []
        self.prompt = array("i", prompt or renderer.render(conversation, tools=tools) if not own_prompt else ())
        self.tokens = array("i")  #: the answer: sampled tokens and those between turns
        self.mask = bytearray()  #: 1 for a sampled token
        self.logprobs = array("f")  #: 0 where the mask is 0
        self.max_tokens = max_tokens
        self.max_row_tokens = max_row_tokens
        self.tools = tuple(tools)
        self.truncated = False  #: an observation was cut, because the answer or the rows reached their bound
        self._renderer = renderer
        self._num_calls = 0
        self._branches = [_Branch(Fork(start=0, parent=0, keep=len(self.prompt)), conversation)]
        self._start = len(self.prompt)  # where the next sampled turn begins in the current row

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation so far, sampled turns as parsed."""
        return self._branches[-1].messages

    @property
    def forks(self) -> Sequence[Fork]:
        """The fork that began each row; the first row has none."""
        return [branch.fork for branch in self._branches[1:]]

    @property
    def fork_causes(self) -> Sequence[ForkCause]:
        """Why each of these forks was made."""
        return [branch.cause for branch in self._branches[1:]]

    def context(self) -> list[int]:
        """Return the tokens that the next request continues."""
        return self._row(len(self._branches) - 1).tolist()

    def begin(self, messages: Sequence[Message], *, tools: Sequence[Tool] = (), tokens: Sequence[int] = ()) -> int:
        """Append a prompt of its own, messages or tokens; return its number of tokens. RenderingFailed as above.

        The answer may have as many tokens more.
        """
        conversation = [] if tokens else conversation_of(messages)
        added = self._renderer.require_known(tokens) if tokens else self._renderer.begin(conversation, tools=tools)
        self.tools = tuple(tools)
        self._branches[0].messages = conversation
        self.max_tokens += len(added)
        return self._add(added)

    def append(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append sampled tokens of the current turn; they may come in several parts, from several servers."""
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs)
        self.mask.extend(b"\x01" * len(tokens))

    def end_turn(self, finish: Literal["stop", "length"]) -> Turn:
        """Parse the turn that was sampled, and add it to the conversation."""
        row, branch = self._row(len(self._branches) - 1), self._branches[-1]
        turn = self._renderer.parse(
            row[self._start :],
            prompt=row[: self._start],
            tools=self.tools,
            finish=finish,
            first_call=self._num_calls,
        )
        turn = replace(turn, num_tokens=len(row) - self._start, num_prompt_tokens=self._start)
        self._num_calls += len(turn.calls)
        branch.turns.append(_TurnAt(self._start, len(row), len(branch.messages)))
        branch.messages.append(assistant_message(turn))
        return turn

    def observe(self, messages: Sequence[Message]) -> int:
        """Append what the environment answered to the turn; return the number of tokens of the answer.

        The tokens are cut so that one more can be sampled; then the episode is `truncated`.
        """
        branch, row = self._branches[-1], self._row(len(self._branches) - 1)
        new = conversation_of(messages, after=branch.messages[-1:])
        if branch.turns and branch.turns[-1].end == len(row):
            start, last = branch.turns[-1].start, branch.turns[-1].num_messages
            branch.shapes += shapes_of(branch.messages[len(branch.shapes) : last])
            newest = shapes_of([*branch.messages[last:], *new])
            self._renderer.require_shapes([*branch.shapes, *newest], tools=self.tools)
            added = self._renderer.bridge(row[:start], row[start:], new, tools=self.tools)
            if added is not None:
                branch.messages.extend(new)
                return self._add(added)
        return self.rewrite([*branch.messages, *messages])

    def rewrite(self, messages: Sequence[Message]) -> int:
        """Continue with a whole conversation, which an environment or agent may have changed.

        If `messages` extend an earlier conversation of this episode, they continue the tokens of the longest one. If
        they extend none, or those tokens cannot be continued, `messages` are rendered as a whole, and the new row
        shares only the prefix of equal tokens with an earlier row. RenderingFailed: they are not a conversation.
        """
        conversation = conversation_of(messages)
        self._renderer.require_shape(conversation, tools=self.tools)
        matching = list(self._matching(conversation))
        cause, row, keep, added = self._extended(conversation, matching) or self._rendered(conversation, matching)
        if row < len(self._branches) - 1 or keep < self._row_length():
            if not added:  # two turns must have a token between them
                keep, added = keep - 1, self._row(row)[keep - 1 : keep].tolist()
            self._branches.append(_Branch(Fork(len(self.tokens), row, keep), conversation, cause))
        self._branches[-1].messages, self._branches[-1].shapes = conversation, []
        return self._add(added)

    def continue_from(self, tokens: Sequence[int]) -> int:
        """Continue with a whole conversation that is given as tokens, as `rewrite` does with messages."""
        ids = self._renderer.require_known(tokens)
        shared = [_common_prefix(self._row(row), ids) for row in range(len(self._branches))]
        row = max(range(len(shared)), key=lambda row: (shared[row], row))
        keep, added = shared[row], ids[shared[row] :]
        cause = self._cause(row, keep) if added else "resampled"
        if not added:  # a turn follows after an earlier token
            keep, added = keep - 1, ids[keep - 1 : keep]
        if row < len(self._branches) - 1 or keep < self._row_length():
            self._branches.append(_Branch(Fork(len(self.tokens), row, keep), [], cause))
        return self._add(added)

    def rows(self) -> list[EpisodeRow]:
        """Return the rows that have sampled tokens of their own."""
        return rows_of(self.prompt, self.tokens, mask=self.mask, logprobs=self.logprobs, forks=self.forks)

    def _add(self, added: Sequence[int]) -> int:
        bound = answer_bound(
            self.max_tokens, prompt=len(self.prompt), forks=self.forks, max_row_tokens=self.max_row_tokens
        )
        room = max(0, bound - len(self.tokens) - 1)
        self.truncated = self.truncated or len(added) > room
        added = added[:room]
        self.tokens.extend(added)
        self.logprobs.extend([0.0] * len(added))
        self.mask.extend(bytes(len(added)))
        self._start = self._row_length()
        return len(self.tokens)

    def _cause(self, row: int, keep: int) -> ForkCause:
        """Return why a conversation that is given as tokens continues after `keep` tokens of a row."""
        before = [turn for turn in self._turns(row) if turn.start <= keep]
        return "branched" if before and keep >= before[-1].end else "rewritten"

    def _turns(self, row: int) -> list[_TurnAt]:
        """Return the turns in a row, also those of which it repeats a part; in their order."""
        branch = self._branches[row]
        earlier = self._turns(branch.fork.parent) if row else []
        return [turn for turn in earlier if turn.start < branch.fork.keep] + branch.turns

    def _extended(self, messages: Sequence[Message], matching: Sequence[_Match]) -> _Continuation | None:
        """Return how to continue the longest conversation that `messages` extends."""
        if not matching:
            return None
        num_messages, row, turn = max(matching, key=lambda match: match[:2])
        if num_messages == turn.num_messages:  # the same turn once more
            return _Continuation("resampled", row, turn.start, [])
        tokens, new = self._row(row), messages[num_messages:]
        sampled = tokens[turn.start : turn.end]
        added = self._renderer.bridge(tokens[: turn.start], sampled, new, tools=self.tools)
        return None if added is None else _Continuation("branched", row, turn.end, added)

    def _matching(self, messages: Sequence[Message]) -> Iterator[_Match]:
        """Yield each turn that `messages` continue or sample again."""
        keys = [_key(message) for message in messages]
        for row, branch in enumerate(self._branches):
            same = _common_prefix([_key(message) for message in branch.messages], keys)
            for turn in branch.turns:
                if turn.num_messages < same:
                    yield turn.num_messages + 1, row, turn
                elif turn.num_messages == same == len(keys):
                    yield turn.num_messages, row, turn

    def _rendered(self, messages: Sequence[Message], matching: Sequence[_Match]) -> _Continuation:
        """Return how to continue the row with the longest prefix of all tokens."""
        ids = self._renderer.render(_without_orphans(messages), tools=self.tools)
        shared = [_common_prefix(self._row(row), ids) for row in range(len(self._branches))]
        row = max(range(len(shared)), key=lambda row: (shared[row], row))
        known = max((num_messages for num_messages, _, _ in matching), default=0)
        follow_turn = known and all(message["role"] != "assistant" for message in messages[known:])
        return _Continuation("unbridged" if follow_turn else "rewritten", row, shared[row], ids[shared[row] :])

    def _row_length(self) -> int:
        fork = self._branches[-1].fork
        return fork.keep + len(self.tokens) - fork.start

    def _row(self, number: int) -> array[int]:
        """Return the tokens of a row, prompt included."""
        return row_ids(self.prompt, self.tokens, self.forks, number)


def sampled_turns(mask: bytes | bytearray) -> list[tuple[int, int]]:
    """Return [start, end) of each sampled turn in an answer, to repeat an episode from its recorded tokens."""
    return [turn.span() for turn in re.finditer(b"\x01+", mask)]


class _Function(msgspec.Struct):
    name: str
    arguments: dict[str, Any] | str


class _Call(msgspec.Struct):
    function: _Function
    id: str = ""


class _Shape(msgspec.Struct):
    """What a message must have."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None


def conversation_of(messages: Sequence[Message], *, after: Sequence[Message] = ()) -> list[Message]:
    """Return an environment's messages, and add to each result the name of its tool, which some families render. The
    name comes from the call, in `after` or `messages`. RenderingFailed if the messages are not a conversation, or end
    with a turn of the policy."""
    try:
        shapes = msgspec.convert(messages, list[_Shape])
    except msgspec.ValidationError as err:
        raise RenderingFailed(f"the environment's messages are not a conversation: {err}") from err
    if not shapes or shapes[-1].role == "assistant":
        raise RenderingFailed("the environment's messages must end with one that the policy can answer")
    names: dict[str, str] = {}
    named: list[Message] = []
    for message in (*after, *messages):
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls") or () if "id" in call}
        known = names.get(message.get("tool_call_id", ""), "")
        named.append({**message, "name": known} if known and "name" not in message else message)
    return named[len(after) :]


def _without_orphans(messages: Sequence[Message]) -> list[Message]:
    """Turn each tool result that belongs to no call of the conversation (an invalid call is not in it) into a message
    of the user, because templates refuse such results."""
    calls: set[str] = set()
    kept: list[Message] = []
    for message in messages:
        calls.update(call.get("id", "") for call in message.get("tool_calls") or ())
        orphan = message["role"] == "tool" and message.get("tool_call_id", "") not in calls
        kept.append({"role": "user", "content": message.get("content")} if orphan else message)
    return kept


def _key(message: Message) -> tuple[Any, ...]:
    """Return what makes two messages equal: role, text, and names and arguments of calls."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content)
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return message.get("role"), content, *((call["name"], arguments_key(call["arguments"])) for call in calls)


def _common_prefix(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Return the number of equal items at the start of both."""
    pairs = zip(left, right, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
