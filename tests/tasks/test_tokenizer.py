import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dora.errors import ConfigError
from dora.tasks.tokenizer import load_tokenizer

MESSAGES = [{"role": "system", "content": "Be <brief>."}, {"role": "user", "content": "Wie viel ist 2+3? ½"}]


def _copy(folder: Path, to: Path, **changes: object) -> Path:
    shutil.copytree(folder, to, dirs_exist_ok=True)
    file = to / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return to


def test_ids_and_rendered_chats_equal_those_of_transformers(model_folder):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(model_folder)
    for thinking in (None, True, False):
        ours = load_tokenizer(model_folder, thinking=thinking)
        switch = {} if thinking is None else {"enable_thinking": thinking}
        rendered = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True, **switch)
        assert ours.render_chat(MESSAGES) == rendered
        assert ours.encode(rendered, special_tokens=False) == theirs.encode(rendered, add_special_tokens=False)
        assert ours.encode("3+4=") == theirs.encode("3+4=")
        assert ours.decode(ours.encode(rendered)) == theirs.decode(theirs.encode(rendered), skip_special_tokens=True)
        assert ours.vocab_size == len(theirs)


def test_importing_all_that_the_controller_needs_of_tasks_leaves_torch_and_transformers_out():
    code = (
        "import sys, dora.tasks.prompts, dora.tasks.tokenizer, dora.tasks.pool;"
        "print([name for name in ('torch', 'transformers', 'math_verify') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_end_tokens_of_all_three_files_count(tokenizer):
    assert tokenizer.eos_ids == (9, 2, 7)


def test_the_thinking_switch_reaches_the_template(model_folder):
    assert load_tokenizer(model_folder, thinking=False).render_chat(MESSAGES).endswith("assistant\n<think></think>")
    assert load_tokenizer(model_folder, thinking=True).render_chat(MESSAGES).endswith("assistant\n")


def test_a_thinking_switch_that_the_template_lacks_is_refused(model_folder, tmp_path):
    folder = _copy(model_folder, tmp_path, chat_template="{{ messages[0].content }}")
    with pytest.raises(ConfigError, match="has no enable_thinking switch"):
        load_tokenizer(folder, thinking=False)


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ("{% generation %}{{ messages[1].content }}{% endgeneration %}", "Wie viel ist 2+3? ½"),
        ("{{ messages[0].content | tojson }}", '"Be <brief>."'),
        ("{% for m in messages %}{% if loop.index0 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "system"),
        ("{% if strftime_now('%Y')|length == 4 %}dated{% endif %}", "dated"),
    ],
)
def test_templates_may_use_what_transformers_offers_them(model_folder, tmp_path, template, rendered):
    assert load_tokenizer(_copy(model_folder, tmp_path, chat_template=template)).render_chat(MESSAGES) == rendered


def test_a_template_file_stands_above_the_tokenizer_settings(model_folder, tmp_path):
    folder = _copy(model_folder, tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages[1].role }}")
    assert load_tokenizer(folder).render_chat(MESSAGES) == "user"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system role here') }}", "rejected the messages: no system role here"),
        ("{% for %}", "does not parse"),
        ("{{ messages.__class__.__mro__ }}", "rejected the messages"),
        (None, "has no chat template"),
    ],
)
def test_a_template_that_cannot_work_is_one_clear_line(model_folder, tmp_path, template, message):
    folder = _copy(model_folder, tmp_path, chat_template=template)
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(folder).render_chat(MESSAGES)


def test_a_folder_without_a_tokenizer_says_how_to_get_one(tmp_path):
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json; write one with"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a tokenizer"):
        load_tokenizer(tmp_path)


def _with_tokenizer(model_folder: Path, tmp_path: Path, **changed) -> Path:
    folder = _copy(model_folder, tmp_path)
    content = json.loads((folder / "tokenizer.json").read_bytes())
    (folder / "tokenizer.json").write_text(json.dumps(content | changed))
    return folder


def _merging(prefix: str, merge: str | list[str]) -> dict[str, object]:
    vocab = {"a": 0, "b": 1, "ab": 2, "é": 3, "#b": 4}
    return {"model": {"type": "BPE", "vocab": vocab, "merges": [merge], "continuing_subword_prefix": prefix}}


@pytest.mark.parametrize(
    "changed",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        _merging("##", "a b"),
        _merging("#", "a é"),
        _merging("#", ["a", "é"]),
    ],
    ids=["normalizer", "merges", "cut characters", "cut characters of pairs"],
)
def test_a_tokenizer_in_which_rust_panics_is_one_line(model_folder, tmp_path, changed):
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a tokenizer \(.+\); replace it$"):
        load_tokenizer(_with_tokenizer(model_folder, tmp_path, **changed))


def test_a_prefix_of_later_parts_is_allowed(model_folder, tmp_path):
    folder = _with_tokenizer(model_folder, tmp_path, **_merging("#", ["a", "#b"]))
    assert load_tokenizer(folder).encode("ab", special_tokens=False) == [2]


@pytest.mark.parametrize(
    "changed",
    [
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}},
        {"model": {"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": None}},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8="}},
    ],
    ids=["unknown word", "unknown piece", "panic", "panic of the normalizer"],
)
def test_a_text_that_a_tokenizer_cannot_encode_is_one_line(model_folder, tmp_path, changed):
    with pytest.raises(
        ConfigError, match=r"model\.path: .+ (is not a tokenizer|cannot encode a text) \(.+\); replace it$"
    ):
        load_tokenizer(_with_tokenizer(model_folder, tmp_path, **changed)).encode("word", special_tokens=False)


def test_an_answer_that_a_tokenizer_cannot_decode_is_one_line(model_folder, tmp_path):
    decoder = {"type": "Strip", "content": "a", "start": 5, "stop": 5}
    tokenizer = load_tokenizer(_with_tokenizer(model_folder, tmp_path, decoder=decoder))
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot decode an answer \(.+\); replace it$"):
        tokenizer.decode(tokenizer.encode("a", special_tokens=False))
