"""A process that renders a chat template: `python -m dora.tasks.template_process`.

A template is code of whoever made the model folder. jinja2's sandbox keeps it from Python's objects, but limits neither
time nor memory. Even compiling may take much of both, because constants are computed then. So templates are compiled
and rendered in this process.

Frames on stdin and stdout (dora/pipes.py). The first request is the template. Each later request is JSON with the names
that the template may use; the reply is `RENDERED` and the text, or `REJECTED` and the reason, in UTF-8. Invariant: the
memory of the process is limited, and so is its processor time: it gets `CPU_S_PER_PROMPT` with each prompt, can save up
to `MAX_CPU_S`, and SIGPROF ends it when the time is used up. It exits when its stdin closes.
"""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Callable
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dora.errors import one_line
from dora.pipes import read_frame, take_pipes, write_frame
from dora.tasks.chat_template import (
    CPU_S_PER_PROMPT,
    DATE,
    MAX_CPU_S,
    MEMORY_BYTES,
    REJECTED,
    RENDERED,
    max_characters,
)


def main() -> None:
    requests, replies = take_pipes()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    source = read_frame(requests) or b""
    template, left_s = None, MAX_CPU_S
    while (request := read_frame(requests)) is not None:
        signal.setitimer(signal.ITIMER_PROF, left_s)
        try:
            template = template or _compiled(source.decode())
            reply = RENDERED + _rendered(template, request)
        except Exception as err:  # noqa: BLE001  code of others
            reply = REJECTED + one_line(_reason(err)).encode(errors="replace")
        left_s = min(MAX_CPU_S, signal.setitimer(signal.ITIMER_PROF, 0)[0] + CPU_S_PER_PROMPT)
        write_frame(replies, reply)


def _rendered(template: jinja2.Template, request: bytes) -> bytes:
    text = template.render(json.loads(request))
    if len(text) > max_characters(len(request)):
        raise ValueError(f"{len(text):,} characters are too many for these messages")
    return text.encode()


def _reason(err: Exception) -> str:
    if isinstance(err, jinja2.TemplateSyntaxError):
        return f"line {err.lineno} does not parse: {err.message}"
    if isinstance(err, UnicodeEncodeError):
        return "its text has a lone surrogate, which is not a character"
    if isinstance(err, MemoryError):
        return f"they need more than {MEMORY_BYTES >> 20} MB of memory"
    return str(err) if isinstance(err, jinja2.TemplateError) else f"{type(err).__name__}: {err}"


def _compiled(source: str) -> jinja2.Template:
    """Compile as transformers does, but with a fixed date."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals["strftime_now"] = DATE.strftime
    return environment.from_string(source)


def _to_json(value: object, ensure_ascii: bool = False, **layout: Any) -> str:  # templates also pass these by position
    """Encode without escaping HTML, unlike jinja2's own `tojson`: models were trained on unescaped text."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


def _raise_template_error(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks an assistant's text. In a prompt it has no effect."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_pass_through"), [], [], body).set_lineno(line)

    def _pass_through(self, caller: Callable[[], str]) -> str:
        return caller()


if __name__ == "__main__":
    main()
