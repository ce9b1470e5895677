"""Which renderer a model folder gets, and what is refused before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from renderers import config_from_name

from dora.environments.renderer import RenderingFailed, _config, open_renderer
from dora.errors import ConfigError
from dora.tasks.tokenizer import load_tokenizer
from tests.environments.recorded_engine import TOOLS
from tests.environments.templates_of_families import TEMPLATES
from tests.environments.tokenizers_of_families import family_tokenizer, make_folder, special_tokens

QUESTION = [{"role": "user", "content": "q"}]

TEMPLATE = TEMPLATES["qwen3"]


def _folder(path, template: str):
    special, eos = special_tokens("qwen3")
    return make_folder(path, special, eos=eos, chat_template=template)


def test_the_family_is_recognized_by_what_the_chat_template_renders(tmp_path):
    tokenizer = load_tokenizer(_folder(tmp_path, TEMPLATE))
    assert open_renderer(tokenizer).family == "qwen3"
    assert open_renderer(tokenizer, settings={"name": "auto"}).family == "qwen3"


@pytest.mark.parametrize(
    "change", [("<tool_response>", "<response>"), ("<|im_start|>assistant", "<|im_start|>model"), ('"name"', '"tool"')]
)
def test_a_template_that_no_family_renders_is_refused_by_name(tmp_path, change):
    tokenizer = load_tokenizer(_folder(tmp_path, TEMPLATE.replace(*change)))
    with pytest.raises(ConfigError) as refused:
        open_renderer(tokenizer)
    line = str(refused.value)
    assert line.startswith(f"environment.renderer: the chat template of {tmp_path} cannot continue a conversation")
    assert "glm-4.5" in line
    assert 'import_path = "file.py:Class"' in line
    assert "\n" not in line
    assert open_renderer(tokenizer, settings={"name": "qwen3"}).family == "qwen3"  # the user knows


@pytest.mark.parametrize(
    ("old", "new", "differs"),
    [
        ("{%- if tools", "{% if messages[0].role != 'system' %}Be kind.{% endif %}\n{%- if tools", "no system message"),
        (
            "message.role + '\\n'",
            "message.role + ('\\n' if messages[0].role == 'system' else ' ')",
            "no system message",
        ),
        ("{{ message.content }}", "{{ message.content if not message.tool_calls }}", "text with a call"),
        ("and message.reasoning_content", "and false", "reasoning with a call"),
        ("loop.index0 > last.question", "loop.index0 > 0", "the reasoning of an earlier turn"),
        ("{%- if not loop.first or message.content %}", "{%- if message.content %}", "several calls in a turn"),
    ],
    ids=["default system message", "users without a system message", "text", "no reasoning", "old reasoning", "calls"],
)
def test_a_refusal_says_where_the_nearest_family_differs(tmp_path, old, new, differs):
    assert TEMPLATE.count(old) == 1
    tokenizer = load_tokenizer(_folder(tmp_path, TEMPLATE.replace(old, new)))
    with pytest.raises(ConfigError, match=rf"several turns must \(qwen3 renders .*{differs}.* differently\); name the"):
        open_renderer(tokenizer)


def test_a_template_that_cannot_be_rendered_is_refused_with_its_file(tmp_path):
    tokenizer = load_tokenizer(_folder(tmp_path, "{{ 1/0 }}"))
    file = tmp_path / "tokenizer_config.json"
    with pytest.raises(
        ConfigError, match=rf"must \(the chat template in {file} rejected the messages: .*division by zero"
    ):
        open_renderer(tokenizer)


def test_a_template_that_rejects_what_the_family_renders_is_refused(tmp_path):
    reject = (
        "{% for m in messages if m.tool_calls and m.tool_calls|length > 1 %}{{ raise_exception('one') }}{% endfor %}"
    )
    tokenizer = load_tokenizer(_folder(tmp_path, reject + TEMPLATE))
    with pytest.raises(ConfigError, match=r"qwen3 renders several calls in a turn differently"):
        open_renderer(tokenizer)


def test_a_switch_that_was_changed_is_refused_where_it_is_used(tmp_path):
    folder = _folder(tmp_path, TEMPLATE.replace("</think>\\n\\n' }}{% endif %}", "</think>' }}{% endif %}"))
    assert open_renderer(load_tokenizer(folder)).family == "qwen3"
    with pytest.raises(ConfigError, match=r"qwen3 renders a system message differently"):
        open_renderer(load_tokenizer(folder, thinking=False))


@pytest.mark.parametrize(
    "added",
    ["{{ 'X' if 'odd' in messages[0].content }}", "{{ raise_exception('odd') if 'odd' in messages[0].content }}"],
)
def test_a_first_prompt_that_no_probe_is_like_is_compared_with_the_template(tmp_path, added):
    tokenizer = load_tokenizer(_folder(tmp_path, TEMPLATE + added))
    odd = [{"role": "user", "content": "odd"}]
    renderer = open_renderer(tokenizer)
    assert renderer.begin(QUESTION, tools=TOOLS) == renderer.render(QUESTION, tools=TOOLS)
    with pytest.raises(
        RenderingFailed, match=r"qwen3 and the chat template render .* differently|rejected the messages"
    ):
        renderer.begin(odd)
    named = open_renderer(tokenizer, settings={"name": "qwen3"})  # the user knows
    assert named.begin(odd) == renderer.render(odd)


def test_the_package_s_default_renderer_is_refused(qwen3):
    with pytest.raises(ConfigError, match=r"the chat template of .* cannot continue a conversation"):
        open_renderer(qwen3, settings={"name": "default"})


def test_the_package_is_asked_for_with_the_command_that_installs_it(qwen3, monkeypatch):
    monkeypatch.setitem(sys.modules, "renderers", None)
    with pytest.raises(ConfigError) as raised:
        open_renderer(qwen3)
    says = "environment.name: renderers is not installed; run pip install 'dora-rl[renderers]'"
    assert str(raised.value) == says


def test_a_folder_without_a_template_needs_a_name(qwen3):
    with pytest.raises(ConfigError, match=r"model\.path: .* has no chat template, .*; use a model that has one"):
        open_renderer(qwen3)


def test_an_unknown_family_is_refused_with_the_known_ones(qwen3):
    with pytest.raises(ConfigError, match=r"environment\.renderer\.name: no family 'qwen9'; choose one of .*qwen3\.5"):
        open_renderer(qwen3, settings={"name": "qwen9"})


def test_a_family_whose_tokens_are_missing_is_refused(qwen3):
    with pytest.raises(ConfigError, match=r"environment\.renderer: 'glm-4\.5' does not fit .*\[gMASK\].* not found"):
        open_renderer(qwen3, settings={"name": "glm-4.5"})


def test_a_setting_that_the_family_lacks_is_refused(qwen3):
    with pytest.raises(ConfigError, match=r"does not fit .* or its settings .*clear_thinking"):
        open_renderer(qwen3, settings={"name": "qwen3", "clear_thinking": True})


def test_a_family_that_would_download_its_vocabulary_is_refused(qwen3, monkeypatch):
    monkeypatch.delenv("TIKTOKEN_ENCODINGS_BASE", raising=False)
    with pytest.raises(ConfigError, match="gpt-oss would download its vocabulary; put"):
        open_renderer(qwen3, settings={"name": "gpt-oss"})


def test_families_that_name_the_day_name_that_of_templates(qwen3):
    gpt_oss = type(config_from_name("gpt-oss"))
    assert _config(gpt_oss, {}, qwen3).conversation_start_date == "2024-07-26"
    assert _config(gpt_oss, {"conversation_start_date": "2025-01-01"}, qwen3).conversation_start_date == "2025-01-01"
    assert config_from_name("llama-3").date_string == "26 Jul 2024"


def test_the_thinking_switch_of_the_model_reaches_the_renderer(tmp_path):
    folder = _folder(tmp_path, TEMPLATE)
    for thinking, end in ((None, "assistant\n"), (True, "assistant\n"), (False, "<think>\n\n</think>\n\n")):
        tokenizer = load_tokenizer(folder, thinking=thinking)
        renderer = open_renderer(tokenizer)
        rendered = tokenizer.decode(renderer.render(QUESTION), special_tokens=True)
        assert rendered.endswith(end)
        assert rendered == tokenizer.render_chat(QUESTION)


OWN = """
from renderers import BaseRendererConfig, RenderedTokens, ParsedResponse

