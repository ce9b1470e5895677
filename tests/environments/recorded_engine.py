"""An engine that samples what a policy might: calls in the family's own form, tokenized as the tokenizer never would,
damaged, cut off, or random tokens. Everything is drawn from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dora.environments.renderer import Message, Renderer
from dora.tasks.tokenizer import Tokenizer

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look a key up.",
            "parameters": {
                "type": "object",
                "properties": {"key": {"type": "string"}, "count": {"type": "integer"}},
                "required": ["key"],
            },
        },
    },
)
WORDS = ("k3", "ein Wert", "süß", "日本", "🙂🙃", "naïve", "a  b", "tab\tx", "0042", "é́", "x" * 40)
SPACE = (" ", "\n", "\n\n", "\t ", " \n", "\u00a0", "\r\n")


@dataclass(frozen=True)
class Sampled:
    ids: list[int]
    finish: Literal["stop", "length"]
    calls: list[tuple[str, dict[str, Any]]] | None  # None: whatever the parser makes of it


class RecordedEngine:
    def __init__(self, renderer: Renderer, tokenizer: Tokenizer, *, seed: int) -> None:
        self._renderer, self._tokenizer = renderer, tokenizer
        self._rng = random.Random(seed)
        self._num_plain = tokenizer._codec.get_vocab_size(with_added_tokens=False)  # all but the special ones

    def text(self, *, words: int = 6) -> str:
        rng = self._rng
        return "".join(rng.choice(WORDS) + rng.choice(SPACE) for _ in range(rng.randrange(words))) + rng.choice(WORDS)

    def turn(self, context: Sequence[int], messages: Sequence[Message]) -> Sampled:
        """Sample a turn after `context`, the tokens of `messages`."""
        rng = self._rng
        kind = rng.choice(("call", "call", "several", "thought", "answer", "damaged", "cut", "string", "noise"))
        if kind == "noise":
            ids = [rng.randrange(self._num_plain) for _ in range(rng.randrange(1, 30))]
            return Sampled([*ids, *self._stop()], "stop", None)
        most = 3 if kind == "several" and self._renderer.family != "llama-3" else 1
        calls = [] if kind == "answer" else self._calls(most)
        ids = self._split(self.written(context, messages, calls, thought=kind == "thought"))
        if kind == "damaged":
            for _ in range(rng.randrange(1, 4)):
                ids[rng.randrange(len(ids) - 1)] = rng.randrange(self._num_plain)
        if kind == "cut":
            return Sampled(ids[: rng.randrange(1, len(ids))], "length", None)
        if kind == "string":
            return Sampled(ids[:-1], "stop", calls)
        return Sampled(ids, "stop", None if kind == "damaged" else calls)

    def written(
        self,
        context: Sequence[int],
        messages: Sequence[Message],
        calls: Sequence[tuple[str, dict[str, Any]]],
        *,
        thought: bool = False,
    ) -> list[int]:
        """Return a turn in the family's own form: what its template adds for it, up to the end of the turn."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text().strip()}
        if thought:
            message["reasoning_content"] = self.text().strip()
        if calls:
            functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
            message["tool_calls"] = [
                {"id": f"functions.look_up:{index}", "type": "function", "function": function}
                for index, function in enumerate(functions)
            ]
        last = [*(m for m in messages if m["role"] == "system"), {"role": "user", "content": "q"}]
        before = self._renderer.render(last, tools=TOOLS)
        whole = self._renderer._renderer.render_ids([*last, message], tools=[*TOOLS])
        shared = next(i for i, (a, b) in enumerate(zip([*before, -1], whole, strict=False)) if a != b)
        ids = whole[shared:]
        if self._renderer.family == "deepseek-r1":  # its template drops the reasoning that its prompt opens
            ids = [*self._tokenizer.encode("so\n</think>\n\n", special_tokens=False), *ids]
        stop = next((i for i, token in enumerate(ids) if token in self._renderer.stop_ids), None)
        return [*ids, *self._stop()] if stop is None else ids[: stop + 1]

    def _calls(self, most: int) -> list[tuple[str, dict[str, Any]]]:
        rng = self._rng
        return [
            ("look_up", {"key": rng.choice(WORDS), "count": rng.randrange(10**6)}) for _ in range(rng.randint(1, most))
        ]

    def _stop(self) -> list[int]:
        return [self._rng.choice(self._renderer.stop_ids)]

    def _split(self, ids: Sequence[int]) -> list[int]:
        """Replace some tokens by those of their bytes: the same text, in tokens that encoding it would not give."""
        out: list[int] = []
        for token in ids:
            text = self._tokenizer._codec.id_to_token(token)
            pieces = [self._tokenizer.token_id(byte) for byte in text] if token < self._num_plain else []
            out += pieces if pieces and self._rng.random() < 0.5 else [token]
        return out
