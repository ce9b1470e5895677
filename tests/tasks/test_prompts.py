import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from dora.config.schema import EvalSetConfig, SourceConfig, TaskConfig
from dora.errors import ConfigError
from dora.tasks import prompts
from dora.tasks.prompts import Conversation, PromptStream, mix, nested_shares, open_eval_prompts, open_stream
from dora.tasks.sources import HASH_DEPENDENT, open_source
from dora.tasks.tokenizer import load_tokenizer

ROWS = [{"prompt": f"question {i}", "answer": i, "level": i % 3} for i in range(20)]


def write_jsonl(path: Path, rows=ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def open_with(tokenizer):
    def opened(*sources: SourceConfig, seed: int = 0, **task) -> PromptStream:
        return open_stream(TaskConfig(sources=sources, **task), tokenizer=tokenizer, seed=seed)

    return opened


def take(stream: PromptStream, count: int):
    return [stream.at(position) for position in range(count)]


# --- the cursor ----------------------------------------------------------------------------------------------------

CODE = """
import json, sys
from pathlib import Path
from dora.config.schema import TaskConfig
from dora.tasks.prompts import open_stream
from dora.tasks.tokenizer import load_tokenizer
stream = open_stream(TaskConfig(**json.loads(sys.argv[1])), tokenizer=load_tokenizer(Path(sys.argv[2])), seed=11)
print(json.dumps([[p.source, p.text, p.tokens, p.answer, p.metadata] for p in map(stream.at, json.loads(sys.argv[3]))]))
"""


def test_a_position_gives_the_same_prompt_in_any_process_and_any_order(model_folder, open_with, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl")
    sources = [
        {"kind": "jsonl", "path": str(path), "weight": 2},
        {"kind": "reasoning_gym", "name": "leg_counting"},
        {"kind": "arithmetic"},
    ]
    positions = [*range(60), 1_000_000]
    random.Random(0).shuffle(positions)
    here = open_with(*(SourceConfig(**source) for source in sources), seed=11)
    arguments = [json.dumps({"sources": sources}), str(model_folder), json.dumps(positions)]
    there = json.loads(subprocess.check_output([sys.executable, "-c", CODE, *arguments], text=True))
    found = {position: here.at(position) for position in sorted(positions)}
    assert there == [
        [p.source, p.text, list(p.tokens), p.answer, p.metadata] for p in (found[position] for position in positions)
    ]


def test_each_epoch_shows_every_row_once_in_an_order_of_its_own(open_with, tmp_path):
    stream = open_with(SourceConfig(kind="jsonl", path=write_jsonl(tmp_path / "rows.jsonl")))
    texts = [prompt.text for prompt in take(stream, 60)]
    epochs = [texts[0:20], texts[20:40], texts[40:60]]
    assert [sorted(epoch) for epoch in epochs] == [sorted(row["prompt"] for row in ROWS)] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_without_shuffling_rows_come_in_file_order(open_with, tmp_path):
    stream = open_with(SourceConfig(kind="jsonl", path=write_jsonl(tmp_path / "rows.jsonl")), shuffle=False)
    assert [prompt.text for prompt in take(stream, 20)] == [row["prompt"] for row in ROWS]


def test_the_seed_decides_the_order(open_with, tmp_path):
    source = SourceConfig(kind="jsonl", path=write_jsonl(tmp_path / "rows.jsonl"))
    orders = [[p.text for p in take(open_with(source, seed=seed), 20)] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_after_the_last_epoch_the_stream_is_dry_and_stays_so(open_with, tmp_path):
    stream = open_with(SourceConfig(kind="jsonl", path=write_jsonl(tmp_path / "rows.jsonl")), epochs=2)
    assert stream.num_prompts == 40
    assert stream.at(39) is not None
    assert [stream.at(position) for position in (40, 41, 10**9)] == [None] * 3


def test_a_mixture_ends_where_its_first_dry_source_has_no_row_left(open_with, tmp_path):
    short, long = write_jsonl(tmp_path / "short.jsonl"), write_jsonl(tmp_path / "long.jsonl", ROWS * 2)
    sources = [SourceConfig(kind="jsonl", path=short), SourceConfig(kind="jsonl", path=long), SourceConfig(weight=2)]
    stream = open_with(*sources, epochs=1)
    assert mix(stream.num_prompts, shares=nested_shares([1, 1, 2])) == (0, 20)  # the row that is not there
    drawn = Counter((prompt.source, prompt.source_index) for prompt in take(stream, stream.num_prompts))
    assert drawn["short.jsonl", 0] == 20
    assert stream.at(stream.num_prompts) is None


# --- weights -------------------------------------------------------------------------------------------------------

weights = st.lists(st.floats(0.01, 100).map(lambda value: round(value, 2)), min_size=1, max_size=5)


@given(weights)
def test_every_source_counts_its_own_draws_without_gap_and_gets_its_share_of_any_prefix(weights):
    shares = nested_shares(weights)
    drawn = [0] * len(weights)
    for position in range(200):
        source, draw = mix(position, shares=shares)
        assert draw == drawn[source]
        drawn[source] += 1
        for count, weight in zip(drawn, weights, strict=True):
            assert abs(count - (position + 1) * weight / sum(weights)) <= len(weights)


def test_shares_are_exact_over_a_full_period():
    shares = nested_shares([0.5, 0.3, 0.2])
    assert shares == (Fraction(1, 2), Fraction(3, 5), Fraction(1))
    assert Counter(mix(position, shares=shares)[0] for position in range(1000)) == {0: 500, 1: 300, 2: 200}


# --- sources -------------------------------------------------------------------------------------------------------


@pytest.fixture
def module_of_rows(tmp_path, monkeypatch):
    (tmp_path / "rows_module.py").write_text(
        "def make(count):\n    return ({'prompt': f'p{i}', 'answer': f'a{i}'} for i in range(count))\n"
        "def listed():\n    return [['no', 'columns']]\n"
        "def given(row):\n    return [row]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "rows_module"


def test_a_function_is_a_source(open_with, module_of_rows):
    source = SourceConfig(kind="function", name=f"{module_of_rows}:make", options={"count": 3})
    assert [p.answer for p in take(open_with(source, shuffle=False, epochs=1), 3)] == ["a0", "a1", "a2"]


def test_a_set_in_a_row_has_the_same_order_in_every_process(open_with, tmp_path):
    (tmp_path / "sets.py").write_text(
        "def rows():\n"
        "    letters = frozenset('qwertyuiopasdfghjklzxcvbnm')\n"
        "    return [{'prompt': 'p', 'answer': letters, 'b': [{'x': letters}], 'a': {letters}}]\n"
    )
    prompt = open_with(SourceConfig(kind="function", name=f"{tmp_path}/sets.py:rows")).at(0)
    letters = sorted("qwertyuiopasdfghjklzxcvbnm")
    assert json.loads(prompt.answer) == letters
    assert prompt.metadata == {"b": [{"x": letters}], "a": [letters]}
    assert [*prompt.metadata] == ["b", "a"]


def test_parquet_and_jsonl_with_the_same_rows_give_the_same_stream(open_with, tmp_path):
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    streams = [
        open_with(SourceConfig(kind="parquet", path=tmp_path / "rows.parquet")),
        open_with(SourceConfig(kind="jsonl", path=write_jsonl(tmp_path / "rows.jsonl"))),
    ]
    left, right = ([(p.text, p.answer, p.metadata) for p in take(stream, 25)] for stream in streams)
    assert left == right
    assert left[0][2].keys() == {"level"}


def test_a_reasoning_gym_data_set_goes_on_beyond_its_size_without_repeating(open_with):
    source = SourceConfig(kind="reasoning_gym", name="chain_sum", options={"min_digits": 5, "max_digits": 5})
    stream = open_with(source)
    drawn = [stream.at(position) for position in [*range(20), *range(490, 520)]]
    assert len({prompt.text for prompt in drawn}) == 50
    assert drawn[0].metadata["dataset"] == "chain_sum"


def test_held_out_items_of_generators_are_not_in_the_training_stream(tokenizer):
    source = SourceConfig(kind="reasoning_gym", name="chain_sum", options={"min_digits": 6, "max_digits": 6})
    for config in (source, SourceConfig()):
        task = TaskConfig(sources=(config,))
        trained = {p.text for p in take(open_stream(task, tokenizer=tokenizer, seed=1), 300)}
        options = EvalSetConfig(source=config, prompts=300)
        held_out = {p.text for p in open_eval_prompts(options, task=task, tokenizer=tokenizer, seed=1)}
        assert held_out
        assert not trained & held_out


@pytest.mark.parametrize("source", [{"kind": "reasoning_gym", "name": "chain_sum"}, {"kind": "seeds"}])
def test_held_out_items_of_a_generator_have_seeds_of_their_own_whatever_the_run_seed(source):
    config = SourceConfig(**source)
    for seed in (0, 2**29 - 1, 2**127):
        trained = open_source(config, field="f", seed=seed, split="train")
        held_out = open_source(config, field="f", seed=seed, split="heldout")
        assert trained.row(2**29 - 1)["seed"] < 2**30 <= held_out.row(0)["seed"]


def test_rows_of_kind_seeds_have_the_options_beside_the_seed():
    rows = open_source(SourceConfig(kind="seeds", options={"size": 3}), field="f", seed=5, split="train")
    assert [rows.row(index) for index in range(3)] == [{"size": 3, "seed": 5 + index} for index in range(3)]
    assert rows.num_rows is None


def test_an_evaluation_file_is_read_from_its_beginning_and_may_be_short(tokenizer, tmp_path):
    source = SourceConfig(kind="jsonl", path=write_jsonl(tmp_path / "held.jsonl"))
    options = EvalSetConfig(source=source, prompts=100)
    held_out = open_eval_prompts(options, task=TaskConfig(), tokenizer=tokenizer, seed=0)
    assert [prompt.text for prompt in held_out] == [row["prompt"] for row in ROWS]


def test_evaluating_on_the_training_file_is_refused(tokenizer, tmp_path):
    source = SourceConfig(kind="jsonl", path=write_jsonl(tmp_path / "rows.jsonl"))
    with pytest.raises(ConfigError, match=r"task\.sources\.0 trains on the same rows"):
        open_eval_prompts(EvalSetConfig(source=source), task=TaskConfig(sources=(source,)), tokenizer=tokenizer, seed=0)


def test_the_training_file_is_recognized_by_another_path_and_whatever_a_file_does_not_read(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl")
    (tmp_path / "link.jsonl").symlink_to(path)
    trained = SourceConfig(kind="jsonl", path=path, options={"max_terms": 48})
    for again in (SourceConfig(kind="jsonl", path=tmp_path / "link.jsonl"), SourceConfig(kind="jsonl", path=path)):
        with pytest.raises(ConfigError, match=r"task\.sources\.0 trains on the same rows"):
            open_eval_prompts(
                EvalSetConfig(source=again), task=TaskConfig(sources=(trained,)), tokenizer=tokenizer, seed=0
            )


def test_an_option_that_the_arithmetic_refuses_is_named_by_its_key(tokenizer):
    source = SourceConfig(options={"max_terms": 99})
    with pytest.raises(ConfigError, match=r"^task\.sources\.0\.options: arithmetic: need 2 <= min_terms <= max_terms"):
        open_stream(TaskConfig(sources=(source,)), tokenizer=tokenizer, seed=0)


# --- rendering -----------------------------------------------------------------------------------------------------


def test_plain_prompts_get_the_tokenizers_own_bos_once(open_with, tokenizer):
    prompt = open_with(SourceConfig()).at(0)
    assert prompt.tokens[0] == 0
    assert 0 not in prompt.tokens[1:]
    assert tokenizer.decode(prompt.tokens) == prompt.text


def test_chat_prompts_carry_the_system_prompt_and_no_second_bos(open_with, tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "2+2?", "answer": None}])
    prompt = open_with(SourceConfig(kind="jsonl", path=path), chat_template=True, system_prompt="Add.").at(0)
    assert prompt.text == (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert list(prompt.tokens) == tokenizer.encode(prompt.text, special_tokens=False)
    assert 0 not in prompt.tokens
    assert prompt.answer == ""


def test_a_system_message_of_the_row_stands_above_the_configured_one(open_with, tmp_path):
    messages = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "hi"}]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"chat": messages, "answer": ["x"]}])
    source = SourceConfig(kind="jsonl", path=path, prompt="chat")
    prompt = open_with(source, chat_template=True, system_prompt="Ours.").at(0)
    assert "Mine." in prompt.text
    assert "Ours." not in prompt.text
    assert prompt.answer == '["x"]'


