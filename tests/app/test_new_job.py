"""`dora init`: what it guesses from data, and the files that it writes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from dora.app.new_job import NamedData, NamedModel, NewJob, preset_for
from dora.config.load import load
from dora.config.presets import PRESETS
from dora.config.schema import Config
from dora.errors import ConfigError
from dora.seed.policy import path as seed_path

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def rows(*given: dict) -> NamedData:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    return NamedData.open("rows.jsonl")


def sums(**columns: object) -> NamedData:
    return rows(*({"question": f"{n}+7=?", "answer": str(n + 7), **columns} for n in range(8)))


def written(data: NamedData, *, model: str = "seed", preset: str = "laptop", reward: str = "math") -> str:
    prompt = data.prompt_column()
    answer = data.answer_column(prompt=prompt)
    job = NewJob(model=NamedModel.open(model), data=data, prompt=prompt, answer=answer, reward=reward, preset=preset)
    return job.text()


def loaded(text: str) -> Config:
    Path("job.toml").write_text(text)
    return load(Path("job.toml"), environ={})


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"id": 1, "question": "q", "answer": "a"}, "question", "answer"),
        ({"Problem": "q", "Solution": "a", "source": "s"}, "Problem", "Solution"),
        ({"messages": [{"role": "user", "content": "q"}], "label": "a"}, "messages", "label"),
        ({"words": "q", "number": 3}, "words", ""),
    ],
)
def test_columns_are_guessed_by_their_names(row: dict, prompt: str, answer: str) -> None:
    data = rows(row)
    assert data.prompt_column() == prompt
    assert data.answer_column(prompt=prompt) == answer


def test_if_no_column_looks_like_a_prompt_all_are_named() -> None:
    with pytest.raises(ConfigError, match=r"--prompt: none of the columns .*; name one of left, right"):
        rows({"left": "a", "right": "b"}).prompt_column()
    with pytest.raises(ConfigError, match=r"--answer: rows.jsonl has no column 'anwser'; it has question, answer"):
        sums().require("anwser", option="--answer")


def test_rows_that_a_run_leaves_out_do_not_count() -> None:
    good = [{"text": f"{n}+7=?", "answer": str(n + 7)} for n in range(198)]
    rows(*good)
    with Path("rows.jsonl").open("a") as file:
        file.write('{"text": \n' + json.dumps({"text": None, "answer": "0"}) + "\n")
    data = NamedData.open("rows.jsonl")
    assert data.prompt_column() == "text"
    assert loaded(written(data)).task.sources[0].prompt == "text"


def test_if_no_row_can_be_read_the_first_says_why() -> None:
    Path("rows.py").write_text("def none():\n    return [1, 2]\n")
    with pytest.raises(ConfigError, match=r"rows\.py:none row 0: a row must be a dict of columns, not int"):
        NamedData.open("rows.py:none")


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("72", "math"), ("-1,234.5", "math"), ("so it is\n#### 72", "math"), ("\\boxed{x}", "math"), ("Paris", "exact")],
)
def test_the_reward_is_guessed_by_the_answers(answer: str, reward: str) -> None:
    data = rows({"prompt": "q", "answer": answer})
    assert data.reward(answer="answer") == reward
    assert data.reward(answer="") == ""


@pytest.mark.parametrize("preset", PRESETS)
def test_every_key_has_a_comment_that_says_what_it_means(preset: str) -> None:
    text = written(sums(), preset=preset)
    lines = text.splitlines()
    keys = [index for index, line in enumerate(lines) if re.match(r"\w+ = ", line)]
    assert len(keys) > 10
    assert all(re.match(r"# \S.+", lines[index - 1]) for index in keys)
    config = loaded(text)
    assert (config.task.sources[0].prompt, config.task.rewards[0].kind) == ("question", "math")
    assert (config.trainer.device == "cuda") == (preset != "laptop")


def test_the_comment_of_a_choice_is_about_what_was_chosen() -> None:
    assert '# math: math-verify compares response and answer.\nkind = "math"' in written(sums())


def test_a_model_with_a_chat_template_gets_chats() -> None:
    shutil.copytree(seed_path(), "model")
    Path("model/chat_template.jinja").write_text(TEMPLATE)
    config = loaded(written(sums(), model="model"))
    assert config.task.chat_template
    assert "boxed" in config.task.system_prompt
    assert config.trainer.learning_rate == 1e-6


def test_prompts_that_a_run_would_leave_out_are_not_all_of_them() -> None:
    data = rows(*({"prompt": "1+" * (60 if n else 5_000), "answer": "3"} for n in range(5)))
    config = loaded(written(data))
    assert config.task.max_prompt_tokens == 512, "half the positions of the model; the one row is skipped"
    assert config.longest_request <= 1_024


def test_names_of_others_do_not_escape_from_their_values() -> None:
    name = 'question"\n[engine]\ncommand = ["id"]\n#\x1b[2J'
    data = rows({name: "3+4=?"})
    config = loaded(written(data, reward="math"))
    assert config.task.sources[0].prompt == name
    assert config.engine.command == ()


def test_without_a_device_of_a_gpu_torch_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    if preset_for({})[1]:
        pytest.skip("there is a GPU")
    assert preset_for({}) == ("laptop", 0)
