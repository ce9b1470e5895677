"""The renderer of paced episodes: messages are the tokens of their text, and nothing is between them.

Invariant: an observation has as many tokens as its text has digits, and so as many as the workload's table says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from renderers import BaseRendererConfig, ParsedResponse, RenderedTokens


class PacedRendererConfig(BaseRendererConfig):  # type: ignore[misc]  # untyped
    """No options."""

    name: str = "paced"


class PacedRenderer:
    """Follows the protocol `renderers.Renderer`."""

    config_class = PacedRendererConfig

    def __init__(self, tokenizer: Any, config: PacedRendererConfig) -> None:
        self._tokenizer = tokenizer
        self.config = config

    def get_stop_token_ids(self) -> list[int]:
        return [self._tokenizer.eos_token_id]

    def render_ids(self, messages: Sequence[Mapping[str, Any]], **_: object) -> list[int]:
        return [id for message in messages for id in self._tokenizer.encode(message["content"])]

    def parse_response(self, ids: Sequence[int], **_: object) -> ParsedResponse:
        """Ignore the text of a turn: the workload's table says which call it makes."""
        return ParsedResponse(content="")

    def bridge_to_next_turn(
        self, prompt: list[int], sampled: list[int], messages: Sequence[Mapping[str, Any]], **_: object
    ) -> RenderedTokens:
        return RenderedTokens(prompt + sampled + self.render_ids(messages))
