"""Episodes of several sums for the seed policy, which has no chat template: their environment, and their renderer.

A turn is a sum, and its answer with the end token; the next sum follows directly.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

from renderers.base import ParsedResponse, RenderedTokens
from renderers.configs import BaseRendererConfig

from dora.environments.api import End, Environment, Observation, Reset, Turn
from dora.tasks.arithmetic import problem


class Relay(Environment):
    """Sums, with an equal share of the reward for each. A row whose answer is "none" makes it raise."""

    sums = 2

    def reset(self, row: dict[str, Any]) -> Reset:
        self.answer = row["answer"]
        self.index = 0 if self.answer == "none" else int(self.answer)
        self.left = self.sums
        return Reset([{"role": "user", "content": row["prompt"]}])

    def step(self, turn: Turn) -> Observation | End:
        if self.answer == "none":
            raise ValueError("no such sum")
        self.left -= 1
        reward = turn.content.endswith(self.answer) / self.sums
        if not self.left:
            return End(reward)
        following, self.answer = problem(self.index, seed=self.left + 2, split="train", min_terms=2, max_terms=4)
        return Observation([{"role": "user", "content": following}], reward)


class Rewriter(Relay):
    """A relay that replaces the answer to the first sum by 7 before it gives the second."""

    def reset(self, row: dict[str, Any]) -> Reset:
        self.first = {"role": "user", "content": row["prompt"]}
        return super().reset(row)

    def step(self, turn: Turn) -> Observation | End:
        outcome = super().step(turn)
        if isinstance(outcome, End):
            return outcome
        whole = [self.first, {"role": "assistant", "content": "7"}, *outcome.messages]
        return Observation(whole, reward=outcome.reward, rewrites=True)


class Held(Relay):
    """A relay that logs every call, and does not answer while the file `hold` exists, except an episode's last call.

    If the file says "half", every other episode is answered nevertheless.
    """

    numbers = count()

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def step(self, turn: Turn) -> Observation | End:
        if self.left == self.sums:
            self.is_in_half = next(self.numbers) % 2
        with (self.folder / "calls").open("a") as log:
            log.write(f"{os.getpid()} {self.is_in_half} {self.left}\n")
        while self.left > 1 and ((hold := self._hold()) == "all" or (hold == "half" and not self.is_in_half)):
            time.sleep(0.02)
        return super().step(turn)

    def _hold(self) -> str:
        try:
            return (self.folder / "hold").read_text()
        except FileNotFoundError:
            return ""


class HeldReplayable(Held):
    """A held relay that can be replayed."""

    can_replay = True
    sums = 3


class Faulty(Relay):
    """A relay whose first turn is answered by the function that the row names."""

    def reset(self, row: dict[str, Any]) -> Reset:
        self.fault = row["fault"]
        return super().reset(row)

    def step(self, turn: Turn) -> Any:
        if self.fault and self.left == self.sums:
            self.left -= 1
            return globals()[self.fault]()
        return super().step(turn)


def raises() -> None:
    raise KeyError("level")


def never_returns() -> None:
    threading.Event().wait()


async def never_returns_async() -> None:
    await asyncio.Event().wait()


def returns_nothing() -> None:
    return


def returns_10_mb() -> Observation:
    return Observation([{"role": "user", "content": "1" * 10_000_000}])


def ends_twice() -> End:
    """End the episode, and have the host send that reply once more."""
    [host] = [each for each in gc.get_objects() if type(each).__name__ == "_Host"]
    send = host._send

    def send_twice(number: int, reply: dict[str, Any]) -> str:
        send(number, reply)
        return str(send(number, reply))

    host._send = send_twice
    return End(reward=1.0)


class HeldRewriter(Held, Rewriter):
    """Both."""


class SumRenderer:
    """One token per character; a turn of the policy ends with the end token."""

    config_class: ClassVar = BaseRendererConfig

    def __init__(self, tokenizer: Any, config: BaseRendererConfig) -> None:
        self._tokenizer = tokenizer

    def _encode(self, messages: list[dict[str, Any]]) -> list[int]:
        ids: list[int] = []
        for message in messages:
            ids += self._tokenizer.encode(message["content"] or "0")
            if message["role"] == "assistant":
                ids.append(self._tokenizer.eos_token_id)
        return ids

    def render_ids(self, messages: list[dict[str, Any]], **_: Any) -> list[int]:
        return self._encode(messages)

    def get_stop_token_ids(self) -> list[int]:
        return [self._tokenizer.eos_token_id]

    def parse_response(self, ids: list[int], **_: Any) -> ParsedResponse:
        return ParsedResponse(content=self._tokenizer.decode([i for i in ids if i != self._tokenizer.eos_token_id]))

    def bridge_to_next_turn(
        self, prompt: list[int], completion: list[int], messages: list[dict[str, Any]], **_: Any
    ) -> RenderedTokens:
        return RenderedTokens(token_ids=[*prompt, *completion, *self._encode(messages)], message_indices=[])
