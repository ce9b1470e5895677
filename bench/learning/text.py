"""Tables and paragraphs of the document."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], body: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *body]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def bold(words: str, *, shown: bool) -> str:
    """Return what is shown in bold."""
    return f"**{words}**" if shown else words


def wrapped(words: str) -> str:
    """Return a paragraph in lines of at most 118 characters."""
    return textwrap.fill(" ".join(words.split()), 118, break_long_words=False, break_on_hyphens=False)