# --- bad input -----------------------------------------------------------------------------------------------------


def test_a_malformed_jsonl_line_is_named_with_file_and_line_wherever_it_stands(open_with, tmp_path, monkeypatch):
    monkeypatch.setattr(prompts, "CHECKED_ROWS", 5)
    path = write_jsonl(tmp_path / "rows.jsonl")
    path.write_text(path.read_text() + "\n" + '{"prompt": "x", "answer": \n')
    with pytest.raises(ConfigError, match=rf"{path}:22: not a JSON object"):
        open_with(SourceConfig(kind="jsonl", path=path))


# --- rows over the limit -------------------------------------------------------------------------------------------

LONG = {"prompt": "long " * 60, "answer": 1}


def test_a_row_over_the_limit_keeps_its_position_and_has_no_tokens(open_with, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [*ROWS[:5], LONG, *ROWS[5:]])
    stream = open_with(SourceConfig(kind="jsonl", path=path), shuffle=False, epochs=1)
    assert stream.num_prompts == 21
    prompts = take(stream, 21)
    assert [p.text for p in prompts if not p.skipped] == [row["prompt"] for row in ROWS]
    assert (prompts[5].position, prompts[5].tokens, prompts[5].text) == (5, (), LONG["prompt"])
    assert prompts[5].skipped == f"{path}:6: the prompt has 301 tokens, task.max_prompt_tokens allows 1 to 256"
    assert stream.at(5) == prompts[5]


