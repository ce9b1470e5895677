"""The past of a run, read from its files in answers of bounded size: steps, timeline and samples.

Invariant: files are only read, and from where the last reading ended, so that the cost of a request depends only on how
much was added since the last. An answer is `{"rows": [...], "next": N}`; a request with N gets what was added after it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from dora.files import MAX_ROW_BYTES, MAX_TRAJECTORY_BYTES
from dora.journal.deep import KeptPart
from dora.journal.run_folder import RunFolder
from dora.journal.spans import Kind
from dora.observe.timeline import Digest, compact, decode_row
from dora.status.lines import Lines, tail

#: Number of characters of a prompt, an answer or a reference.
MAX_CHARACTERS: Final = 4_000
#: Number of tokens of a sample whose log-probs are in an answer.
MAX_TOKENS: Final = 1_000
#: Number of turns and observations of a sample, and of their characters, after which no more are shown.
MAX_PARTS: Final = 100
MAX_TRANSCRIPT: Final = 5 * MAX_CHARACTERS
#: Maximum size of all parts of a sample, in bytes. Larger ones are not decoded: objects take several times as much.
MAX_PARTS_BYTES: Final = 8 << 20
#: Number of calls of a turn that are shown.
MAX_CALLS: Final = 20
_KINDS: Final[tuple[Kind, ...]] = ("rank", "instance")
#: Number of verdicts of judges that are shown.
MAX_VERDICTS: Final = 10
#: Types of the lists of a sample that have an element for each token.
_LISTS: Final = {"tokens": list[int], "logprobs": list[float], "pieces": list[str], "trainer_logprobs": list[float]}
#: Bytes at the end of the timeline in which there is a row of each kind.
_TAIL_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The largest answers. `rows` and `size` are per kind of row, and `size` is in bytes."""

    rows: int = 2_000
    size: int = 4 * 2**20
    samples: int = 50


#: The bounds of an answer to a page.
HTTP_BOUNDS: Final = Bounds()


class _Row(msgspec.Struct):
    kind: str


_NONE: Final = msgspec.Raw(b"[]")
#: The first elements of a list of numbers or texts. A list may have millions, which are not decoded.
_FIRST: Final = re.compile(rb'\s*+\[(?:(?:\s*+"(?:[^"\\]++|\\.)*+"\s*+|[^"\[\],{}]++)(?:,|(?=\]))){0,%d}' % MAX_TOKENS)


class _Sample(msgspec.Struct):
    """The part of a line of trajectories.jsonl that is shown (`dora.journal.deep.KeptTrajectory`)."""

    step: int
    group: int
    trajectory: int
    version: int
    reward: float | None
    truncated: str
    prompt: str
    text: str
    tokens: msgspec.Raw
    logprobs: msgspec.Raw
    num_tokens: int = 0  #: before the lists were cut
    num_parts: int = 0  #: before the parts were cut
    observed: list[tuple[int, int]] = []
    turn_rewards: list[float] = []
    calls_s: list[float] = []
    outcome: str = "trained"
    answer: str = ""
    terms: list[tuple[str, float]] = []
    metrics: list[tuple[str, float]] = []
    verdicts: list[tuple[str, str]] = []
    pieces: msgspec.Raw = _NONE
    parts: msgspec.Raw = _NONE
    trainer_logprobs: msgspec.Raw = _NONE