class OwnConfig(BaseRendererConfig):
    name: str = "own"
    greeting: str = ""
    _internal_fields = frozenset({"greeting"})

class Own:
    config_class = OwnConfig

    def __init__(self, tokenizer, config):
        self.tokenizer, self.config = tokenizer, config
        self.end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def get_stop_token_ids(self):
        return [self.end]

    def render_ids(self, messages, *, tools=None, add_generation_prompt=False):
        ids = self.tokenizer.encode(self.config.greeting)
        for message in messages:
            ids += [*self.tokenizer.encode(message["role"] + message["content"]), self.end]
        return ids

    def parse_response(self, ids, *, tools=None, prompt_ids=None):
        return ParsedResponse(content=self.tokenizer.decode(ids))

    def bridge_to_next_turn(self, prompt, sampled, messages, *, tools=None):
        BRIDGE
"""


def test_a_renderer_of_one_s_own(qwen3, module):
    path = module(OWN.replace("BRIDGE", "return RenderedTokens(prompt + sampled + self.render_ids(messages))"))
    renderer = open_renderer(qwen3, settings={"name": "custom", "import_path": f"{path}:Own", "greeting": "ho"})
    assert renderer.family == f"{path}:Own"
    assert qwen3.decode(renderer.render(QUESTION), special_tokens=True) == "houserq<|im_end|>"
    bridged = renderer.bridge([1, 2], [3, 4], QUESTION)
    assert qwen3.decode(bridged, special_tokens=True) == "houserq<|im_end|>"


@pytest.mark.parametrize(
    "bridge",
    [
        "return None",
        "return RenderedTokens(self.render_ids(messages))",
        "return RenderedTokens(prompt + sampled[:-1] + self.render_ids(messages))",
    ],
    ids=["none", "rendered again", "not exact"],
)
def test_one_s_own_renderer_without_an_exact_bridge_is_refused(qwen3, module, bridge):
    path = module(OWN.replace("BRIDGE", bridge))
    with pytest.raises(ConfigError, match=r"own_renderer\.py:Own of .* cannot continue a conversation"):
        open_renderer(qwen3, settings={"name": "custom", "import_path": f"{path}:Own"})


def test_one_s_own_renderer_that_raises_or_is_not_there_is_refused(qwen3, module):
    path = module(OWN.replace("self.end = ", "raise KeyError('no end') #"))
    for spec, reason in (
        (f"{path}:Own", "no end"),
        (f"{path}:Other", "no attribute 'Other'"),
        ("none.py:Own", "exist"),
    ):
        with pytest.raises(ConfigError, match=f"environment.renderer: 'custom' does not fit .*{reason}"):
            open_renderer(qwen3, settings={"name": "custom", "import_path": spec})


def test_messages_that_cannot_be_rendered_are_an_error_of_the_environment(qwen3):
    renderer = open_renderer(qwen3, settings={"name": "qwen3"})
    for messages in ([], [{"content": "no role"}], [{"role": "user", "content": "\ud800"}], [{"role": "?"}, 7]):
        with pytest.raises(RenderingFailed, match="renderer qwen3 rejected the messages"):
            renderer.render(messages)


def _parsed(qwen3, text: str):
    renderer = open_renderer(qwen3, settings={"name": "qwen3"})
    sampled = qwen3.encode(text + "<|im_end|>", special_tokens=False)
    return renderer.parse(sampled, prompt=renderer.render(QUESTION, tools=TOOLS), tools=TOOLS, first_call=4)


def test_a_call_is_parsed(qwen3):
    turn = _parsed(
        qwen3, 'so\n<tool_call>\n{"name": "look_up", "arguments": {"key": "süß", "n": [1, null]}}\n</tool_call>'
    )
    assert (turn.content, turn.reasoning, turn.finish) == ("so", "", "stop")
    (call,) = turn.calls
    assert (call.id, call.name, call.arguments) == ("call_4", "look_up", {"key": "süß", "n": [1, None]})


def test_arguments_may_be_json_as_text(qwen3):
    turn = _parsed(qwen3, '<tool_call>{"name": "look_up", "arguments": "{\\"key\\": 1}"}</tool_call>')
    assert turn.calls[0].arguments == {"key": 1}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"name": "look_up", "arguments": {"key": "k}',
        '{"name": "look_up", "arguments": [1]}',
        '{"name": "look_up", "arguments": "not json"}',
        '{"name": "look_up", "arguments": {"key": "\\ud800"}}',
        '{"name": "look_up", "arguments": {"n": ' + "9" * 5_000 + "}}",
        '{"name": "look_up", "arguments": {"n": ' + "[" * 3_000 + "]" * 3_000 + "}}",
        '{"name": "look_up", "arguments": ' + json.dumps("[" * 100_000) + "}",
        '{"name": "look_up", "arguments": {"n": NaN}}',
        '{"name": "look_up", "arguments": {"n": [-Infinity]}}',
        '{"name": 7, "arguments": {}}',
        '{"name": ["look_up"], "arguments": {}}',
        '{"name": "\\udc00", "arguments": {}}',
        '{"arguments": {"key": "k"}}',
        '["look_up"]',
        "null",
    ],
    ids=range(16),
)
def test_text_that_is_no_valid_call_stays_visible_and_never_raises(qwen3, text):
    (call,) = _parsed(qwen3, f"<tool_call>{text}</tool_call>").calls
    assert call.arguments is None
    assert text[:20] in call.text


def test_a_number_that_is_none_is_no_valid_call_where_arguments_are_plain_text(tmp_path):
    tokenizer = family_tokenizer(tmp_path, "qwen3.5")
    renderer = open_renderer(tokenizer, settings={"name": "qwen3.5"})
    call = "<tool_call><function=look_up><parameter=count>%s</parameter></function></tool_call>"
    for count, arguments in (("7", {"count": 7}), ("seven", None)):
        sampled = tokenizer.encode("</think>" + call % count, special_tokens=False)
        turn = renderer.parse(sampled, prompt=renderer.render(QUESTION, tools=TOOLS), tools=TOOLS)
        assert [call.arguments for call in turn.calls] == [arguments]


def test_a_call_without_an_end_is_no_call(qwen3):
    (call,) = _parsed(qwen3, '<tool_call>{"name": "look_up", "arguments": {}}').calls
    assert call.arguments is None


def test_several_calls_keep_their_order_and_what_is_wrong_with_one_of_them(qwen3):
    good = '<tool_call>{"name": "look_up", "arguments": {"key": "%s"}}</tool_call>'
    turn = _parsed(qwen3, (good % "a") + "<tool_call>{</tool_call>" + (good % "b"))
    assert [(call.id, call.arguments) for call in turn.calls] == [
        ("call_4", {"key": "a"}), ("call_5", None), ("call_6", {"key": "b"}),
    ]  # fmt: skip


def test_a_call_within_the_reasoning_is_not_made(qwen3):
    turn = _parsed(qwen3, '<think>\n<tool_call>{"name": "look_up", "arguments": {}}</tool_call>\n</think>\n\nno')
    assert (turn.calls, turn.content) == ((), "no")
    assert "look_up" in turn.reasoning


def test_reasoning_that_the_prompt_opened_is_reasoning(tmp_path):
    tokenizer = family_tokenizer(tmp_path, "qwen3.5")
    renderer = open_renderer(tokenizer, settings={"name": "qwen3.5"})
    prompt = renderer.render(QUESTION)
    assert tokenizer.decode(prompt, special_tokens=True).endswith("<think>\n")
    turn = renderer.parse(tokenizer.encode("hard\n</think>\n\n7", special_tokens=False), prompt=prompt)
    assert (turn.reasoning, turn.content) == ("hard", "7")


def test_an_end_token_of_the_model_that_the_family_does_not_know_is_no_text(tmp_path):
    special, eos = special_tokens("qwen3")
    folder = make_folder(tmp_path, [*special, "<stop>"], eos=eos)
    stop = load_tokenizer(folder).token_id("<stop>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop]}))
    tokenizer = load_tokenizer(folder)
    renderer = open_renderer(tokenizer, settings={"name": "qwen3"})
    assert stop in renderer.stop_ids
    sampled = [*tokenizer.encode("so", special_tokens=False), stop]
    assert renderer.parse(sampled, prompt=renderer.render(QUESTION)).content == "so"
    added = renderer.bridge(renderer.render(QUESTION), sampled, QUESTION)
    assert tokenizer.decode(added, special_tokens=True).startswith("<|im_end|>\n<|im_start|>user\nq")


def test_opening_a_renderer_takes_no_torch_and_no_network_and_importing_ours_takes_nothing(qwen3):
    code = (
        "import sys; seen = []\n"
        "sys.addaudithook(lambda name, args: seen.append(name) if name.startswith('socket.') else None)\n"
        "import dora.environments.episode\n"
        "from dora.environments.renderer import open_renderer\n"
        "from dora.tasks.tokenizer import load_tokenizer\n"
        "from pathlib import Path\n"
        "print([name for name in ('renderers', 'openai', 'torch') if name in sys.modules])\n"
        f"open_renderer(load_tokenizer(Path({str(qwen3.folder)!r})), settings={{'name': 'qwen3'}})\n"
        "print([name for name in ('renderers', 'torch', 'transformers') if name in sys.modules], seen)\n"
    )
    lines = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    assert lines == ["[]", "['renderers'] []"]