def test_more_than_half_of_the_first_rows_over_the_limit_are_an_error_that_names_it(open_with, tmp_path):
    short, half = ROWS[:10], [*ROWS[:10], *[LONG] * 10]
    path = write_jsonl(tmp_path / "rows.jsonl", half)
    assert open_with(SourceConfig(kind="jsonl", path=path)).num_prompts is None
    write_jsonl(path, [*half, LONG])
    says = r"task\.max_prompt_tokens: 11 of the first 21 rows of rows\.jsonl have more than 256 tokens; raise the limit"
    with pytest.raises(ConfigError, match=says):
        open_with(SourceConfig(kind="jsonl", path=path))
    write_jsonl(path, [*short * 50, *[LONG] * 501])  # of which the first 1,000 are judged
    open_with(SourceConfig(kind="jsonl", path=path))
    write_jsonl(path, [*short * 49, *[LONG] * 501, *short * 50])
    with pytest.raises(ConfigError, match=r"501 of the first 1,000 rows"):
        open_with(SourceConfig(kind="jsonl", path=path))


def test_rows_of_a_generator_are_judged_as_they_are_drawn_each_once(open_with):
    stream = open_with(SourceConfig(), max_prompt_tokens=1)
    for _ in range(2):
        assert all(stream.at(position).skipped for position in range(500))
    with pytest.raises(ConfigError, match=r"task.max_prompt_tokens: 501 of the first 1,000 prompts have more than 1 t"):
        stream.at(500)


