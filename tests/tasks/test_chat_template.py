"""A chat template is code of others: whatever it does, one line, in bounded time and memory."""

from __future__ import annotations

import gc
import json
import os
import resource
import shutil
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from dora.errors import ConfigError
from dora.tasks.chat_template import MEMORY_BYTES, ChatTemplate
from dora.tasks.tokenizer import load_tokenizer

FILE = Path("folder") / "chat_template.jinja"
MESSAGES = [{"role": "user", "content": "q"}]

#: What a template may do, and what is then said of it.
HOSTILE = {
    "division": ("{{ 1/0 }}", "division by zero"),
    "division when compiled": ("{{ 1//0 }}", "by zero"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "nesting": ("{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}", "recursion"),
    "a constant of 10^10 characters": ("{{ 'x' * 10**10 }}", "MB of memory"),
    "10^10 characters": ("{{ 'x' * (10**10 + messages|length) }}", "MB of memory"),
    "10^8 characters": ("{{ 'x' * (10**8 + messages|length) }}", "100,000,001 characters are too many"),
    "characters by filter": ("{{ messages[0].role|center(10**9) }}", "MB of memory"),
    "characters by date": ("{{ strftime_now('%Y' * 10**9) }}", "MB of memory"),
    "a long range": ("{{ range(10**10)|list }}", "Range too big"),
    "loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "2 s of processor time",
    ),
    "a large number": ("{{ (10 + messages|length) ** (10**10) }}", "2 s of processor time"),
    "a large constant": ("{{ 10 ** (10 ** 10) }}", "2 s of processor time"),
    "half of a character": ("{{ '\\ud800' }}", "lone surrogate"),
    "half of a character in an error": (
        "{{ raise_exception('\\ud800') }}",
        "rejected the messages: \N{REPLACEMENT CHARACTER}",
    ),
    "lines in an error": (
        "{{ raise_exception('a\\nb\\x1b[2J') }}",
        "rejected the messages: a b\N{REPLACEMENT CHARACTER}",
    ),
    "no text in an error": ("{{ raise_exception([1]) }}", r"[1]"),
    "Python's objects": ("{{ messages.__class__.__mro__ }}", "unsafe"),
    "syntax": ("{{ q }}\n{% for %}", "line 2 does not parse"),
}


def _rejection(template: str) -> str:
    with pytest.raises(ConfigError) as refused:
        ChatTemplate(template, FILE).render(messages=MESSAGES)
    return str(refused.value)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_ends_with_one_line_that_names_its_file(name):
    template, said = HOSTILE[name]
    line = _rejection(template)
    assert line.startswith(f"the chat template in {FILE} ")
    assert said in line
    assert line.endswith("; correct it")
    assert line.isprintable()


def test_the_processor_time_of_many_prompts_is_bounded_as_well():
    template = ChatTemplate("{% for a in range(99999) %}{% for b in range(40) %}{% endfor %}{% endfor %}", FILE)

    def render_all() -> None:
        for _ in range(60):
            template.render(messages=MESSAGES)

    with pytest.raises(ConfigError, match="2 s of processor time"):
        render_all()


def test_no_template_makes_the_controller_itself_large(tokenizer):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for times in (10**6, 10**7, 10**8, 10**9, 10**10):
        with pytest.raises(ConfigError):
            ChatTemplate("{{ 'x' * (%d + 2**20) }}" % times, FILE).render(messages=MESSAGES)  # noqa: UP031
    longest = ChatTemplate("{{ 'x' * 10**6 }}", FILE).render(messages=MESSAGES)
    assert len(tokenizer.encode(longest, special_tokens=False)) == 10**6
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < 512 << 20


def test_a_text_may_be_much_longer_than_its_template_if_the_messages_are():
    content = "\N{SNOWMAN}" * 2_000_000
    assert ChatTemplate("{{ messages[0].content }}!", FILE).render(messages=[{"content": content}]) == content + "!"


