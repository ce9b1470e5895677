"""The property of every parser of bytes from outside, and the two ways to test it.

Any bytes give a value or a DoraError whose text is one printable line, and never another exception; memory stays within
a multiple of the input. `parse` also checks the value: its types, and that writing and reading it changes nothing.
"""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dora.errors import DoraError
from tests.fuzz.mutate import drawn, mutated

#: Number of inputs for each parser; the long profile tries some millions.
LONG: Final = int(os.environ.get("DORA_FUZZ", "0"))
NUM_INPUTS: Final = LONG or 300
_NUM_EXAMPLES: Final = 60
#: Memory that a parse may use: a Python object takes some fifty bytes per byte of input, and three times that while it
#: grows.
_BYTES_PER_BYTE: Final = 300
_BYTES_AT_LEAST: Final = 4 << 20
#: Maximum length of a line of an error, which includes a path.
_LINE: Final = 2_000


@dataclass(frozen=True)
class Parser:
    """One parser: `parse(data, scratch)` reads `data`, in a file in the empty folder `scratch` if it reads files."""

    name: str
    make_samples: Callable[[], Sequence[bytes]]
    parse: Callable[[bytes, Path], object]
    many_lines: bool = False  #: its errors have one line per problem

    @cached_property
    def samples(self) -> Sequence[bytes]:
        """Valid inputs."""
        return self.make_samples()

    def check(self, data: bytes, scratch: Path) -> bool:
        """Check the property for one input; True if the input was accepted."""
        try:
            self.parse(data, scratch)
        except DoraError as err:
            lines = str(err).split("\n") if self.many_lines else [str(err)]
            if not all(line and line.isprintable() and len(line) <= _LINE for line in lines):
                raise AssertionError(f"not one line for a terminal: {str(err)[:3000]!r}") from err
            return False
        return True

    def __str__(self) -> str:
        return self.name


def require_robust(parser: Parser, scratch: Path) -> None:
    """Check the property with hypothesis, which shrinks failing inputs, and measure memory."""
    inputs = st.one_of(
        st.binary(max_size=300),
        st.builds(
            lambda sample, edits: mutated(sample, edits, parser.samples),
            st.sampled_from(parser.samples),
            st.lists(
                st.tuples(st.integers(0, 8), st.integers(0, 65535), st.integers(0, 127), st.integers(0, 255)),
                min_size=1,
                max_size=5,
            ),
        ),
    )

    @settings(
        max_examples=_NUM_EXAMPLES,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )
    @given(inputs)
    def holds(data: bytes) -> None:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        parser.check(data, scratch)
        _, peak = tracemalloc.get_traced_memory()
        assert peak - before <= _BYTES_AT_LEAST + _BYTES_PER_BYTE * len(data)

    parser.check(parser.samples[0], scratch)  # so that imports and caches are not measured
    tracemalloc.start()
    try:
        holds()
    finally:
        tracemalloc.stop()


def require_samples(parser: Parser, scratch: Path) -> None:
    """Check that every sample is accepted: else its mutations would test only the first check of the parser."""
    for sample in parser.samples:
        assert parser.check(sample, scratch), f"{parser.name} refuses its own sample {sample[:200]!r}"


def drive(parser: Parser, scratch: Path, *, inputs: int = NUM_INPUTS, first: int = 0) -> int:
    """Check the property for the inputs numbered `first`, `first + 1`, ...; return how many were accepted."""
    accepted = 0
    for number in range(first, first + inputs):
        data = drawn(number, parser.samples)
        try:
            accepted += parser.check(data, scratch)
        except BaseException as err:
            shown = data.hex() if len(data) < 4_000 else f"{len(data)} bytes, {data[:200].hex()}..."
            err.add_note(f"input {number} of {parser.name}: {shown}")
            raise
    return accepted
