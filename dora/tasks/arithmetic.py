"""The built-in task: sums of labelled one-digit numbers, most of them short, a few very long.

"a3b4c2=" asks for 3 + 4 + 2; totals are written with two digits, so the answer is "09". The labels let a worked answer
show its progress: "a03b07c09". Its length grows with the number of terms, which has a heavy tail, as answer lengths do
in real training.

A problem is a pure function of (seed, split, index), so the stream is endless, needs no file, and resumes from an
index. Invariant: no text is in both splits, because one bit of its hash determines its split.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from itertools import count
from string import ascii_letters
from typing import Final

from dora.errors import ConfigError

#: Terms are 0 to LARGEST_TERM; problems with many terms have smaller terms, so that the total has two digits.
LARGEST_TERM: Final = 4
LARGEST_TOTAL: Final = 99

#: Bit of the text's hash that each split requires.
SPLITS: Final = {"train": 0, "heldout": 1}

#: One label per term, in this order.
LABELS: Final = ascii_letters

#: Options of a source.
OPTIONS: Final = ("min_terms", "max_terms")

#: Shape and scale (in numbers of terms) of the Lomax (shifted Pareto) distribution of sizes.
TAIL_SHAPE: Final = 1.5
TAIL_SCALE: Final = 2.5


def problem(index: int, *, seed: int, split: str, min_terms: int = 3, max_terms: int = 32) -> tuple[str, str]:
    """Return problem number `index` of a split as (prompt, answer), for example ("a3b4c2=", "09")."""
    if split not in SPLITS:
        raise ConfigError(f"arithmetic: unknown split '{split}'; use one of {', '.join(SPLITS)}")
    if not 2 <= min_terms <= max_terms <= len(LABELS):
        raise ConfigError(
            f"arithmetic: need 2 <= min_terms <= max_terms <= {len(LABELS)}, got {min_terms} and {max_terms}"
        )
    # Half of all texts belong to a split, so this takes two tries on average.
    for attempt in count():
        uniforms = _uniforms(f"{seed}/{split}/{index}/{attempt}")
        num_terms = _size(next(uniforms), min_terms=min_terms, max_terms=max_terms)
        largest = min(LARGEST_TERM, LARGEST_TOTAL // num_terms)
        terms = [int((largest + 1) * next(uniforms)) for _ in range(num_terms)]
        prompt = "".join(f"{label}{term}" for label, term in zip(LABELS, terms, strict=False)) + "="
        if split_of(prompt) == split:
            return prompt, f"{sum(terms):02d}"
    raise AssertionError("unreachable: count() has no end")


def split_of(prompt: str) -> str:
    """Return the only split in which this text can occur."""
    bit = blake2b(prompt.encode(), digest_size=1).digest()[0] & 1
    return next(split for split, required in SPLITS.items() if required == bit)


def _size(uniform: float, *, min_terms: int, max_terms: int) -> int:
    """Return the size at quantile `uniform` of the Lomax law, truncated at `max_terms`."""
    mass = 1 - (1 + (max_terms - min_terms + 1) / TAIL_SCALE) ** -TAIL_SHAPE
    return min_terms + int(TAIL_SCALE * ((1 - uniform * mass) ** (-1 / TAIL_SHAPE) - 1))


def _uniforms(key: str) -> Iterator[float]:
    """Yield numbers in [0, 1) without end; they depend on the key alone, on every machine and Python version."""
    for block in count():
        digest = blake2b(f"{key}/{block}".encode()).digest()
        for start in range(0, len(digest), 4):
            yield int.from_bytes(digest[start : start + 4], "little") / 2**32
