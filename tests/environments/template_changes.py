"""Every small change of a chat template: of each text, number, name, branch, filter and output."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import jinja2

_OPPOSITES: Final = {"and": "or", "or": "and", "not": "", "first": "last", "last": "first", "true": "false"}
_OPPOSITES_OF_OPERATORS: Final = {"==": "!=", "!=": "==", ">": "<", "<": ">", "+": "~", "-": "+"}
#: A method that trims, or a filter.
_TRIMS: Final = re.compile(r"\.[lr]?strip\([^()]*\)| \| ?trim\b")
_CONDITIONS: Final = re.compile(r"\{%-? (?:el)?if (.*?) -?%\}")
_OUTPUTS: Final = re.compile(r"\{\{-? .*? -?\}\}")
_BLOCKS: Final = ("{% set ", "{%- set ")
#: Additions, each to a conversation of some kind.
_ADDED: Final = {
    "a default system message": "{% if messages[0].role != 'system' %}You are kind.{% endif %}",
    "a default system message with tools": "{% if tools and messages[0].role != 'system' %}You are kind.{% endif %}",
    "a line about tools": "{% if tools and tools|length > 1 %}Choose well.{% endif %}",
    "a line about calls": "{% for m in messages if m.tool_calls and m.tool_calls|length > 1 %}Twice.{% endfor %}",
    "a line about text with calls": "{% for m in messages if m.tool_calls and m.content %}Said.{% endfor %}",
    "a line about reasoning": "{% for m in messages if m.reasoning_content %}Thought.{% endfor %}",
    "a line about long conversations": "{% if messages|length > 8 %}Finish.{% endif %}",
    "a line about answers": "{% for m in messages if m.role == 'assistant' and not m.tool_calls %}Done.{% endfor %}",
}


def changes(source: str) -> Iterator[tuple[str, str]]:
    """Yield (what was changed, changed template)."""
    yield from _changed_tokens(source)
    for found in _TRIMS.finditer(source):
        yield f"{found[0]} removed at {found.start()}", source[: found.start()] + source[found.end() :]
    for found in _CONDITIONS.finditer(source):
        for value in ("true", "false"):
            yield (
                f"{found[0]} always {value}, at {found.start()}",
                source[: found.start(1)] + value + source[found.end(1) :],
            )
    for found in _OUTPUTS.finditer(source):
        yield f"{found[0][:40]} removed at {found.start()}", source[: found.start()] + source[found.end() :]
    for name, added in _ADDED.items():
        yield name + " at the start", added + source
        yield name + " at the end", source + added


def _changed_tokens(source: str) -> Iterator[tuple[str, str]]:
    place = 0
    for _, kind, text in jinja2.Environment().lex(source):
        place = source.index(text, place)  # space that a tag removes is in no token
        for changed in _others(kind, text):
            yield (
                f"{text[:30]!r} to {changed[:30]!r} at {place}",
                source[:place] + changed + source[place + len(text) :],
            )
        place += len(text)


def _others(kind: str, text: str) -> Iterator[str]:
    if kind == "string" and len(text) > 2:
        yield text[:-1] + "~" + text[-1]
        yield text[0] * 2
        yield text[0] + " " + text[1:]
    elif kind == "integer":
        yield str(int(text) + 1)
    elif kind == "data" and text.strip():
        yield text.rstrip() + "~"
    elif kind == "name" and text in _OPPOSITES:
        yield _OPPOSITES[text]
    elif kind == "operator" and text in _OPPOSITES_OF_OPERATORS:
        yield _OPPOSITES_OF_OPERATORS[text]