def test_a_long_row_of_a_held_out_set_is_skipped_too(tokenizer, tmp_path):
    source = SourceConfig(kind="jsonl", path=write_jsonl(tmp_path / "held.jsonl", [*ROWS, LONG]))
    held_out = open_eval_prompts(EvalSetConfig(source=source), task=TaskConfig(), tokenizer=tokenizer, seed=0)
    assert [bool(prompt.skipped) for prompt in held_out] == [False] * 20 + [True]
    task = TaskConfig(max_prompt_tokens=10)
    with pytest.raises(ConfigError, match=r"21 of the first 21 rows of eval.sets.heldout.source \(held.jsonl\)"):
        open_eval_prompts(EvalSetConfig(source=source), task=task, tokenizer=tokenizer, seed=0)


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        ({"question": "q", "gold": 1}, {}, r"rows.jsonl:1: no column 'prompt' .*; present: gold, question"),
        ({"prompt": "q"}, {}, r"rows.jsonl:1: no column 'answer' .*; present: prompt"),
        ({"prompt": 3, "answer": 1}, {}, r"rows.jsonl:1: column 'prompt' has int"),
        ({"chat": [], "answer": 1}, {"prompt": "chat"}, "messages must be a non-empty list"),
        ({"chat": [{"role": "user"}], "answer": 1}, {"prompt": "chat"}, "each with role and content"),
        ({"chat": 3, "answer": 1}, {"prompt": "chat"}, "a prompt must be text, or a list of"),
    ],
)
def test_a_row_that_cannot_be_a_prompt_is_named_with_what_is_wrong(open_with, tmp_path, row, columns, message):
    path = write_jsonl(tmp_path / "rows.jsonl", [row])
    with pytest.raises(ConfigError, match=message):
        open_with(SourceConfig(kind="jsonl", path=path, **columns), chat_template=bool(columns))


