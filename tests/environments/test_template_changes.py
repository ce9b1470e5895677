"""A chat template that was changed is refused, or its conversations are rendered as it renders them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dora.environments import renderer
from dora.environments.renderer import Renderer, RenderingFailed, open_renderer
from dora.errors import ConfigError
from dora.tasks import template_process
from dora.tasks.chat_template import ChatTemplate
from dora.tasks.tokenizer import Tokenizer, load_tokenizer
from tests.environments.recorded_engine import TOOLS
from tests.environments.template_changes import changes
from tests.environments.templates_of_families import TEMPLATES
from tests.environments.tokenizers_of_families import make_folder, special_tokens

CONVERSATIONS = 40
TEXTS = ("k3", "ein Wert", "süß, 日本", "🙂", "a\n\nb", " padded ", '{"a": 1}', "x" * 40, "1", "So.\n- one\n- two")
#: As there, and one without parameters.
MORE_TOOLS = (*TOOLS, {"type": "function", "function": {"name": "stop", "description": "Stop.", "parameters": {}}})


class InThisProcess(ChatTemplate):
    """A template of our own, which needs no limits, and takes less time without a process."""

    def __init__(self, source: str) -> None:
        super().__init__(source, Path("chat_template.jinja"))
        self._template: Any = None

    def render(self, **names: Any) -> str:
        try:
            self._template = self._template or template_process._compiled(self._source)
            return str(self._template.render(names))
        except Exception as err:
            raise ConfigError(str(err)) from err


def _conversation(rng: random.Random) -> tuple[list[Mapping[str, Any]], tuple[Mapping[str, Any], ...]]:
    """Draw a conversation, of lengths, texts and arguments that no probe has."""
    tools = rng.choice(((), TOOLS, MORE_TOOLS))
    messages: list[dict[str, Any]] = [{"role": "system", "content": rng.choice(TEXTS)}] if rng.random() < 0.5 else []
    messages.append({"role": "user", "content": rng.choice(TEXTS)})
    for _ in range(rng.randrange(5)):
        turn: dict[str, Any] = {"role": "assistant", "content": ""}
        messages.append(turn)
        num_calls = rng.choice((0, 1, 1, 2, 3)) if tools else 0
        if num_calls < 2 and (num_calls == 0 or rng.random() < 0.5):
            turn["content"] = rng.choice(TEXTS)
        if rng.random() < 0.5:
            turn["reasoning_content"] = rng.choice(TEXTS)
        if num_calls:
            turn["tool_calls"] = [_call(rng, f"functions.look_up:{index}") for index in range(num_calls)]
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "name": "look_up", "content": rng.choice(TEXTS)}
                for call in turn["tool_calls"]
            ]
        if not num_calls or rng.random() < 0.2:
            messages.append({"role": "user", "content": rng.choice(TEXTS)})
    return messages, tools


def _call(rng: random.Random, id: str) -> dict[str, Any]:
    arguments = {"key": rng.choice(TEXTS), "count": rng.choice((-1, 0.25, True, None, [], {"a": ["b"]}))}
    return {"id": id, "type": "function", "function": {"name": "look_up", "arguments": arguments}}


@pytest.fixture(scope="module", params=TEMPLATES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Tokenizer]:
    name = request.param
    special, eos = special_tokens(name)
    folder = make_folder(tmp_path_factory.mktemp(name), special, eos=eos, chat_template=TEMPLATES[name])
    return name, load_tokenizer(folder)


def _rendered(found: Renderer, messages: Any, tools: Any) -> list[int] | None:
    try:
        return found.render(messages, tools=tools)
    except RenderingFailed:
        return None


def _differing(tokenizer: Tokenizer, found: Renderer) -> Iterator[str]:
    rng = random.Random(23)
    for _ in range(CONVERSATIONS):
        messages, tools = _conversation(rng)
        try:
            wanted = tokenizer.encode(tokenizer.render_chat(messages, tools=tools), special_tokens=False)
        except ConfigError:
            wanted = None
        if wanted != _rendered(found, messages, tools):
            yield json.dumps(messages)


def test_a_family_renders_what_its_template_renders(family: tuple[str, Tokenizer]) -> None:
    name, tokenizer = family
    found = open_renderer(tokenizer)
    assert found.family == name
    assert [*_differing(tokenizer, found)] == []


@pytest.mark.deep
def test_a_changed_template_is_refused_or_rendered_as_it_is(family: tuple[str, Tokenizer], monkeypatch) -> None:
    name, tokenizer = family
    monkeypatch.setattr(renderer, "families", lambda: [name])  # no other has its tokens, and each would be opened
    num_refused, num_equal, wrong = 0, 0, []
    for change, source in changes(TEMPLATES[name]):
        changed = replace(tokenizer, _template=InThisProcess(source))
        try:
            found = open_renderer(changed)
        except ConfigError:
            num_refused += 1
            continue
        num_equal += 1
        if differing := next(_differing(changed, found), None):
            wrong.append(f"{change}: {differing}")
    assert not wrong, "\n".join(wrong)
    assert num_refused > 100
    assert num_equal < num_refused / 3
