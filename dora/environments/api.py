"""What an environment is made of: import everything from here.

An environment is the other side of an episode. It gives the first messages (`reset`), and answers each turn of the
policy with an observation or the end (`step`). There is one object per episode, so that `self` is the state of the
episode. Methods that are not `async` run in a thread, so that a call that blocks does not stop other episodes. A call
that does not return within `environment.call_timeout_s` fails its episode.

    class Guess(Environment):
        def reset(self, row):
            self.number = row["number"]
            return Reset([{"role": "user", "content": "Guess a number from 1 to 100."}])

        def step(self, turn):
            guess = int(turn.content)
            if guess == self.number:
                return End(reward=1.0)
            hint = "higher" if guess < self.number else "lower"
            return Observation([{"role": "user", "content": hint}])

Typed functions become tools with `ToolEnvironment`. Messages are those of the OpenAI API: {"role", "content"}, with
"tool_call_id" and "name" if the role is "tool". If a method raises, the episode fails and has no reward.

This module needs Python 3.11 and no other package; `ToolEnvironment` needs pydantic.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from dora.functions import definition_of
from dora.pipes import print_failure

#: {"role": "system" | "user" | "assistant" | "tool", "content": text, ...}
Message = dict[str, Any]

_F = TypeVar("_F", bound=Callable[..., Any])

#: Maximum number of calls of one turn that run at once, for the event loop and for threads separately.
AT_ONCE = 8
#: Extra threads of a process. A turn's first thread is not among them; if none is free, calls run one after another.
SPARE_THREADS = 64
_num_spare = SPARE_THREADS


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool, as it was parsed from the tokens of a turn."""

    id: str
    name: str
    arguments: dict[str, Any] | None  # None: `text` is not a valid call
    text: str = ""  # as sampled


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy sampled between two observations, parsed."""

    content: str  # without reasoning and calls
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish: Literal["stop", "length"] = "stop"  # length: the server ended it early, at a limit of its own
    num_tokens: int = 0  # that were sampled
    num_prompt_tokens: int = 0  # of the conversation before it
    token_ids: tuple[int, ...] = ()  # that were sampled, if the environment `wants_tokens`
    logprobs: tuple[float, ...] = ()  # one for each of these


@dataclass(frozen=True, slots=True)
class Reset:
    """The beginning of an episode."""

    messages: Sequence[Message]  # at least one
    tools: Sequence[dict[str, Any]] = ()  # OpenAI tool schemas: {"type": "function", "function": {...}}
    tokens: Sequence[int] = ()  # in place of messages: ids of the model's tokens
    turn_tokens: int = 0  # limit of the next turn; 0: that of the episode


@dataclass(frozen=True, slots=True)
class Observation:
    """The answer to a turn; the policy goes on."""

    messages: Sequence[Message]  # at least one; roles user, tool, system
    reward: float = 0.0  # reward of the turn
    rewrites: bool = False  # `messages` replace the whole conversation, turns of the assistant included
    tokens: Sequence[int] = ()  # in place of messages: the whole conversation as ids of the model's tokens
    turn_tokens: int = 0  # limit of the next turn, which ends with finish "length" at it; 0: that of the episode


@dataclass(frozen=True, slots=True)
class End:
    """The end of an episode."""

    reward: float | None = None  # reward of the last turn; None: the whole episode is graded by the task's rewards
    messages: Sequence[Message] = ()  # for logs; the policy does not see them
    terms: Mapping[str, float] = field(default_factory=dict)  # for logs: what the reward is the sum of, by name
    metrics: Mapping[str, float] = field(default_factory=dict)  # what else was measured, by name; no part of the reward


class Environment:
    """One episode. When a host starts, it also makes one object and drops it, to find out whether that works.

    The arguments of the constructor are `environment.options`. `can_replay`: the same row and turns always lead to the
    same observations and rewards. If the host or the controller is lost, a new object then repeats the recorded turns
    and the episode continues; a call that had not returned is made again. `wants_tokens`: turns have their token ids.
    `asks_itself`: its conversations are what a program asks the policy, and are not cut. `max_tokens`, set by the host:
    the longest that an episode may become, its first prompt included; 0: not known. `is_graded`, set before `reset`:
    the task's rewards grade the episode if it ends without a reward.
    """

    can_replay: ClassVar[bool] = False
    wants_tokens: ClassVar[bool] = False
    asks_itself: ClassVar[bool] = False
    max_tokens: ClassVar[int] = 0
    is_graded: bool = True

    def reset(self, row: dict[str, Any]) -> Reset | Awaitable[Reset]:
        """Begin the episode. `row` has the columns of the task's row."""
        raise NotImplementedError

    def step(self, turn: Turn) -> Observation | End | Awaitable[Observation | End]:
        """Answer a turn. It is called at most once for each, unless `can_replay`, and never again after `End`."""
        raise NotImplementedError

    def close(self) -> Awaitable[None] | None:
        """Release what the episode holds, however it ended. Not called if the host is killed."""


class EnvironmentLost(Exception):
    """Raised by an environment or a tool if what it needs is gone, and it is unknown whether it acted. The episode then
    fails (cause `host`), and nothing is shown to the policy. `loss`: a number above 0; failures with the same one count
    as a single failure."""

    def __init__(self, reason: str, *, loss: int) -> None:
        super().__init__(reason)
        self.loss = loss


def tool(method: _F) -> _F:
    """Make a method of a `ToolEnvironment` a tool."""
    method._is_tool = True  # type: ignore[attr-defined]
    return method


