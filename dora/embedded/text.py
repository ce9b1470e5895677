"""The text of an answer, if the engine runs with a tokenizer. It is always decoded from the first token on, so that a
character that spans several tokens is never split.
"""

from __future__ import annotations

from typing import Protocol

from dora.embedded.generation import Generation


class TextCodec(Protocol):
    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class Text:
    def __init__(self, generation: Generation, tokenizer: TextCodec) -> None:
        self._generation, self._tokenizer = generation, tokenizer
        self._sent = 0  # characters already given out in incremental mode

    def upto(self, end: int, *, incremental: bool) -> str:
        """The text of the first `end` output tokens without a matched stop token; if incremental, only the new part."""
        generation = self._generation
        reason = generation.finish_reason if generation.done else None
        trimmed = end - 1 if reason is not None and reason["type"] == "stop" else end
        whole = self._tokenizer.decode(generation.output_ids[:trimmed], skip_special_tokens=True)
        if not incremental:
            return whole
        if not generation.done:
            whole = whole.rstrip("�")  # one or more: the rest of this character is still to come
        new, self._sent = whole[self._sent :], max(self._sent, len(whole))
        return new
