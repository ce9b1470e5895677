"""Bytes that a parser may receive: random ones, or a valid sample with a few changes.

Invariant: pure; an input is a function of the samples and of its edits, and an edit is four small numbers, so that
hypothesis can shrink them and the long profile can draw them from a seed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Final

#: (kind, place, size, value)
Edit = tuple[int, int, int, int]

#: Replacements for a value of JSON or TOML.
_VALUES: Final = (
    *(b"null", b"true", b"false", b"{}", b"[]", b'""', b"0", b"-1", b"1.5", b"-0.0", b"1e39", b"1e999", b"nan", b"inf"),
    *(b"2147483648", b"9223372036854775808", b"-9223372036854775809", b"9" * 30, b"9" * 5000, b"1e-400"),
    *(b'"\\ud800"', b'"\xff"', b'"\\u0000"', b'"a\\nb"', b'"\xc2\x85\x1b[31m"', b'"' + b"x" * 3000 + b'"'),
    *(b"[[[]]]", b"[null]", b'{"":{}}', b'{"a\\nb":1}', b"[{}]", b"1979-05-27", b"0x10", b"0x" + b"f" * 5000, b"'''"),
)
_VALUE: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|true|false|null')

#: Bytes and words with a meaning in one of the formats: brackets, msgpack heads, extreme lengths.
_WORDS: Final = (
    *(b"\n", b"\r\n", b"\n\n", b"\0", b"\xff", b"{", b"}", b"[", b"]", b'"', b",", b":", b"=", b".", b"#", b"data:"),
    *(b"\x80", b"\x90", b"\x91", b"\xc0", b"\xc1", b"\xc4\xff", b"\xc6\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff"),
    *(
        b"\xdf\xff\xff\xff\xff",
        b"\xcb\x7f\xf8\0\0\0\0\0\0",
        b"\xcf" + b"\xff" * 8,
        b"\xd3\x80" + b"\0" * 7,
        b"\xd9\x02\xff\xff",
    ),
    *(b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x01\0\0\0", b"\0\0\0\x80"),
    *(b"Transfer-Encoding: chunked\r\n", b"Content-Length: 99999999999999999999\r\n", b"HTTP/1.1 200 OK\r\n"),
)
_NESTS: Final = ((b"[", b"]"), (b'{"a":', b"}"), (b"\x91", b""), (b"\x81\xa1a", b""), (b"a.", b""), (b"a=[", b"]"))


def mutated(sample: bytes, edits: Sequence[Edit], others: Sequence[bytes]) -> bytes:
    """`sample` after all edits, in order; pieces of `others` are spliced in."""
    data = sample
    for kind, place, size, value in edits:
        start = place % (len(data) + 1)
        end = start + size
        match kind % 9:
            case 0:  # flip bits of one byte
                data = data[:start] + bytes(b ^ (value or 1) for b in data[start : start + 1]) + data[start + 1 :]
            case 1:  # cut out
                data = data[:start] + data[end:]
            case 2:  # cut off
                data = data[:start]
            case 3:  # repeat
                data = data[:end] + data[start:end] * (value % 8 + 1) + data[end:]
            case 4:  # splice
                other = others[value % len(others)]
                at = (place * 31) % (len(other) + 1)
                data = data[:start] + other[at : at + 4 * size] + data[start + (size if value & 1 else 0) :]
            case 5 | 6:  # another value, of any type
                found = _VALUE.search(data, start) or _VALUE.search(data)
                if found is not None:
                    data = data[: found.start()] + _VALUES[value % len(_VALUES)] + data[found.end() :]
            case 7:  # a meaningful word, put in or written over
                word = _WORDS[value % len(_WORDS)]
                data = data[:start] + word + data[start + (len(word) if size & 1 else 0) :]
            case 8:  # nest a value or a piece
                found = _VALUE.search(data, start)
                low, high = found.span() if found is not None and value & 1 else (start, end)
                before, after = _NESTS[value // 2 % len(_NESTS)]
                depth = (1, 2, 3, 40, 1100, 20_000)[size % 6]
                data = data[:low] + before * depth + data[low:high] + after * depth + data[high:]
    return data[:200_000]


def drawn(number: int, samples: Sequence[bytes]) -> bytes:
    """Input `number` of the long profile: one in sixteen is random bytes, the others are samples with 1 to 6 edits."""
    source = random.Random(number)
    draw = source.getrandbits
    if not draw(4):
        return source.randbytes(draw(8))
    count = 1 + draw(8) % (1 + draw(8) % 6)
    edits = [(draw(8), draw(16), draw(draw(3)), draw(8)) for _ in range(count)]
    return mutated(samples[draw(16) % len(samples)], edits, samples)
