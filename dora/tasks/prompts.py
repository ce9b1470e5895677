"""The prompt stream: the prompt at each position of a run.

Invariant: `stream.at(position)` is a pure function of (task config, tokenizer, seed, position). So a resume needs only
one integer as its cursor, prefetching does not affect it, and no earlier draws are replayed:

    position --mixture--> (source, n-th draw from it) --epoch, shuffle--> row --render, encode--> Prompt

If rows may be passed over (`task.revisit_share`), a source's n-th draw is not at its n-th place any more. `visit` then
chooses the row of each position, as a function of the seed and of the visits recorded so far, and `of_visit` returns
its prompt. The mixture stays the same.
"""

from __future__ import annotations

import hashlib
import os
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fractions import Fraction
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from dora.core.events import Visit
from dora.core.ids import GroupId
from dora.errors import ConfigError
from dora.observe.visits import RowKey, Visits
from dora.tasks.sources import Row, Source, derive_seed, open_source, require_readable
from dora.tasks.tokenizer import Tokenizer, unmarked

if TYPE_CHECKING:
    from dora.config.schema import EvalSetConfig, SourceConfig, TaskConfig

T = TypeVar("T")

#: Rows of a finite source that are rendered and measured when it is opened (a few seconds at most). Later rows are
#: measured when drawn, with the same error; the syntax of all JSONL lines is checked at the start.
CHECKED_ROWS = 10_000

#: Of this number of first rows of a source, or of first prompts of the stream, at most half may be over the limit.
JUDGED_ROWS = 1_000

#: Seconds before each further attempt to begin an episode whose prompt is needed. A restarted service is up again by
#: then; a failure that persists is reported.
PAUSES_S: Final = (1.0, 4.0, 10.0)


@dataclass(frozen=True, slots=True)
class Conversation:
    """The beginning of an episode, made by its environment from a row, in the format of OpenAI's API."""

    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    tokens: Sequence[int] = ()
    failed: str = ""  # the reason if the environment could not make it; otherwise ""
    may_pass: bool = False  # the environment failed, perhaps only for now
    is_own: bool = False  # each episode begins with its own, which is not known yet


