"""The chat template of a model folder, rendered by a limited process (template_process.py).

Invariant: whatever the template does, a call of `render` ends, with a text of bounded length or a ConfigError that
names the file.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from dora.errors import ConfigError
from dora.pipes import HEADER

#: Processor time in seconds: the maximum that a template can save up, and the time that it gets with each prompt.
MAX_CPU_S: Final = 2.0
CPU_S_PER_PROMPT: Final = 0.1
MEMORY_BYTES: Final = 512 << 20
#: What templates are told that today is: prompts are the same on every day, so that a run can be resumed on another.
#: It is the date that Llama's templates have where they are told none.
DATE: Final = datetime(2024, 7, 26)
#: First byte of a reply.
RENDERED: Final = b"="
REJECTED: Final = b"!"

#: Time for a reply. Normally the limit of processor time ends the process earlier; this limit is for an overloaded
#: machine or a stopped process.
_TIMEOUT_S: Final = 60.0


def max_characters(request_bytes: int) -> int:
    """Return the length of the longest text that may be rendered from a request; templates add text and escape some."""
    return 8 * request_bytes + (1 << 20)


class ChatTemplate:
    """A template, which is compiled when it renders for the first time; threads may share it."""

    def __init__(self, source: str, file: Path) -> None:
        """`file`: where it was read, for errors."""
        self._source = source
        self._file = file
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None  # ends the process; also called when this object is deleted

    def render(self, **names: Any) -> str:
        """Render with these names; JSON must be able to hold their values. ConfigError says what failed and what to
        do."""
        try:
            request = json.dumps(names).encode()
            with self._lock:
                reply = self._reply(request)
        except (TypeError, ValueError, RecursionError) as err:
            raise self._error(f"cannot be given the messages ({err})") from err
        if reply.startswith(REJECTED):
            raise self._error(f"rejected the messages: {reply[1:].decode(errors='replace')}")
        return reply[1:].decode()

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"the chat template in {self._file} {what}; correct it")

    def _reply(self, request: bytes) -> bytes:
        deadline = time.monotonic() + _TIMEOUT_S
        try:
            process = self._started(deadline=deadline)
            _send(process, request, deadline=deadline)
            (size,) = HEADER.unpack(_receive(process, HEADER.size, deadline=deadline))
            if size > 4 * max_characters(len(request)) + len(RENDERED):
                raise EOFError
            return _receive(process, size, deadline=deadline)
        except TimeoutError as err:
            self._end()
            raise self._error(f"did not answer in {_TIMEOUT_S:g} s") from err
        except (OSError, EOFError) as err:
            raise self._error(self._ending()) from err

    def _started(self, *, deadline: float) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = _start()
            self._end = weakref.finalize(self, _kill, self._process)
            _send(self._process, self._source.encode(errors="surrogatepass"), deadline=deadline)
        return self._process

    def _ending(self) -> str:
        """End the process after it closed its pipe; return how it ended."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            code = 0
        self._end()
        if code == -signal.SIGPROF:
            return f"took more than {MAX_CPU_S:g} s of processor time"
        return f"ended its process ({f'exit code {code}' if code >= 0 else signal.Signals(-code).name})"


def _start() -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "dora.tasks.template_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,  # Ctrl-C reaches the controller only
        env={name: value for name, value in os.environ.items() if not name.startswith("DORA_")},  # no tokens
    )
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
    return process


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with process:  # closes the pipes and waits
        pass


def _send(process: subprocess.Popen[bytes], body: bytes, *, deadline: float) -> None:
    assert process.stdin is not None
    rest = memoryview(HEADER.pack(len(body)) + body)
    while rest:
        _wait(process.stdin.fileno(), select.POLLOUT, deadline=deadline)
        rest = rest[os.write(process.stdin.fileno(), rest) :]


def _receive(process: subprocess.Popen[bytes], size: int, *, deadline: float) -> bytes:
    """Return the next bytes; EOFError if the process closed its pipe."""
    assert process.stdout is not None
    data = bytearray()
    while len(data) < size:
        _wait(process.stdout.fileno(), select.POLLIN, deadline=deadline)
        piece = os.read(process.stdout.fileno(), size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def _wait(pipe: int, event: int, *, deadline: float) -> None:
    """Wait until a pipe can be read or written, or is closed; TimeoutError at the deadline."""
    ready = select.poll()
    ready.register(pipe, event)
    if not ready.poll(max(0.0, deadline - time.monotonic()) * 1_000):
        raise TimeoutError