class Records:
    """The past of one run. Its methods may be called from any thread."""

    def __init__(self, folder: RunFolder, *, bounds: Bounds = HTTP_BOUNDS) -> None:
        self._bounds = bounds
        self._lock = threading.Lock()
        self._digests = self._new_digests()
        self._metrics = Lines(folder.metrics, max_bytes=MAX_ROW_BYTES, kind_of=_kind_of_metric)
        self._timeline = Lines(
            folder.timeline, max_bytes=MAX_ROW_BYTES, kind_of=self._digest, on_reset=self._forget_digests
        )
        self._samples = Lines(folder.trajectories, max_bytes=MAX_TRAJECTORY_BYTES, kind_of=_kind_of_sample)

    def steps(self, since: int = 0) -> bytes:
        """Return the rows of steps and evaluations from line `since` of metrics.jsonl on, evenly thinned."""
        with self._lock:
            self._metrics.refresh()
            found = [
                *self._thinned("step", since, self._bounds.rows * 3 // 4),
                *self._thinned("evaluation", since, self._bounds.rows // 4),
            ]
            return _answer([line for _, line in sorted(found)], self._metrics.count)

    def _thinned(self, kind: str, since: int, most: int) -> list[tuple[int, bytes]]:
        numbers = self._metrics.numbers(kind, since=_within(since, self._metrics))
        chosen = _spread(numbers, most)
        while (size := self._metrics.size(kind, chosen)) > self._bounds.size and len(chosen) > 1:
            chosen = _spread(chosen, len(chosen) * self._bounds.size // (size + 1))
        return list(zip(chosen, self._metrics.read(kind, chosen), strict=False))

    def timeline(self, since: int = 0) -> bytes:
        """Return the rows of timeline.jsonl from line `since` on; neighbors are added up where there are too many."""
        with self._lock:
            if not self._timeline.count:
                self._expect()
            self._timeline.refresh()
            rows: list[bytes] = []
            since = _within(since, self._timeline)
            for kind, digest in self._digests.items():
                if since:
                    lines = self._timeline.read(kind, self._timeline.numbers(kind, since=since))
                    rows += compact(lines, most=self._bounds.rows, size=self._bounds.size)
                else:
                    rows += digest.lines()
            return _answer(rows, self._timeline.count)

    def _new_digests(self) -> dict[str, Digest]:
        return {kind: Digest(most=self._bounds.rows, size=self._bounds.size) for kind in _KINDS}

    def _forget_digests(self) -> None:
        self._digests = self._new_digests()

    def _digest(self, line: bytes) -> str | None:
        """Keep what an answer to `timeline(0)` needs of a line, so that the file is not read again for it."""
        row = decode_row(line)
        if row is None:
            return None
        self._digests[row.kind].add(row, line)
        return row.kind

    def _expect(self) -> None:
        """Read the end of the timeline, so that rows can be joined while the timeline is read for the first time."""
        for line in tail(self._timeline.path, _TAIL_BYTES):
            if row := decode_row(line):
                self._digests[row.kind].expect(row.at + row.s, line)

    def samples(self, since: int = 0) -> bytes:
        """Return the latest samples from line `since` of trajectories.jsonl on, with long texts cut; newest last."""
        with self._lock:
            self._samples.refresh()
            numbers = self._samples.numbers("sample", since=_within(since, self._samples))[-self._bounds.samples :]
            lines = (line for number in numbers for line in self._samples.read("sample", [number]))
            return _answer([shown for line in lines if (shown := _shown(line))], self._samples.count)


def _within(since: int, lines: Lines) -> int:
    """Return the first line to show: line 0 if the file was cut to fewer than `since` lines."""
    return since if 0 <= since <= lines.count else 0


def _answer(rows: Sequence[bytes], count: int) -> bytes:
    return b'{"rows":[%b],"next":%d}' % (b",".join(rows), count)


def _spread(numbers: Sequence[int], most: int) -> Sequence[int]:
    """Return at most `most` of the numbers, evenly spread, including the first and the last."""
    if len(numbers) <= most:
        return numbers
    if most < 2:
        return numbers[-1:]
    return [numbers[i * (len(numbers) - 1) // (most - 1)] for i in range(most)]


# -- lines ------------------------------------------------------------------------------------------------------------


def _kind_of_metric(line: bytes) -> str | None:
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        kind = msgspec.json.decode(line, type=_Row).kind
        if kind == "step":
            return kind
        if kind in ("evaluation", "evaluation_skipped"):
            return "evaluation"
    return None


def _kind_of_sample(line: bytes) -> str | None:
    return "sample"


def _shown(line: bytes) -> bytes | None:
    """Return the part of a sample that is shown; None if the line is damaged."""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        sample = msgspec.json.decode(line, type=_Sample)
        sample.num_tokens = bytes(sample.tokens).count(b",") + (bytes(sample.tokens) != b"[]")
        for name in ("prompt", "text", "answer"):
            setattr(sample, name, _cut(getattr(sample, name)))
        sample.verdicts = [(_cut(judge), _cut(text)) for judge, text in sample.verdicts[:MAX_VERDICTS]]
        for name, kind in _LISTS.items():
            setattr(sample, name, _first(getattr(sample, name), kind))
        if len(bytes(sample.parts)) <= MAX_PARTS_BYTES:
            parts = msgspec.json.decode(sample.parts, type=list[KeptPart])
            sample.num_parts, sample.parts = len(parts), msgspec.Raw(msgspec.json.encode(_cut_parts(parts)))
        else:
            sample.parts = _NONE
        return msgspec.json.encode(sample)
    return None


def _first(values: msgspec.Raw, kind: Any) -> msgspec.Raw:
    """Return the first MAX_TOKENS elements of a list; MsgspecError if they are not of this kind."""
    found = _FIRST.match(bytes(values))
    first = found[0].rstrip(b",") + b"]" if found is not None else bytes(values)
    return msgspec.Raw(msgspec.json.encode(msgspec.json.decode(first, type=kind)))


def _cut_parts(parts: Sequence[KeptPart]) -> list[KeptPart]:
    """Return the first parts, with texts and calls cut."""
    most, room, shown = MAX_CHARACTERS // MAX_CALLS, MAX_TRANSCRIPT, list[KeptPart]()
    for part in parts[:MAX_PARTS]:
        if room <= 0:
            break
        calls = tuple((_cut(name, most), _cut(arguments, most)) for name, arguments in part.calls[:MAX_CALLS])
        shown.append(KeptPart(part.role, _cut(part.text), part.end, calls))
        room -= len(shown[-1].text)
    return shown


def _cut(text: str, most: int = MAX_CHARACTERS) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