#: (row, label of its source, name of the row) -> Conversation; it may block, and is called in a thread.
Converse = Callable[[Row, str, str], Conversation]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, as the model reads it, with the data that rewards need."""

    position: int  # place in the stream
    source: str
    text: str  # rendered, chat template included
    tokens: tuple[int, ...]
    answer: str  # reference answer, "" if there is none
    metadata: Mapping[str, Any]  # the other columns of the row, as plain JSON values
    skipped: str = ""  # the reason if it is over the limit or cannot be read, with `tokens` empty; otherwise ""
    is_readable: bool = True  # whether its row can be read
    source_index: int = 0  # in `task.sources`
    label: str = ""  # of its source
    row: Row = field(default_factory=dict)  # all columns, for an environment
    where: str = ""  # name of the row
    conversation: Conversation | None = None  # None: a prompt for one answer

    @property
    def has_not_begun(self) -> bool:
        """Whether its environment, or the renderer, could not make it."""
        return self.conversation is not None and bool(self.conversation.failed)

    @property
    def may_begin_later(self) -> bool:
        """Whether its environment has failed, which may pass."""
        return self.conversation is not None and self.conversation.may_pass

    @property
    def digest(self) -> bytes:
        """16 bytes over everything that an answer depends on."""
        parts: list[Any] = [self.text, self.tokens, self.answer, self.metadata]
        if self.conversation is not None and self.conversation.is_own:  # nothing is rendered of the row yet
            parts.append(self.row)
        content = msgspec.json.encode(parts, order="deterministic")
        return hashlib.blake2b(content, digest_size=16).digest()


class PromptStream:
    """Prompts by position. They end at the first position for which a source has no row left; from there on, `at`
    returns None."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        task: TaskConfig,
        tokenizer: Tokenizer,
        seed: int,
        converse: Converse | None = None,
    ) -> None:
        self._sources = tuple(sources)
        self._converse = converse
        self._shares = nested_shares([config.weight for config in task.sources])
        self._task = task
        self._tokenizer = tokenizer
        self._seed = seed
        self._overlong: set[int] = set()  # positions drawn so far, below JUDGED_ROWS
        self._unreadable: list[dict[int, str]] = [{} for _ in sources]  # what is wrong with rows, by their indices
        #: Prompts in the stream; None if it is endless. It ends with the first source that ends, because continuing
        #: with the others would change the mixture.
        self.num_prompts = _mixture_length([self._num_draws(source) for source in sources], shares=self._shares)

    @property
    def passes_over(self) -> bool:
        """Whether rows may be passed over: then `visit` chooses the rows of prompts."""
        return self._task.revisit_share < 1

    def at(self, position: int, *, known: Conversation | None = None) -> Prompt | None:
        """Return the prompt at `position`; calls may come in any order, and repeat. `known`: how its episodes began, so
        that the environment need not be asked.

        Takes up to a millisecond, but a second for some reasoning_gym items: call it in a thread.
        """
        if self.num_prompts is not None and position >= self.num_prompts:
            return None
        index, draw = mix(position, shares=self._shares)
        num_rows = self._sources[index].num_rows
        row = draw if num_rows is None else self._shuffled(draw, num_rows=num_rows, source=index)
        return self._prompt(position, index, row, known=known)

    def of_visit(self, position: int, key: RowKey, *, known: Conversation | None = None) -> Prompt:
        """Return the prompt at `position`, whose source and row `visit` has chosen; `known` as in `at`."""
        index, row = key
        if mix(position, shares=self._shares)[0] != index or row >= (self._sources[index].num_rows or 0):
            raise ConfigError(
                f"task.sources: prompt {position} was row {row} of source {index}, which is not its row now; restore "
                "the sources that the run began with"
            )
        return self._prompt(position, index, row, known=known)

    def _prompt(self, position: int, index: int, row: int, *, known: Conversation | None) -> Prompt:
        source = self._sources[index]
        converse = self._converse if self._converse is None or known is None else lambda *_: known
        prompt = render(source, row, position=position, task=self._task, tokenizer=self._tokenizer, converse=converse)
        if not prompt.is_readable:
            self._unreadable[index][row] = prompt.skipped
            require_readable([*self._unreadable[index].values()], of=source.num_rows or 0)
        elif prompt.skipped and prompt.conversation is None and position < JUDGED_ROWS:
            self._overlong.add(position)
            _require_half(len(self._overlong), of=JUDGED_ROWS, what="prompts", task=self._task)
        return replace(prompt, source_index=index)

    def visit(self, first: int, *, count: int, visits: Visits) -> list[Visit]:
        """Return the visits for `count` positions from `first` on; fewer where the prompts end.

        A source passes over a row whose last group had equal rewards, except at `task.revisit_share` of its visits, and
        at most as many rows at a time as it has. What `visits` has of a position stays.
        """
        found: list[Visit] = []
        places, counts = visits.places.copy(), Counter[RowKey]()
        for position in range(first, first + count):
            if (known := visits.row_of(GroupId(position))) is not None:
                found.append(Visit(*known))
                continue
            source, _ = mix(position, shares=self._shares)
            visit = self._next(source, places[source], counts=counts, visits=visits)
            if visit is None:
                break
            places[source] += len(visit.passed) + 1
            found.append(visit)
        return found

    def _next(self, source: int, place: int, *, counts: Counter[RowKey], visits: Visits) -> Visit | None:
        """Return the next visit of a source that is at `place`; None if it ends first. `counts`: visits of rows that
        `visits` does not have, which are added."""
        num_rows, end = self._sources[source].num_rows, self._num_draws(self._sources[source])
        assert num_rows is not None, "open_stream refuses endless sources"
        passed: list[int] = []
        while end is None or place < end:
            row = self._shuffled(place, num_rows=num_rows, source=source)
            key = (source, row)
            number = visits.counts[key] + counts[key]
            counts[key] += 1
            if len(passed) == num_rows or key not in visits.equal or self._is_due(key, number):
                return Visit(source, row, tuple(passed))
            passed.append(row)
            place += 1
        return None

    def _is_due(self, key: RowKey, number: int) -> bool:
        """Draw whether a row is taken at its visit `number`, counted from 0, although it had equal rewards."""
        return derive_seed(self._seed, "visit", *key, number) < self._task.revisit_share * 2**128

    def position_of(self, source: int, *, draw: int) -> int:
        """Return the position of the draw-th prompt of a source, both counted from 0."""
        return _position(source, draw, shares=self._shares)

    def _num_draws(self, source: Source) -> int | None:
        return source.num_rows * self._task.epochs if source.num_rows and self._task.epochs else None

    def _shuffled(self, draw: int, *, num_rows: int, source: int) -> int:
        epoch, place = divmod(draw, num_rows)
        if not self._task.shuffle:
            return place
        return int(permutation(num_rows, key=derive_seed(self._seed, "shuffle", source, epoch))[place])


