"""Deltas between policy versions: the files of a version, as changes of the files of an older version, its base.

Invariant: what `apply` leaves has the given checksums. A delta may come from another machine: if it is not a delta of
this base, it is refused and nothing of it is left; in any case memory is bounded by a few blocks.

A folder of deltas has a file for each file of the version, with the same name. It begins with `DORADLT1` and the
checksum of the base's file (XXH3, 16 bytes). If the base has no file of that size, or the changes would take as much,
the checksum is zero and the new file follows. Otherwise both are read as little-endian 16-bit words (a zero is added to
an odd last byte), in blocks of 2**21 words of which the last may be shorter. A record for each block follows: two u32,
`num_gaps` and `num_bytes` (at most 5 num_gaps + 64), then `num_bytes` bytes, a zlib stream of `num_gaps` gaps and one
change for each gap other than 65,535. Both are words; the low bytes of all gaps come first, then their high bytes, then
the low and the high bytes of the changes.

- A gap is a number of unchanged words. A changed word follows, except after 65,535: the next gap is added to that one.
- A change is what to add to the word modulo 2**16, a number d in -2**15 ... 2**15 - 1, as 2 d, or -2 d - 1 if it is
  negative: an optimizer step moves most values to a neighbor, so that the high bytes are zero.
"""

from __future__ import annotations

import shutil
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

import numpy as np
from numpy.typing import NDArray

from dora import foreign
from dora.weights.store import StoreError, checksum_of, clear_errors, is_inside

Words = NDArray[np.uint16]
_MAGIC: Final = b"DORADLT1"
_WHOLE: Final = _MAGIC + bytes(16)
MAX_MORE: Final = len(_WHOLE)  #: bytes that a delta has at most more than its file
_RECORD: Final = struct.Struct("<II")
_BLOCK_BYTES: Final = 4 << 20
_SKIP: Final = 65_535


def encode(base: Path, new: Path, names: Iterable[str], into: Path) -> None:
    """Write the deltas of these files of the folder `new` to the empty folder `into`. On an error, delete `into`."""
    for name in names:
        with _refusing(f"cannot encode {name!r} of {new} against {base}", remove=into):
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            with (into / name).open("xb") as out:
                _encode(base / name, new / name, out)


def apply(base: Path, deltas: Path, into: Path, files: Mapping[str, str]) -> None:
    """Check all bases, then write these files (name -> checksum) to the empty folder `into`. On an error, delete it."""
    for name in files:
        with _refusing(f"cannot apply the delta of {name!r} in {deltas} to {base}", remove=into):
            _check(base, deltas, name)
    for name, checksum in files.items():
        with _refusing(f"cannot apply the delta of {name!r} in {deltas} to {base}", remove=into):
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            with (into / name).open("xb") as out, foreign.open_regular(deltas / name) as delta:
                is_whole = delta.read(len(_WHOLE)) == _WHOLE
                shutil.copyfileobj(delta, out) if is_whole else _apply(base / name, delta, out)
            if (found := checksum_of(into / name)) != checksum:
                raise ValueError(f"the result has the checksum {found}, not {checksum}")


def _encode(base: Path, new: Path, out: IO[bytes]) -> None:
    with foreign.open_regular(new) as file:
        if base.exists() and foreign.size_of(base) == foreign.size_of(new):
            out.write(_MAGIC + bytes.fromhex(checksum_of(base)))
            with foreign.open_regular(base) as old_file:
                for old, words in zip(_blocks(old_file), _blocks(file), strict=True):
                    out.write(_record(old, words))
        if not 0 < out.tell() < foreign.size_of(new):
            file.seek(0)
            out.seek(0)
            out.truncate()
            out.write(_WHOLE)
            shutil.copyfileobj(file, out)


def _record(old: Words, new: Words) -> bytes:
    positions = np.flatnonzero(old != new)
    gaps = np.diff(positions, prepend=-1) - 1
    ends = np.cumsum(gaps // _SKIP + 1)  # a gap takes one word, and one for each skip before it
    written = np.full(ends[-1] if len(ends) else 0, _SKIP, "<u2")
    written[ends - 1] = gaps % _SKIP
    change = (new - old)[positions].view(np.int16)
    zigzag = ((change << 1) ^ (change >> 15)).view(np.uint16)
    deflate = zlib.compressobj(strategy=zlib.Z_RLE)  # only zeros repeat: smaller and faster than the default
    planes = [_transposed(words.tobytes(), (-1, 2)) for words in (written, zigzag)]
    stream = deflate.compress(b"".join(planes)) + deflate.flush()
    return _RECORD.pack(len(written), len(stream)) + stream


def _check(base: Path, deltas: Path, name: str) -> None:
    if not is_inside(name):
        raise ValueError("this name leads out of the folder")
    with foreign.open_regular(deltas / name) as delta:
        header = delta.read(len(_WHOLE))
    if header != _WHOLE and header != _MAGIC + bytes.fromhex(checksum_of(base / name)):
        raise ValueError("it is damaged or belongs to another base")


def _apply(base: Path, delta: IO[bytes], out: IO[bytes]) -> None:
    with foreign.open_regular(base) as file:
        for words in _blocks(file):
            _change(words, delta)
            out.write(words.data)
        out.truncate(file.tell())  # without the zero after an odd last byte
    if delta.read(1):
        raise ValueError("it goes on after its end")


def _change(words: Words, delta: IO[bytes]) -> None:
    if len(record := delta.read(_RECORD.size)) < _RECORD.size:
        raise ValueError("it ends early")
    num_gaps, num_bytes = _RECORD.unpack(record)
    if num_gaps > len(words) or num_bytes > 5 * num_gaps + 64:
        raise ValueError("a block claims more than it can hold")
    inflate = zlib.decompressobj()
    planes = inflate.decompress(delta.read(num_bytes), 4 * num_gaps + 1)
    gaps = np.frombuffer(_transposed(planes[: 2 * num_gaps], (2, -1)), "<u2")
    is_changed = gaps != _SKIP
    size = 2 * (num_gaps + np.count_nonzero(is_changed))
    ends = np.cumsum(gaps + is_changed, dtype=np.intp)  # after the unchanged words and the changed one
    if not inflate.eof or inflate.unused_data or len(planes) != size or (ends > len(words)).any():
        raise ValueError("a block does not hold what it claims")
    zigzag = np.frombuffer(_transposed(planes[2 * num_gaps :], (2, -1)), "<u2")
    words[ends[is_changed] - 1] += (zigzag >> 1) ^ -(zigzag & 1)


def _transposed(planes: bytes, shape: tuple[int, int]) -> bytes:
    return np.frombuffer(planes, np.uint8).reshape(shape).T.tobytes()


def _blocks(file: IO[bytes]) -> Iterator[Words]:
    while block := file.read(_BLOCK_BYTES):
        yield np.frombuffer(bytearray(block + bytes(len(block) % 2)), "<u2")


@contextmanager
def _refusing(what: str, *, remove: Path) -> Iterator[None]:
    """Turn the errors of damaged and hostile files into a StoreError of one line; delete `remove` on any error."""
    with clear_errors(what, remove=remove):
        try:
            yield
        except (ValueError, zlib.error, foreign.ForeignFileError) as err:
            raise StoreError(f"{what}: {err}") from err
