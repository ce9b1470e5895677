"""Each shape of a conversation is compared with the chat template once, and no text is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dora.environments.episode import Episode
from dora.environments.renderer import Renderer, RenderingFailed, open_renderer
from dora.environments.shapes import MAX_HEAD, MAX_SHAPES, MessageShape, example_of, pairs_of, shapes_of
from dora.tasks.tokenizer import load_tokenizer
from tests.environments.templates_of_families import TEMPLATES
from tests.environments.tokenizers_of_families import family_tokenizer, make_folder, special_tokens

USER = {"role": "user", "content": "what is k?"}
MORE = {"role": "user", "content": "and j?"}
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "", "parameters": {}}}]


def answer(text: str, calls: int = 0, **fields: Any) -> dict[str, Any]:
    found = [{"id": f"c{n}", "function": {"name": "look_up", "arguments": {"key": "k"}}} for n in range(calls)]
    return {"role": "assistant", "content": text, **({"tool_calls": found} if calls else {}), **fields}


def results(count: int) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": f"c{n}", "content": str(n)} for n in range(count)]


def opened(folder: Path, family: str, change: str = "") -> Renderer:
    special, eos = special_tokens(family)
    path = make_folder(folder, special, eos=eos, chat_template=TEMPLATES[family] + change)
    return open_renderer(load_tokenizer(path))


USUAL = {
    "a system message": [{"role": "system", "content": "Be brief."}, USER, answer("7"), MORE],
    "calls and results": [USER, answer("", 1), *results(1), answer("", 2), *results(2), MORE],
    "reasoning": [
        USER,
        answer("7", reasoning_content="So."),
        MORE,
        answer("", 1, reasoning_content="So."),
        *results(1),
    ],
    "many calls": [USER, answer("", 7), *results(7)],
    "text with calls": [USER, answer("So.", 1), *results(1), answer("So.", 3), *results(3)],
    "an empty turn": [USER, answer(""), MORE],
    "a result of an invalid call": [USER, answer("look_up("), *results(1)],
    "two of the user": [USER, MORE, answer("7"), USER, MORE],
}


@pytest.mark.parametrize("family", [*TEMPLATES])
@pytest.mark.parametrize("messages", [*USUAL.values()], ids=[*USUAL])
def test_usual_shapes_are_rendered_as_the_template_does(tmp_path: Path, family: str, messages: Any) -> None:
    renderer = opened(tmp_path, family)
    renderer.require_shape(messages, tools=TOOLS)
    renderer.require_shape(messages)


#: What no probe has: a user's message after two turns that have no call.
CHANGE = "{% if messages | selectattr('role', 'equalto', 'system') | list | length > 1 %}Twice.{% endif %}"


def test_a_shape_that_the_template_renders_differently_fails_the_episode(tmp_path: Path) -> None:
    renderer = opened(tmp_path, "qwen3", CHANGE)
    episode = Episode(renderer, [USER], max_tokens=1000)
    sampled = [*renderer.stop_ids[:1]]
    episode.append(sampled, [-1.0])
    episode.end_turn("stop")
    episode.observe([MORE])
    system = {"role": "system", "content": "Be brief."}
    with pytest.raises(RenderingFailed, match=r"qwen3 and the chat template .* differently: .*system \(text\)"):
        episode.rewrite([system, USER, system, MORE])


def test_a_message_whose_text_is_left_out_is_refused(tmp_path: Path) -> None:
    renderer = open_renderer(family_tokenizer(tmp_path, "qwen3"), settings={"name": "qwen3"})  # no template is asked
    with pytest.raises(RenderingFailed, match=r"qwen3 leaves out the text of developer \(text\)"):
        renderer.begin([{"role": "developer", "content": "Never say 7."}, USER])


def counting(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of messages of each rendering."""
    rendered: list[int] = []
    render_ids = renderer._renderer.render_ids

    def counted(messages: Any, **settings: Any) -> Any:
        rendered.append(len(messages))
        return render_ids(messages, **settings)

    monkeypatch.setattr(renderer._renderer, "render_ids", counted)
    return rendered


def test_a_shape_is_compared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = opened(tmp_path, "qwen3")
    rendered = counting(renderer, monkeypatch)
    renderer.require_shape([USER, answer("7"), MORE])
    first = len(rendered)
    assert first > 0
    renderer.require_shape([MORE, answer("another"), USER, answer("8"), USER])
    assert len(rendered) == first
    renderer.require_shape([USER, answer("7"), MORE], tools=TOOLS)
    assert len(rendered) > first


@pytest.mark.parametrize("count", [20_000, 300])
def test_a_conversation_of_any_length_costs_a_few_short_ones(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = opened(tmp_path, "qwen3")
    rendered = counting(renderer, monkeypatch)
    system = {"role": "system", "content": "Be brief."}
    renderer.require_shape([system, USER, *[answer("", 1), *results(1)] * count, answer("7"), MORE])
    assert len(rendered) <= 20
    assert max(rendered) <= MAX_SHAPES + MAX_HEAD
    renderer.require_shape([system, USER, answer("", 1), *results(1), answer("7"), MORE])
    assert len(rendered) <= 20, "the pairs of the long one are known"


def test_shapes_tell_apart_what_templates_treat_differently() -> None:
    messages = [
        USER,
        answer("So.", 1),
        *results(2),
        answer("", 9, reasoning_content="So."),
        {"role": "user", "content": ""},
    ]
    shapes = shapes_of(messages)
    assert shapes == [
        MessageShape("user", True),
        MessageShape("assistant", False, False, 2),  # the second result is of an invalid call
        MessageShape("tool", True),
        MessageShape("tool", True),
        MessageShape("assistant", False, True, 3),
        MessageShape("user", False),
    ]
    assert shapes_of(example_of(shapes)) == shapes
    assert len({*pairs_of(shapes)}) == 6
