"""The first prompt of each source is rendered as the chat template renders it, or the run does not start."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from dora.config.schema import EnvironmentConfig, EvalSetConfig, TaskConfig
from dora.controller.episodes import Conversations
from dora.environments import renderer as renderer_module
from dora.environments.pool import EnvironmentPool
from dora.environments.renderer import open_renderer
from dora.errors import ConfigError
from dora.tasks import prompts as prompts_module
from dora.tasks.prompts import Conversation, open_eval_prompts, open_stream
from dora.tasks.tokenizer import load_tokenizer
from tests.environments.templates_of_families import TEMPLATES
from tests.environments.tokenizers_of_families import make_folder, special_tokens

WORLDS = Path(__file__).parent / "worlds.py"
#: What no probe has.
CHANGE = "{{ 'Take care.' if 'odd' in messages[0].content }}"


def _source(folder: Path, *prompts: str) -> dict[str, object]:
    path = folder / f"{prompts[0]}.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return {"kind": "jsonl", "path": path, "answer": ""}


@pytest.mark.parametrize("settings", [{}, {"name": "qwen3"}], ids=["recognized", "named"])
async def test_the_first_prompts_of_all_sources_are_compared_unless_the_family_is_named(tmp_path, settings) -> None:
    special, eos = special_tokens("qwen3")
    folder = make_folder(tmp_path, special, eos=eos, chat_template=TEMPLATES["qwen3"] + CHANGE)
    tokenizer = load_tokenizer(folder)
    renderer = open_renderer(tokenizer, settings=settings)
    usual, odd = _source(tmp_path, "usual", "odd"), _source(tmp_path, "odd", "usual")
    async with EnvironmentPool(EnvironmentConfig(name=f"{WORLDS}:World", memory_mb=1_024)) as pool:
        converse = Conversations(pool, renderer)

        def opened(*sources: dict[str, object], held_out: dict[str, object]) -> int:
            task = TaskConfig(sources=sources, shuffle=False)
            stream = open_stream(task, tokenizer=tokenizer, seed=0, converse=converse)
            found = [stream.at(position) for position in range(2)]
            eval_set = EvalSetConfig(name="e", source=held_out, prompts=2)
            found += open_eval_prompts(eval_set, task=task, tokenizer=tokenizer, seed=0, converse=converse)
            return sum(prompt is not None and not prompt.skipped for prompt in found)

        other = _source(tmp_path, "other", "odd")
        num_kept = await asyncio.to_thread(opened, usual, held_out=other)
        assert num_kept == (4 if settings else 2)  # each later prompt is compared, too
        if settings:
            return
        with pytest.raises(ConfigError, match=r"odd\.jsonl:1: .*qwen3 and the chat template render .* differently"):
            await asyncio.to_thread(opened, usual, odd, held_out=other)


async def test_a_held_out_set_keeps_a_row_whose_environment_fails_at_first(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(prompts_module, "PAUSES_S", (0.0, 0.0))
    special, eos = special_tokens("qwen3")
    tokenizer = load_tokenizer(make_folder(tmp_path, special, eos=eos, chat_template=TEMPLATES["qwen3"]))
    rows = [{"prompt": "a"}, {"prompt": "b", "reset": "raise_at_first", "file": str(tmp_path / "was here")}]
    path = tmp_path / "rows.jsonl"
    eval_set = EvalSetConfig(name="e", source={"kind": "jsonl", "path": path, "answer": ""})
    async with EnvironmentPool(EnvironmentConfig(name=f"{WORLDS}:World", memory_mb=1_024)) as pool:
        converse = Conversations(pool, open_renderer(tokenizer, settings={"name": "qwen3"}))

        def opened() -> list[str]:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            found = open_eval_prompts(eval_set, task=TaskConfig(), tokenizer=tokenizer, seed=0, converse=converse)
            return [prompt.skipped for prompt in found]

        assert await asyncio.to_thread(opened) == ["", ""]
        rows[1]["reset"] = "fail"
        says = r"^eval\.sets\.e\.source: .*rows\.jsonl:2: the environment failed: .*KeyError.*\(after 3 attempts, 1 "
        with pytest.raises(ConfigError, match=says):
            await asyncio.to_thread(opened)


def test_a_row_whose_prompt_is_not_known_yet_is_known_by_all_of_its_columns(tmp_path: Path) -> None:
    """Siblings that are begun after a resume must get the row that the first ones got."""
    special, eos = special_tokens("qwen3")
    tokenizer = load_tokenizer(make_folder(tmp_path, special, eos=eos, chat_template=TEMPLATES["qwen3"]))
    digests = set()
    for prompt in ("one", "another", "one"):
        task = TaskConfig(sources=[_source(tmp_path, prompt) | {"name": "rows"}], shuffle=False)
        stream = open_stream(task, tokenizer=tokenizer, seed=0, converse=lambda *_: Conversation(is_own=True))
        first = stream.at(0)
        assert first is not None
        digests.add(first.digest)
    assert len(digests) == 2


def test_long_first_prompts_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent may begin each of its episodes with another one of megabytes."""
    monkeypatch.setattr(renderer_module, "LONGEST_BEGUN", 40)
    special, eos = special_tokens("qwen3")
    tokenizer = load_tokenizer(make_folder(tmp_path, special, eos=eos, chat_template=TEMPLATES["qwen3"]))
    renderer = open_renderer(tokenizer, settings={})
    for number in range(2 * renderer_module.MAX_BEGUN):
        for text in (f"{number}", f"{number} " * 40):
            messages = [{"role": "user", "content": text}]
            first = renderer.begin(messages)
            assert renderer.begin(messages) == first == renderer.render(messages)
    kept = renderer._begun
    assert len(kept) == renderer_module.MAX_BEGUN
    assert max(map(len, kept.values())) <= 40
    assert {len(key) for key in kept} == {16}
