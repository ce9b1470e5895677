"""Episodes of two sums for the seed policy, which has no chat template: their environment, and their renderer.

A turn is a sum, and its answer with the end token; the next sum follows directly.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, ClassVar

from renderers.base import ParsedResponse, RenderedTokens
from renderers.configs import BaseRendererConfig

from dora.environments.api import End, Environment, Observation, Reset, Turn
from dora.tasks.arithmetic import problem


class Relay(Environment):
    """Two sums, half a reward for each."""

    def reset(self, row: dict[str, Any]) -> Reset:
        self.answer = row["answer"]
        self.index = int(row["answer"])
        return Reset([{"role": "user", "content": row["prompt"]}])

    def step(self, turn: Turn) -> Observation | End:
        right = 0.5 * turn.content.endswith(self.answer)
        if not hasattr(self, "second"):
            self.second, self.answer = problem(self.index, seed=3, split="train", min_terms=2, max_terms=4)
            return Observation([{"role": "user", "content": self.second}], reward=right)
        return End(reward=right)


class Held(Relay):
    """A relay that logs every call, and does not answer while the file `hold` exists."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def step(self, turn: Turn) -> Observation | End:
        with (self.folder / "calls").open("a") as log:
            log.write(f"{os.getpid()}\n")
        while (self.folder / "hold").exists():
            time.sleep(0.02)
        return super().step(turn)


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