def open_stream(task: TaskConfig, *, tokenizer: Tokenizer, seed: int, converse: Converse | None = None) -> PromptStream:
    """Open and check all training sources; `ConfigError` names the field, or file and line, that is wrong."""
    if task.system_prompt and not task.chat_template:
        raise ConfigError("task.system_prompt: needs task.chat_template = true; plain text has no system message")
    sources = []
    for index, config in enumerate(task.sources):
        field = f"task.sources.{index}"
        source = open_source(config, field=field, seed=derive_seed(seed, "source", index), split="train")
        if source.num_rows is None and task.revisit_share < 1:
            raise ConfigError(
                f"task.revisit_share: {field} ({source.name}) is endless, so its rows do not come again; use finite "
                "sources, or leave it at 1"
            )
        if converse is None:
            _check_rows(source, limit=CHECKED_ROWS, task=task, tokenizer=tokenizer)
        else:
            _check_first(source, task=task, tokenizer=tokenizer, converse=converse)
        sources.append(source)
    return PromptStream(sources, task=task, tokenizer=tokenizer, seed=seed, converse=converse)


def open_eval_prompts(
    eval_set: EvalSetConfig, *, task: TaskConfig, tokenizer: Tokenizer, seed: int, converse: Converse | None = None
) -> list[Prompt]:
    """Return the first `eval_set.prompts` rows of a held-out source in its own order, or all if it has fewer. They
    include rows that are `skipped`. ConfigError if the environment of one keeps failing: the set would have
    other rows at the next start."""
    field = f"eval.sets.{eval_set.name}.source"
    for index, config in enumerate(task.sources):
        if _same_rows(config, eval_set.source):
            raise ConfigError(f"{field}: task.sources.{index} trains on the same rows; choose other rows")
    seed = derive_seed(seed, "eval", eval_set.name)
    source = open_source(eval_set.source, field=field, seed=seed, split="heldout")
    count = eval_set.prompts if source.num_rows is None else min(eval_set.prompts, source.num_rows)

    def made(row: int) -> Prompt:
        return render(source, row, position=row, task=task, tokenizer=tokenizer, converse=converse)

    found = [made(row) for row in range(count)]
    unreadable = [prompt.skipped for prompt in found if not prompt.is_readable]
    require_readable(unreadable, of=count)
    failed = [prompt.skipped for prompt in found if prompt.has_not_begun]
    if 2 * len(failed) > count:
        raise ConfigError(f"{field}: {len(failed)} of the first {count} rows have no prompt; {failed[0]}")
    _begin_again(found, made, field=field)
    num_failed = sum(prompt.has_not_begun for prompt in found)
    num_overlong = sum(bool(prompt.skipped) for prompt in found) - num_failed - len(unreadable)
    _require_half(num_overlong, of=count, what=f"rows of {field} ({source.name})", task=task)
    return found


def _begin_again(prompts: list[Prompt], made: Callable[[int], Prompt], *, field: str) -> None:
    """Replace the prompts whose environment has failed; ConfigError if it goes on failing."""
    for pause_s in PAUSES_S:
        if rows := [row for row, prompt in enumerate(prompts) if prompt.may_begin_later]:
            time.sleep(pause_s)
        for row in rows:
            prompts[row] = made(row)
    if lost := [prompt.skipped for prompt in prompts if prompt.may_begin_later]:
        count = f"after {len(PAUSES_S) + 1} attempts, {len(lost)} of {len(prompts)} rows have no prompt"
        raise ConfigError(
            f"{field}: {lost[0]} ({count}); a held-out set must have the same rows at every start: repair "
            "the environment, or remove the row"
        )


def nested_shares(weights: Sequence[float]) -> tuple[Fraction, ...]:
    """Return for each source its share of the positions that the sources before it leave; the last share is 1."""
    exact = [Fraction(str(weight)) for weight in weights]
    return tuple(weight / sum(exact[source:]) for source, weight in enumerate(exact))


def mix(position: int, *, shares: Sequence[Fraction]) -> tuple[int, int]:
    """Return (source, number of earlier draws from it). Each source gets its share of every prefix.

    A source with share a takes position p when floor((p + 1)a) > floor(p a), after floor(p a) earlier ones. The
    other positions are shared in the same way by the sources after it.
    """
    for source, share in enumerate(shares):
        taken = int(position * share)
        if int((position + 1) * share) > taken:
            return source, taken
        position -= taken
    raise AssertionError("unreachable: the last share is 1")