def test_a_row_whose_columns_are_not_named_by_text_is_one_line(open_with, tmp_path, module_of_rows):
    (tmp_path / f"{module_of_rows}.py").write_text("def numbered():\n    return [{1: 'p', 'answer': 'a'}]\n")
    with pytest.raises(ConfigError, match=r"numbered row 0: no column 'prompt' .*; present: 1, answer"):
        open_with(SourceConfig(kind="function", name=f"{tmp_path / module_of_rows}.py:numbered"))


@pytest.mark.parametrize("chat_template", [True, False])
@pytest.mark.parametrize(
    "row",
    [{"prompt": "\ud800"}, {"answer": "\ud800"}, {"more": [{"a": "\udc00"}]}, {"a\ud800": 1}],
    ids=["prompt", "answer", "column", "name of a column"],
)
def test_half_of_a_character_in_a_row_is_one_line_that_names_the_row(open_with, module_of_rows, row, chat_template):
    options = {"row": {"prompt": "p", "answer": "a"} | row}
    source = SourceConfig(kind="function", name=f"{module_of_rows}:given", options=options)
    with pytest.raises(ConfigError, match=r"given row 0: a text has a lone surrogate, which is not a character"):
        open_with(source, chat_template=chat_template)


@pytest.mark.parametrize("is_nested", [False, True])
def test_an_image_in_a_row_of_a_data_set_is_not_opened(open_with, tmp_path, monkeypatch, is_nested):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    image, shown = datasets.Image(), {"path": "/nowhere.png", "bytes": None}
    kind = datasets.List({"image": image}) if is_nested else image
    rows = {"prompt": ["p"], "answer": ["a"], "shown": [[{"image": shown}] if is_nested else shown]}
    text = datasets.Value("string")
    features = datasets.Features({"prompt": text, "answer": text, "shown": kind})
    stored = pyarrow.table(rows, schema=features.arrow_schema)  # the schema names the types
    (tmp_path / "set").mkdir()
    parquet.write_table(stored, tmp_path / "set" / "train.parquet")
    prompt = open_with(SourceConfig(kind="datasets", path=str(tmp_path / "set"))).at(0)
    assert prompt.metadata["shown"] == rows["shown"][0]


def test_of_a_card_of_any_size_no_more_than_the_limit_is_read(open_with, tmp_path):
    pytest.importorskip("datasets")
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    (tmp_path / "README.md").touch()
    os.truncate(tmp_path / "README.md", 1 << 40)
    with pytest.raises(ConfigError, match=r"README\.md: has more than 4,194,304 bytes; it was not read"):
        open_with(SourceConfig(kind="datasets", path=str(tmp_path)))