class ToolEnvironment(Environment):
    """Typed Python functions as tools. The episode ends with a turn that calls none; the task's rewards grade it.

    `tools` are plain functions, async or not; a subclass may add methods of its own, marked by `@tool`, which share the
    episode's state:

        class Shop(ToolEnvironment):
            def reset(self, row):
                self.prices = row["prices"]  # the policy sees only what it looks up
                return super().reset(row)

            @tool
            def price(self, item: str) -> float:
                "Look up the price of an item."
                return self.prices[item]

    A tool's name, docstring and type hints are its schema (schema.py). The policy sees what the tool returns: text
    unchanged, everything else as JSON. If the arguments of a call are invalid, or its tool does not exist or raises,
    the policy sees a line that begins with `error:`.

    The calls of a turn run concurrently: up to 8 `async` ones in the event loop, and up to 8 others in threads. Methods
    that are not `async` share the episode's state, so they run one after the other, in the order of the calls. The
    answers are always in the order of the calls. `served`, set by the host: the tools of MCP servers.
    """

    served: Sequence[Callable[..., Any]] = ()

    def __init__(self, tools: Iterable[Callable[..., Any]] = ()) -> None:
        self._functions = tuple(tools)

    def reset(self, row: dict[str, Any]) -> Reset | Awaitable[Reset]:
        """Begin with the column `messages`, or with `prompt` as the message of a user."""
        if not row.get("messages") and "prompt" not in row:
            raise ValueError(f"the row has no column 'messages' or 'prompt'; it has {', '.join(row) or 'none'}")
        messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
        tools = self.schemas()
        if not tools:
            raise TypeError(f"{type(self).__name__} has no tool: give it functions, or mark methods with @tool")
        return Reset(messages, tools=tools)

    async def step(self, turn: Turn) -> Observation | End:
        if not turn.calls:
            return End()
        return Observation(await self._answers(turn.calls))

    def schemas(self) -> list[dict[str, Any]]:
        """Return the tools as OpenAI schemas. TypeError if a function cannot be one."""
        return [_schema_of(function).as_openai() for function in self._tools().values()]

    def _tools(self) -> dict[str, Callable[..., Any]]:
        own = [
            name
            for kind in reversed(type(self).__mro__)
            for name, value in vars(kind).items()
            if getattr(value, "_is_tool", False)
        ]
        functions = getattr(self, "_functions", ())  # a subclass need not call our constructor
        methods = (getattr(self, name) for name in own)
        return {function.__name__: function for function in (*functions, *methods, *self.served)}

    async def _answers(self, calls: Sequence[ToolCall]) -> list[Message]:
        tools = self._tools()
        in_loop: list[int] = []
        in_order: list[int] = []
        in_threads: list[int] = []
        for number, call in enumerate(calls):
            tool = tools.get(call.name)
            is_async, is_method = inspect.iscoroutinefunction(tool), inspect.ismethod(tool)
            (in_loop if is_async else in_order if is_method else in_threads).append(number)
        answers: dict[int, Message] = {}
        with _spare_threads(min(AT_ONCE, len(in_threads) + bool(in_order)) - 1) as spare:
            lanes = [[*in_order], *([] for _ in range(spare))]  # the calls of each run one after the other
            for place, number in enumerate(in_threads, start=bool(in_order)):
                lanes[place % len(lanes)].append(number)
            lanes += [in_loop[first::AT_ONCE] for first in range(AT_ONCE)]
            async with asyncio.TaskGroup() as group:
                for lane in filter(None, lanes):
                    group.create_task(self._answer({n: calls[n] for n in sorted(lane)}, answers))
        return [answers[number] for number in range(len(calls))]

    async def _answer(self, calls: dict[int, ToolCall], answers: dict[int, Message]) -> None:
        for number, call in calls.items():
            content = await self._content(call)
            answers[number] = {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}

    async def _content(self, call: ToolCall) -> str:
        from dora.environments.schema import InvalidArguments, as_text

        tools = self._tools()
        if call.arguments is None:
            return f"error: not a valid tool call: {call.text}"
        if call.name not in tools:
            return f"error: there is no tool '{call.name}'; there are {', '.join(sorted(tools))}"
        function = tools[call.name]
        try:
            arguments = _schema_of(function).check(call.arguments)
        except InvalidArguments as err:
            return f"error: arguments of {call.name}: {err}"
        try:
            return as_text(await run(function, **arguments))
        except EnvironmentLost:
            raise
        except (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError) as err:
            if isinstance(err, asyncio.CancelledError) and _is_cancelled():
                raise
            print_failure(f"tool {call.name}", err)
            return f"error: {type(err).__name__}: {err}"


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@contextmanager
def _spare_threads(wanted: int) -> Iterator[int]:
    """Take up to `wanted` of the process's spare threads; yield how many there were."""
    global _num_spare
    taken = max(0, min(wanted, _num_spare))
    _num_spare -= taken
    try:
        yield taken
    finally:
        _num_spare += taken


def _schema_of(function: Callable[..., Any]) -> Any:
    if (known := getattr(function, "tool_schema", None)) is not None:
        return known
    from dora.environments.schema import tool_schema  # pydantic, which plain environments do not need

    try:
        return tool_schema(getattr(function, "__func__", function), is_method=inspect.ismethod(function))
    except TypeError as err:
        where = definition_of(function)
        raise TypeError(f"{err} ({where})" if where else str(err)) from err


async def run(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """Call a function: in the event loop if it is `async`, otherwise in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **named)
    result = await asyncio.to_thread(function, *arguments, **named)
    return await result if inspect.isawaitable(result) else result
