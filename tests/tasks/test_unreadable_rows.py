"""Rows that cannot be read: few are skipped like prompts that are too long, many are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from dora.app.inputs import open_evaluations
from dora.config.load import load
from dora.config.schema import EvalConfig, EvalSetConfig, SourceConfig, TaskConfig
from dora.errors import ConfigError, RunFailed
from dora.seed.policy import path as seed_path
from dora.tasks import prompts
from dora.tasks.prompts import Conversation, PromptStream, open_eval_prompts, open_stream
from dora.tasks.tokenizer import Tokenizer, load_tokenizer

REFUSED = r"\(3 of 202 rows cannot be used; at most 1 % may be left out\)$"
GOOD = [json.dumps({"prompt": f"question {i}", "answer": str(i)}) for i in range(199)]
BAD = {
    "no JSON": '{"prompt": "x", ',
    "no object": "[1]",
    "no prompt": '{"question": "x", "answer": "1"}',
    "no answer": '{"prompt": "x"}',
    "no text": '{"prompt": 7, "answer": "1"}',
    "half a character": '{"prompt": "\\ud800", "answer": "1"}',
    "many brackets": "[" * 100_000,
}


def write(path: Path, lines: list[str]) -> SourceConfig:
    path.write_text("\n".join(lines))
    return SourceConfig(kind="jsonl", path=path)


def opened(source: SourceConfig, tokenizer: Tokenizer, **task: Any) -> PromptStream:
    return open_stream(TaskConfig(sources=(source,), **task), tokenizer=tokenizer, seed=0)


@pytest.mark.parametrize("bad", BAD)
def test_one_in_a_hundred_keeps_its_position_and_is_named(tokenizer: Tokenizer, tmp_path: Path, bad: str) -> None:
    path = tmp_path / "rows.jsonl"
    stream = opened(write(path, [*GOOD[:7], BAD[bad], *GOOD[7:]]), tokenizer, shuffle=False, epochs=1)
    assert stream.num_prompts == 200
    found = [stream.at(position) for position in range(200)]
    skipped = [prompt for prompt in found if prompt is not None and prompt.skipped]
    assert [(prompt.position, prompt.tokens, prompt.is_readable) for prompt in skipped] == [(7, (), False)]
    assert skipped[0].skipped.startswith(f"{path}:8: ")
    assert "\n" not in skipped[0].skipped
    assert skipped[0] == stream.at(7)


@pytest.mark.parametrize("bad", BAD)
def test_more_are_refused_with_the_first_and_their_number(tokenizer: Tokenizer, tmp_path: Path, bad: str) -> None:
    source = write(tmp_path / "rows.jsonl", [*GOOD[:7], *[BAD[bad]] * 3, *GOOD[7:]])
    with pytest.raises(ConfigError, match=rf"rows\.jsonl:8: .* {REFUSED}"):
        opened(source, tokenizer)
    with pytest.raises(ConfigError, match=rf"rows\.jsonl:8: .* {REFUSED}"):
        open_eval_prompts(EvalSetConfig(source=source), task=TaskConfig(), tokenizer=tokenizer, seed=0)


def test_rows_that_were_not_looked_at_are_refused_when_too_many_were_drawn(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "CHECKED_ROWS", 100)
    stream = opened(write(tmp_path / "rows.jsonl", [*GOOD, *[BAD["no prompt"]] * 3]), tokenizer, shuffle=False)
    for again in range(2):  # a row counts once, however often it is drawn
        assert [stream.at(position).is_readable for position in (199, 200)] == [False, False], again  # type: ignore[union-attr]
    with pytest.raises(
        ConfigError,
        match=rf"rows\.jsonl:200: no column 'prompt'.* {REFUSED}",
    ):
        stream.at(201)


def test_a_parquet_row_that_python_has_no_value_for_is_skipped(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [{"prompt": f"question {i}", "answer": "1", "when": 0} for i in range(200)]
    rows[3]["when"] = 2**52  # in millions of years
    table = pyarrow.Table.from_pylist(rows)
    when = table["when"].cast(pyarrow.timestamp("s"))
    parquet.write_table(table.set_column(2, "when", when), tmp_path / "rows.parquet")
    source = SourceConfig(kind="parquet", path=tmp_path / "rows.parquet")
    stream = opened(source, tokenizer, shuffle=False)
    prompt = stream.at(3)
    assert prompt is not None
    assert prompt.skipped.startswith(f"{tmp_path}/rows.parquet row 3: cannot be read (")
    assert stream.at(4).tokens  # type: ignore[union-attr]


def test_an_answer_that_json_cannot_hold_is_a_row_that_cannot_be_read(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "answers.py"
    module.write_text(
        "def given(number):\n"
        "    return [{'prompt': 'x', 'answer': 2j}, *({'prompt': 'x', 'answer': {1: 2}} for _ in range(number))]\n"
    )
    source = SourceConfig(kind="function", name=f"{module}:given", options={"number": 199})
    stream = opened(source, tokenizer, shuffle=False)
    found = [stream.at(position) for position in range(2)]
    assert [prompt.is_readable for prompt in found] == [False, True]  # type: ignore[union-attr]
    assert found[1].answer == '{"1":2}'  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"given row 0: a column cannot be passed to the rewards \(.*complex"):
        opened(source.model_copy(update={"options": {"number": 9}}), tokenizer)


@pytest.mark.parametrize("column", ["answer", "level"])
@pytest.mark.parametrize("value", ["10**5000", "ring"], ids=["too many digits", "in itself"])
def test_a_value_that_has_no_end_or_too_many_digits_is_a_row_that_cannot_be_read(
    tokenizer: Tokenizer, tmp_path: Path, column: str, value: str
) -> None:
    module = tmp_path / "values.py"
    row = f"{{'prompt': 'x', 'answer': '1', '{column}': {value}}}"
    module.write_text(f"ring = []\nring.append(ring)\ndef given():\n    return [{row}]\n")
    with pytest.raises(ConfigError, match=r"given row 0: a column cannot be passed to the rewards \("):
        opened(SourceConfig(kind="function", name=f"{module}:given"), tokenizer)


def test_a_file_that_goes_during_the_run_ends_it_in_one_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    stream = opened(write(tmp_path / "rows.jsonl", GOOD), tokenizer, shuffle=False)
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(RunFailed, match=r"rows\.jsonl:4: cannot be read any more: No such file or directory$"):
        stream.at(3)


def test_a_file_that_the_system_does_not_give_is_named(tokenizer: Tokenizer) -> None:
    memory = SourceConfig(kind="jsonl", path=Path("/proc/self/mem"))  # has no page at its beginning
    with pytest.raises(ConfigError, match=r"^task\.sources\.0\.path: .* cannot be read \(Input/output error\)$"):
        opened(memory, tokenizer)


def test_held_out_rows_that_cannot_be_read_are_left_out(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", [BAD["no JSON"], *GOOD])
    found = open_eval_prompts(EvalSetConfig(source=source), task=TaskConfig(), tokenizer=tokenizer, seed=0)
    assert [prompt.is_readable for prompt in found[:2]] == [False, True]


def test_an_evaluation_says_how_many_rows_it_lacks_and_why(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", [BAD["no JSON"], *GOOD])
    config = load(None, ["task.max_prompt_tokens=20"], environ={})
    config = config.model_copy(update={"eval": EvalConfig(sets=(EvalSetConfig(source=source),))})
    [held_out] = open_evaluations(config.eval, config.task, load_tokenizer(seed_path())).sets
    assert (len(held_out.prompts), held_out.num_skipped) == (199, 0)
    assert [text.partition(": ")[0] for text in held_out.unreadable] == [f"{tmp_path}/rows.jsonl:1"]


def test_an_environment_begins_with_the_first_row_that_can_be_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    asked: list[str] = []

    def converse(row: Any, source: str, where: str) -> Conversation:
        asked.append(where)
        return Conversation(tokens=(1, 2))

    source = write(tmp_path / "rows.jsonl", [BAD["no JSON"], *GOOD])
    stream = open_stream(TaskConfig(sources=(source,)), tokenizer=tokenizer, seed=0, converse=converse)
    assert asked == [f"{tmp_path}/rows.jsonl:2"]
    assert stream.num_prompts is None
