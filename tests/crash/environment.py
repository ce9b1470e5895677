"""An environment in a host that ends with its controller, and a renderer, both of numbers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dora.environments.api import End, Observation, Reset, Turn
from dora.environments.replies import EnvironmentFailed
from dora.environments.shapes import MessageShape
from dora.tasks.prompts import Conversation
from dora.tasks.tokenizer import Tokenizer
from tests.crash.policy import EOS, answered


def sums() -> list[dict[str, str]]:
    """Rows of a finite source."""
    return [{"prompt": f"a3b{n}=", "answer": f"{3 + n:02d}"} for n in range(4)]


class NumberRenderer:
    """A turn is its tokens in decimal, and so is an observation."""

    family = "numbers"
    stop_ids = (EOS,)

    def require_shape(self, messages: Sequence[Mapping[str, Any]], *, tools: Any = ()) -> None:
        pass  # it has no template

    def require_shapes(self, shapes: Sequence[MessageShape], *, tools: Any = ()) -> None:
        pass

    def bridge(
        self, prompt: Sequence[int], sampled: Sequence[int], messages: Sequence[Mapping[str, Any]], *, tools: Any = ()
    ) -> list[int]:
        return [int(word) for message in messages for word in message["content"].split()]

    def parse(self, sampled: Sequence[int], **others: Any) -> Turn:
        return Turn(" ".join(map(str, sampled)))


@dataclass
class Hosts:
    """The pool of one life. `called` is told of every call: episode and turn."""

    rng: random.Random
    can_replay: bool
    wants_tokens: ClassVar = False
    called: Callable[[int, int], None]
    turns: dict[int, int] = field(default_factory=dict)  # turns answered, by episode

    async def start(self, episode: int, row: Mapping[str, Any], *, source: str, name: str, **_: bool) -> Reset:
        await self._pause()
        self.turns[episode] = 0
        return reset(row)

    async def step(self, episode: int, turn: Turn, *, may_replay: bool) -> Observation | End | EnvironmentFailed:
        number = self.turns[episode]
        self.called(episode, number)
        await self._pause()
        self.turns[episode] += 1
        kind, tokens, reward = answered(episode, number, [int(word) for word in turn.content.split()])
        if kind == "observation":
            return Observation([{"role": "user", "content": " ".join(map(str, tokens))}], reward)
        if kind == "failed":
            return EnvironmentFailed("raised", "raised ValueError")
        return End(reward if kind == "end" else None)

    def fail(self, episode: int, failed: EnvironmentFailed) -> EnvironmentFailed:
        self.turns.pop(episode)
        return failed

    async def close(self, episode: int) -> None:
        self.turns.pop(episode, None)

    async def _pause(self) -> None:
        await asyncio.sleep(self.rng.choice((0.0, 0.01, 0.1, 2.0)))


def reset(row: Mapping[str, Any]) -> Reset:
    return Reset([{"role": "user", "content": row["prompt"]}])


@dataclass(frozen=True)
class Converse:
    """Makes the prompts of episodes."""

    tokenizer: Tokenizer

    def __call__(self, row: Mapping[str, Any], source: str, where: str) -> Conversation:
        messages = tuple(reset(row).messages)
        return Conversation(messages, (), tuple(self.tokenizer.encode(row["prompt"], special_tokens=False)))