def test_a_template_that_rejects_a_row_names_both(open_with, tmp_path, model_folder):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ 1 // (messages[0].content|length - 2) }}")
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "answer": ""}\n{"prompt": "bb", "answer": ""}\n')
    task = TaskConfig(sources=[{"kind": "jsonl", "path": tmp_path / "a.jsonl"}], chat_template=True)
    with pytest.raises(ConfigError) as refused:
        open_stream(task, tokenizer=load_tokenizer(folder), seed=0)
    assert str(refused.value) == (
        f"{tmp_path / 'a.jsonl'}:2: the chat template in {folder / 'chat_template.jinja'} rejected the messages: "
        "ZeroDivisionError: integer division or modulo by zero; correct it, or set task.chat_template = false "
        "(1 of 2 rows cannot be used; at most 1 % may be left out)"
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"kind": "jsonl"}, r"task.sources.0.path: kind 'jsonl' needs a file"),
        ({"kind": "parquet", "path": "nowhere"}, "nowhere is not a file"),
        ({"kind": "jsonl", "path": "rows/train.jsonl"}, "rows/train.jsonl is not a file$"),
        (
            {"kind": "jsonl", "path": "openai/gsm8k"},
            r'task.sources.0.path: openai/gsm8k is not a file; for a data set of the hub, set kind to "datasets"$',
        ),
        ({"kind": "parquet", "path": __file__}, "is not a Parquet file"),
        ({"kind": "reasoning_gym", "name": "leg_count"}, "did you mean 'leg_counting'"),
        ({"kind": "reasoning_gym", "name": "leg_counting", "options": {"legs": 3}}, "rejects them"),
        ({"kind": "reasoning_gym", "name": "leg_counting", "options": {"seed": 3}}, "are set by the run"),
        ({"kind": "arithmetic", "options": {"legs": 3}}, "unknown option legs; arithmetic takes min_terms, max_terms"),
        ({"kind": "function", "name": "nomodule"}, "expected FILE.py:function or module:function, got 'nomodule'"),
        ({"kind": "function", "name": "no_such_module:f"}, "cannot import 'no_such_module'"),
        ({"kind": "function", "name": "rows_module:nothing"}, "has no function 'nothing'"),
        ({"kind": "function", "name": "rows_module:make"}, "rows_module:make failed"),
        ({"kind": "function", "name": "rows_module:make", "options": {"count": 0}}, "has no rows"),
        ({"kind": "function", "name": "rows_module:listed"}, "a row must be a dict of columns, not list"),
    ],
)
@pytest.mark.usefixtures("module_of_rows")
def test_a_source_that_cannot_be_opened_is_a_config_error_that_names_its_field(open_with, source, message):
    with pytest.raises(ConfigError, match=message):
        open_with(SourceConfig(**source))


@pytest.mark.parametrize("task", [{"system_prompt": "x"}, {"sources": ({"kind": "jsonl", "prompt": "chat"},)}])
def test_chat_features_without_a_chat_template_are_refused(tokenizer, tmp_path, task):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"chat": [{"role": "user", "content": "x"}], "answer": 1}])
    for source in task.get("sources", ()):
        source["path"] = path
    with pytest.raises(ConfigError, match="chat_template"):
        open_stream(TaskConfig(**task), tokenizer=tokenizer, seed=0)


@pytest.mark.parametrize(
    ("kind", "package", "extra"),
    [
        ("datasets", "datasets", "datasets"),
        ("parquet", "pyarrow", "pyarrow"),
        ("reasoning_gym", "reasoning_gym", "reasoning-gym"),
    ],
)
def test_an_extra_is_asked_for_with_the_command_that_installs_it(open_with, monkeypatch, kind, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError) as raised:
        open_with(SourceConfig(kind=kind, name="any"))
    assert str(raised.value) == f"task.sources.0.kind: {extra} is not installed; run pip install 'dora-rl[{extra}]'"


def test_data_sets_that_depend_on_the_hash_seed_are_refused_while_it_is_random(open_with):
    name = min(HASH_DEPENDENT)
    if sys.flags.hash_randomization:
        with pytest.raises(ConfigError, match="set PYTHONHASHSEED=0"):
            open_with(SourceConfig(kind="reasoning_gym", name=name))
    else:
        assert open_with(SourceConfig(kind="reasoning_gym", name=name), max_prompt_tokens=10_000).at(0)


def test_held_out_rows_whose_environment_fails_are_not_called_too_long(tmp_path, tokenizer):
    source = SourceConfig(kind="jsonl", path=write_jsonl(tmp_path / "rows.jsonl"))
    with pytest.raises(
        ConfigError, match=r"eval.sets.heldout.source: 20 of .* have no prompt; .*rows.jsonl:1: it broke"
    ):
        open_eval_prompts(
            EvalSetConfig(source=source),
            task=TaskConfig(),
            tokenizer=tokenizer,
            seed=0,
            converse=lambda row, source, where: Conversation(failed="it broke"),
        )