def _draws_before(position: int, *, source: int, shares: Sequence[Fraction]) -> int:
    for share in shares[:source]:
        position -= int(position * share)
    return int(position * shares[source])


def _position(source: int, draw: int, *, shares: Sequence[Fraction]) -> int:
    return bisect_right(range(2**62), draw, key=partial(_draws_before, source=source, shares=shares)) - 1


def _mixture_length(num_draws: Sequence[int | None], *, shares: Sequence[Fraction]) -> int | None:
    """Return the first position whose source is exhausted; None if there is none."""
    ends = [_position(source, draws, shares=shares) for source, draws in enumerate(num_draws) if draws is not None]
    return min(ends, default=None)


def begun(make: Callable[[], Prompt | None]) -> Prompt | None:
    """Make a prompt that is needed, again if its environment fails; it blocks."""
    prompt = make()
    for pause_s in PAUSES_S:
        if prompt is None or not prompt.may_begin_later:
            break
        time.sleep(pause_s)
        prompt = make()
    return prompt


@lru_cache(maxsize=16)  # the current epoch of every source and its neighbor
def permutation(size: int, *, key: int) -> npt.NDArray[np.int64]:
    """Return the row order of one epoch. Philox's raw stream, unlike `shuffle`, is the same in all numpy versions."""
    return np.argsort(np.random.Philox(key=key).random_raw(size), kind="stable")


def render(
    source: Source,
    row_index: int,
    *,
    position: int,
    task: TaskConfig,
    tokenizer: Tokenizer,
    converse: Converse | None = None,
) -> Prompt:
    """Return row `row_index` as a prompt. It is `skipped` if it is over the limit, if its episode cannot begin, or if
    it cannot be read; of an endless source, this is a `ConfigError`."""
    try:
        return _rendered(source, row_index, position=position, task=task, tokenizer=tokenizer, converse=converse)
    except ConfigError as err:
        if source.num_rows is None:
            raise
        return Prompt(
            position=position,
            source=source.name,
            text="",
            tokens=(),
            answer="",
            metadata={},
            skipped=str(err),
            is_readable=False,
            label=source.label,
            where=source.where(row_index),
        )


def _rendered(
    source: Source,
    row_index: int,
    *,
    position: int,
    task: TaskConfig,
    tokenizer: Tokenizer,
    converse: Converse | None,
) -> Prompt:
    row, where = source.row(row_index), source.where(row_index)
    tokens: Sequence[int]
    conversation, skipped = None, ""
    if converse is None:
        text = _text(row, source=source, where=where, task=task, tokenizer=tokenizer)
        tokens = tokenizer.encode(text, special_tokens=not task.chat_template)
        text = unmarked(text)
    else:
        row = _as_json({**row}, where=where)
        conversation = converse(row, source.label or source.name, where)
        text, tokens = tokenizer.decode(conversation.tokens, special_tokens=True), conversation.tokens
        skipped = conversation.failed and f"{where}: {conversation.failed}"
    is_known = conversation is None or not conversation.is_own
    if is_known and not skipped and not 0 < len(tokens) <= task.max_prompt_tokens:
        limit = task.max_prompt_tokens
        skipped = f"{where}: the prompt has {len(tokens)} tokens, task.max_prompt_tokens allows 1 to {limit}"
        if not tokens:
            raise ConfigError(skipped)
    answer = _column(row, source.answer, where=where, field="answer") if source.answer else None
    used = {source.prompt, source.answer}
    return Prompt(
        position=position,
        source=source.name,
        text=text,
        tokens=() if skipped else tuple(tokens),
        answer=_as_text(_as_json(answer, where=where)),
        metadata=_as_json({name: value for name, value in row.items() if name not in used}, where=where),
        skipped=skipped,
        label=source.label,
        row=row if conversation is not None else {},
        where=where,
        conversation=conversation,
    )


def _text(row: Row, *, source: Source, where: str, task: TaskConfig, tokenizer: Tokenizer) -> str:
    prompt = _column(row, source.prompt, where=where, field="prompt")
    if not task.chat_template:
        if not isinstance(prompt, str):
            raise ConfigError(
                f"{where}: column '{source.prompt}' has {type(prompt).__name__}, but a prompt must be text, or with "
                "task.chat_template = true a list of messages"
            )
        return _as_json(prompt, where=where)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _messages(prompt, where=where)
    if task.system_prompt and messages[0]["role"] != "system":  # a row's own system message takes precedence
        messages = [{"role": "system", "content": task.system_prompt}, *messages]
    messages = _as_json(messages, where=where)
    try:
        return tokenizer.render_chat(messages)
    except ConfigError as err:
        raise ConfigError(f"{where}: {err}, or set task.chat_template = false") from err