def test_a_template_renders_the_same_on_every_day():
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }} {{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}", FILE)
    assert template.render(messages=MESSAGES) == "26 Jul 2024 2024-07-26 00:00:00.000000"


def _child() -> psutil.Process:
    """Return the latest process of a template."""
    children = [child for child in psutil.Process().children() if _renders(child)]
    return max(children, key=psutil.Process.create_time)


def _renders(child: psutil.Process) -> bool:
    try:
        return "dora.tasks.template_process" in child.cmdline()
    except psutil.NoSuchProcess:  # of an earlier test
        return False


def test_a_process_that_was_killed_is_replaced():
    template = ChatTemplate("{{ messages[0].content }}", FILE)
    assert template.render(messages=MESSAGES) == "q"
    child = _child()
    child.kill()
    psutil.wait_procs([child], timeout=10)
    assert template.render(messages=MESSAGES) == "q"


def test_a_process_that_does_not_answer_is_given_up(monkeypatch):
    monkeypatch.setattr("dora.tasks.chat_template._TIMEOUT_S", 1.0)
    template = ChatTemplate("{{ messages[0].content }}", FILE)
    assert template.render(messages=MESSAGES) == "q"
    child = _child()
    os.kill(child.pid, signal.SIGSTOP)
    for content in ("q", "q" * 1_000_000):  # one that its pipe holds, and one that it does not
        with pytest.raises(ConfigError, match=r"did not answer in 1 s; correct it"):
            template.render(messages=[{"content": content}])
        assert not child.is_running()
        template.render(messages=MESSAGES)
        child = _child()
        os.kill(child.pid, signal.SIGSTOP)


def test_the_process_ends_with_the_template():
    template = ChatTemplate("{{ messages[0].content }}", FILE)
    template.render(messages=MESSAGES)
    child = _child()
    del template
    gc.collect()
    assert not child.is_running()


def test_the_process_has_little_memory_and_knows_no_token_of_the_run(monkeypatch):
    monkeypatch.setenv("DORA_TOKEN", "secret")
    template = ChatTemplate("{{ messages[0].content }}", FILE)
    template.render(messages=MESSAGES)
    assert _child().rlimit(psutil.RLIMIT_AS) == (MEMORY_BYTES, MEMORY_BYTES)
    assert "DORA_TOKEN" not in _child().environ()


def test_threads_share_a_template():
    template = ChatTemplate("{{ messages[0].content }}", FILE)
    rendered: dict[int, list[str]] = {}

    def render(number: int) -> None:
        texts = [f"{number} {index}" * 1_000 for index in range(50)]
        rendered[number] = [text for text in texts if template.render(messages=[{"content": text}]) == text]

    threads = [threading.Thread(target=render, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [len(texts) for texts in rendered.values()] == [50] * 4


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.json", "chat_template.jinja"])
def test_the_line_names_the_file_that_the_template_is_in(model_folder, tmp_path, name):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    source = "{{ 1/0 }}"
    if name.endswith(".json"):
        kept = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        source = json.dumps(kept | {"chat_template": source})
    (folder / name).write_text(source)
    with pytest.raises(ConfigError, match=f"^the chat template in {folder / name} rejected"):
        load_tokenizer(folder).render_chat(MESSAGES)


@pytest.mark.parametrize("chat_template", [5, ["x", 3], {"default": 1}, [{"name": "default", "template": ["x"]}]])
def test_a_template_that_is_no_text_is_refused_or_none(model_folder, tmp_path, chat_template):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": chat_template}))
    with pytest.raises(ConfigError, match=r"tokenizer_config.json must be text, or a list|has no chat template"):
        load_tokenizer(folder).render_chat(MESSAGES)


def _pipe(file: Path) -> None:
    os.mkfifo(file)


def _device(file: Path) -> None:
    file.symlink_to("/dev/zero")


def _giant(file: Path) -> None:
    with file.open("wb") as sparse:
        sparse.truncate(1 << 40)


def _latin(file: Path) -> None:
    file.write_bytes("{{ 'süß' }}".encode("latin-1"))


def _nothing(file: Path) -> None:
    file.symlink_to("missing")


@pytest.mark.parametrize("make", [_pipe, _device, _giant, _latin, _nothing, Path.mkdir])
def test_a_file_that_is_no_template_is_refused_at_once(model_folder, tmp_path, make):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    make(folder / "chat_template.jinja")
    began = time.process_time()
    with pytest.raises(ConfigError, match=r"^model\.path: the chat template .*chat_template\.jinja cannot be read \("):
        load_tokenizer(folder)
    assert time.process_time() - began < 5
