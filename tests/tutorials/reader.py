"""A reader who does what a tutorial says: the fences of a page, one after the other, in one folder.

| fence | what the reader does |
|---|---|
| `sh` | types it into a shell, which ends at the first command that fails |
| `sh title="press Ctrl-C when it says: WORDS"` | the same in a terminal, where views are redrawn, and does that |
| `... when it says: 6 of WORDS"` | the same at 6 or more, as a view that is redrawn skips numbers |
| `sh title="on ..."` | nothing: it is for other machines; but each file that it runs was checked before |
| `python` | runs it |
| any other with `title="FILE"` | writes it to that file |
| `output` | looks for its lines in what was said since the last `output`; numbers may differ, `...` is anything |
| `text` | reads it |

Invariant: what is not in this table is an error, so that nothing is passed over. Only ports differ from those of a
page: they are free ones, as others may follow a page on the same machine.
"""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final

from dora.node.ports import free_port

ROOT: Final = Path(__file__).parents[2]
#: Time limit of one fence: generous, as other work may share the machine.
LIMIT_S: Final = 300.0
_FENCE: Final = re.compile(r'^```([a-z]+)(?: title="([^"\n]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_CTRL_C: Final = "press Ctrl-C when it says: "
_NUMBER: Final = r"[+-]?\d[\d.,]*(?:e[+-]?\d+)?"
_DURATION: Final = r"(?:\d+ (?:h|min) )*\d[\d.,]* s\b"
_CURVE: Final = "[▁-█━─░]+"
#: What may differ from run to run: numbers, bars and curves, and what was left out.
_LOOSE: Final = re.compile(rf"(\.\.\.|{_CURVE}|{_DURATION}|{_NUMBER}|\s+)")
#: What moves the cursor of a terminal, and colors.
_CONTROL: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
#: A configuration that a command runs.
_RUNS: Final = re.compile(r"\bdora run (\S+\.toml)")
_CHECKS: Final = re.compile(r"\bdora check (\S+\.toml)")
#: The port at which a controller on a page waits for nodes.
_NODES_PORT: Final = "8423"
_DORA: Final = """\
#!/bin/sh
case "$1" in
run | check) set -- "$@" --set status.port=0 ;;
view) set -- "$@" --port 0 ;;
esac
exec {python} -m dora "$@"
"""
_PYTHON: Final = """\
#!/bin/sh
exec {python} "$@"
"""


@dataclass(frozen=True)
class Fence:
    language: str
    title: str
    text: str


def fences(page: str) -> list[Fence]:
    """The fences of a page, in their order; an error if one is not written as above."""
    found = [Fence(*groups) for groups in _FENCE.findall(page)]
    marks = re.findall(r"^\s*(?:```|~~~)", page, re.MULTILINE)
    assert len(marks) == 2 * len(found), "a fence is indented, or its first line is not as it should be"
    return found


class Reader:
    """One who follows a page, in a folder where the repository's own folders are, too."""

    def __init__(self, folder: Path, *, environ: Mapping[str, str]) -> None:
        """`environ`: variables of the commands; `dora` and `python` are those of this interpreter."""
        self.folder = folder / "page"
        self.folder.mkdir()
        for name in ("docs", "launch"):
            (self.folder / name).symlink_to(ROOT / name)
        self._log = folder / "said"
        self._said = ""  # since the last fence `output`
        self._checked: set[str] = set()  # configurations that `dora check` has accepted
        self._nodes_port = str(free_port())
        self._environ = {**environ, "PATH": f"{_commands(folder / 'bin')}:{environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def follow(self, fence: Fence) -> None:
        fence = replace(fence, text=fence.text.replace(_NODES_PORT, self._nodes_port))
        match fence.language:
            case "sh" if fence.title.startswith("on "):
                assert set(_RUNS.findall(fence.text)) <= self._checked, "run elsewhere, but not checked here"
            case "sh":
                words = fence.title.removeprefix(_CTRL_C)
                assert (words == fence.title) == (fence.title == ""), fence.title
                self._type(["bash", "-euc", fence.text], until=words)
                self._checked |= set(_CHECKS.findall(fence.text))
            case "python" if not fence.title:
                self._type([sys.executable, "-c", fence.text])
            case "output":
                missing = [line for line in fence.text.splitlines() if not is_in(line, self._said)]
                assert missing == [], f"not said:\n{missing}\nbut:\n{self._said}"
                self._said = ""
            case "text":
                pass
            case _:
                assert fence.title, f"what is a fence of {fence.language} without a title?"
                path = self.folder / fence.title
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(fence.text)

    def _type(self, words: list[str], *, until: str = "") -> None:
        """Execute a command; with `until`, do it in a terminal and press Ctrl-C once it has said that."""
        with self._log.open("wb") as log, _terminal(log) if until else nullcontext(log) as output:
            process = subprocess.Popen(
                words,
                cwd=self.folder,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal of its own, whose foreground gets Ctrl-C
                preexec_fn=_heed_ctrl_c,
            )
            try:
                if until:
                    self._await(until, process)
                    os.killpg(process.pid, signal.SIGINT)
                code = process.wait(LIMIT_S)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said = _CONTROL.sub("", self._log.read_text())
        self._said += said
        assert code == 0 or (until and code in (130, -signal.SIGINT)), f"exit code {code}:\n{said}"

    def _await(self, words: str, process: subprocess.Popen[bytes]) -> None:
        pause, waited = threading.Event(), 0.0
        while not is_due(words, _CONTROL.sub("", self._log.read_text(errors="replace"))):
            assert process.poll() is None, f"it ended and did not say {words!r}:\n{self._log.read_text()}"
            assert waited < LIMIT_S, f"it did not say {words!r} in {LIMIT_S:g} s:\n{self._log.read_text()}"
            pause.wait(0.1)
            waited += 0.1


def is_due(words: str, said: str) -> bool:
    """Whether `words` were said; of words that begin with a number: with that or a later one, as a view skips some."""
    counted = re.fullmatch(r"(\d+)( .+)", words)
    if counted is None:
        return words in said
    numbers = re.findall(rf"(?<![\d.,])(\d+){re.escape(counted[2])}", said)
    return any(int(number) >= int(counted[1]) for number in numbers)


def is_in(line: str, said: str) -> bool:
    """Whether a line of a fence `output` is in what was said, but for what may differ: numbers and their plurals."""
    return re.search("".join(_patterns(line.strip())), said) is not None


def _patterns(line: str) -> Iterator[str]:
    parts = _LOOSE.split(line)
    for index, part in enumerate(parts):
        if index % 2 == 0:
            counted = re.fullmatch(_NUMBER, parts[index - 3]) and parts[index - 2] == "" if index > 2 else False
            yield f"{re.escape(part[:-1])}s?" if counted and part.endswith("s") else re.escape(part)
        elif part == "...":
            yield ".*"
        elif part.isspace():
            yield r"[ \t]+"
        else:
            yield next(loose for loose in (_DURATION, _NUMBER, _CURVE) if re.fullmatch(loose, part))


@contextmanager
def _terminal(log: BinaryIO) -> Iterator[int]:
    """A terminal of 60 lines, and all that is written to it goes to `log`."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (60, 200))
    copying = threading.Thread(target=_copy, args=(ours, log))
    copying.start()
    try:
        yield theirs
    finally:
        os.close(theirs)
        copying.join()
        os.close(ours)


def _copy(terminal: int, log: BinaryIO) -> None:
    with suppress(OSError):  # nobody has it open any more
        while said := os.read(terminal, 1 << 16):
            log.write(said)
            log.flush()


def _commands(folder: Path) -> Path:
    """A folder with the command `dora` of this interpreter, and with `python`."""
    folder.mkdir()
    for name, text in {"dora": _DORA, "python": _PYTHON}.items():
        path = folder / name
        path.write_text(text.format(python=sys.executable))
        path.chmod(0o755)
    return folder


def _heed_ctrl_c() -> None:
    """Tests that are started in the background of a shell ignore SIGINT, and their children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