def _messages(value: object, *, where: str) -> list[dict[str, str]]:
    try:
        messages = msgspec.convert(value, list[dict[str, str]])
    except msgspec.ValidationError as err:
        raise ConfigError(f"{where}: a prompt must be text, or a list of {{role, content}} texts ({err})") from err
    if not messages or any({"role", "content"} - message.keys() for message in messages):
        raise ConfigError(f"{where}: messages must be a non-empty list, each with role and content")
    return messages


def _column(row: Row, name: str, *, where: str, field: str) -> Any:
    if name not in row:
        present = sorted(map(str, row))  # rows of a function may have other keys
        near = get_close_matches(name, present, n=1)
        meant = f"; did you mean '{near[0]}'?" if near else ""
        none = '; if rows have no answer: answer = ""' if field == "answer" else ""
        raise ConfigError(f"{where}: no column '{name}' (set as '{field}'){meant}; present: {', '.join(present)}{none}")
    return row[name]


def _as_text(value: object) -> str:
    """Return text unchanged, None as "", and anything else as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _as_json(value: T, *, where: str) -> T:
    """Return a value of a row in a form that JSON can hold: keys of tables are text, and there are no lone
    surrogates."""
    try:
        plain: T = msgspec.to_builtins(_in_order(value), str_keys=True)
        msgspec.json.encode(plain)
    except UnicodeEncodeError as err:
        raise ConfigError(f"{where}: a text has a lone surrogate, which is not a character; replace it") from err
    except (TypeError, ValueError, RecursionError) as err:  # too many digits, too many brackets
        raise ConfigError(f"{where}: a column cannot be passed to the rewards ({err})") from err
    return plain


def _in_order(value: Any) -> Any:
    """Return a value with its sets sorted, of which each process has another order."""
    match value:
        case dict():
            return {key: _in_order(inner) for key, inner in value.items()}
        case list() | tuple():
            return [*map(_in_order, value)]
        case set() | frozenset():
            return sorted(map(_in_order, value), key=repr)
    return value


def _check_rows(source: Source, *, limit: int, task: TaskConfig, tokenizer: Tokenizer) -> None:
    """Render and measure the first `limit` rows; of a generator only one, because a thousand could take minutes."""
    num_overlong, unreadable, count = 0, list[str](), min(source.num_rows or 1, limit)
    for row in range(count):
        prompt = render(source, row, position=row, task=task, tokenizer=tokenizer)
        if not prompt.is_readable:
            unreadable.append(prompt.skipped)
        else:
            num_overlong += bool(prompt.skipped) and row < JUDGED_ROWS
    require_readable(unreadable, of=count)
    if source.num_rows is not None:
        judged = min(source.num_rows, JUDGED_ROWS)
        _require_half(num_overlong, of=judged, what=f"rows of {source.name}", task=task)


def _check_first(source: Source, *, task: TaskConfig, tokenizer: Tokenizer, converse: Converse) -> None:
    """Have the environment make the prompt of the first row that can be read."""
    unreadable, count = list[str](), source.num_rows or 1
    for row in range(count):
        prompt = render(source, row, position=row, task=task, tokenizer=tokenizer, converse=converse)
        if prompt.is_readable and prompt.skipped:
            raise ConfigError(prompt.skipped)
        if prompt.is_readable:
            return
        unreadable.append(prompt.skipped)
        require_readable(unreadable, of=count)


def _require_half(num_overlong: int, *, of: int, what: str, task: TaskConfig) -> None:
    """Raise ConfigError if more than half are over the limit, which is then probably a mistake."""
    if 2 * num_overlong > of:
        raise ConfigError(
            f"task.max_prompt_tokens: {num_overlong} of the first {of:,} {what} have more than "
            f"{task.max_prompt_tokens} tokens; raise the limit, or choose other rows"
        )


def _same_rows(left: SourceConfig, right: SourceConfig) -> bool:
    """Return whether two finite sources have the same rows. Generators separate their splits themselves."""
    if left.kind in ("arithmetic", "reasoning_gym", "seeds"):
        return False
    if left.kind in ("jsonl", "parquet") and left.path is not None and right.path is not None:
        return left.kind == right.kind and os.path.realpath(left.path) == os.path.realpath(right.path)
    keys = [(s.kind, s.name, s.path, s.subset, s.split, s.revision, repr(s.options)) for s in (left, right)]
    return keys[0] == keys[1]
