"""Deltas of real files make the new version, as their format is described; anything else is refused in one line."""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from dora.weights.delta import apply, encode
from dora.weights.store import StoreError, checksum_of

BLOCK = 4 << 20  # bytes
SKIP = 65_535
HEADER = 24


def make(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def delta_of(root: Path, base: bytes, new: bytes) -> bytes:
    """Return the delta of one file; leave the folders `base`, `new` and `deltas` with a file `w` in each."""
    make(root / "base", {"w": base})
    make(root / "new", {"w": new})
    encode(root / "base", root / "new", ["w"], root / "deltas")
    return (root / "deltas" / "w").read_bytes()


def applied(root: Path) -> bytes:
    into = root / "into"
    apply(root / "base", root / "deltas", into, {"w": checksum_of(root / "new" / "w")})
    made = (into / "w").read_bytes()
    shutil.rmtree(into)
    return made


def refused(root: Path, delta: bytes) -> str:
    """Return what `apply` says to other bytes than those of the delta; nothing must be left."""
    (root / "deltas" / "w").write_bytes(delta)
    with pytest.raises(StoreError) as refusal:
        applied(root)
    assert not (root / "into").exists()
    said = str(refusal.value)
    assert said.isprintable()
    assert all(part in said for part in ("'w'", str(root / "deltas"), str(root / "base")))
    return said


def read(delta: bytes, base: bytes) -> bytes:
    """The new file, by the description of the format alone."""
    assert delta[:8] == b"DORADLT1"
    if not any(delta[8:24]):
        return delta[24:]
    assert delta[8:24] == xxhash.xxh3_128_digest(base)
    new, at = bytearray(base + bytes(len(base) % 2)), 24
    for position in range(0, len(base) // 2 + len(base) % 2, 2**21):
        num_gaps, num_bytes = struct.unpack_from("<II", delta, at)
        assert num_bytes <= 5 * num_gaps + 64
        stream = zlib.decompress(delta[at + 8 : at + 8 + num_bytes])
        at += 8 + num_bytes
        num_changes = len(stream) // 2 - num_gaps
        gaps = [low + 256 * high for low, high in zip(stream[:num_gaps], stream[num_gaps : 2 * num_gaps], strict=True)]
        rest = stream[2 * num_gaps :]
        changes = (low + 256 * high for low, high in zip(rest[:num_changes], rest[num_changes:], strict=True))
        for gap in gaps:
            position += gap
            if gap == 65_535:
                continue
            written = next(changes)
            change = -(written + 1) // 2 if written % 2 else written // 2
            word = int.from_bytes(new[2 * position : 2 * position + 2], "little") + change
            new[2 * position : 2 * position + 2] = (word % 2**16).to_bytes(2, "little")
            position += 1
        assert next(changes, None) is None
    assert at == len(delta)
    return bytes(new[: len(base)])


def changed(base: bytes, changes: dict[int, int]) -> bytes:
    """Return a file with these numbers added to its words, by position; the last may have one byte only."""
    words = np.frombuffer(base + bytes(len(base) % 2), "<u2").copy()
    for position, change in changes.items():
        words[position] = (int(words[position]) + change) % 2**16
    return words.tobytes()[: len(base)]


@st.composite
def versions(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A file and its change at a few places, some far from each other, or at many."""
    size = draw(st.integers(0, 500) | st.integers(0, 500_000))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base = rng.bytes(size)
    num_words = (size + 1) // 2
    if not num_words:
        return base, base
    change = st.sampled_from([1, -1, 2, -(2**15), 2**15 - 1]) | st.integers(-(2**15), 2**15 - 1)
    changes = draw(st.dictionaries(st.integers(0, num_words - 1), change, max_size=20))
    many = np.flatnonzero(rng.random(num_words) < draw(st.sampled_from([0, 0, 1e-5, 0.01, 0.1, 1])))
    return base, changed(base, dict.fromkeys(many.tolist(), draw(change)) | changes)


@given(versions())
@example((b"", b""))
@example((b"x", b"y"))
@example((b"", b"new"))
@example((b"old", b""))
@example((bytes(300_000), bytes(300_000)))
@example((bytes(300_001), bytes(300_000) + b"x"))
@example((bytes(300_000), b"x" * 300_000))
@example((bytes(300_000), bytes(300_002)))
def test_a_delta_makes_the_new_file_and_so_does_its_description(files: tuple[bytes, bytes]) -> None:
    base, new = files
    with tempfile.TemporaryDirectory() as folder:
        delta = delta_of(Path(folder), base, new)
        assert len(delta) <= len(new) + HEADER
        assert read(delta, base) == new
        assert applied(Path(folder)) == new


@pytest.mark.parametrize("gap", [n * SKIP + more for n in (0, 1, 2, 5) for more in (-1, 0, 1) if n or more >= 0])
@pytest.mark.parametrize("first", [0, 7])
def test_a_gap_of_any_length_can_be_written(tmp_path: Path, first: int, gap: int) -> None:
    base = bytes(2 * (first + gap + 5))
    new = changed(base, {first: 1, first + gap + 1: -1})
    delta = delta_of(tmp_path, base, new)
    assert len(delta) < HEADER + 64
    assert read(delta, base) == new == applied(tmp_path)


@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 2, 2 * BLOCK + 3])
def test_blocks_are_independent_of_each_other(tmp_path: Path, size: int) -> None:
    base = np.random.default_rng(0).bytes(size)
    last = (size + 1) // 2 - 1
    places = {0, SKIP, BLOCK // 2 - 1, BLOCK // 2, BLOCK // 2 + SKIP, last - 1, last}
    new = changed(base, {position: 3 * position + 1 for position in places if position <= last})
    delta = delta_of(tmp_path, base, new)
    assert len(delta) < HEADER + 3 * 200
    assert read(delta, base) == new == applied(tmp_path)


def test_an_unchanged_file_costs_almost_nothing(tmp_path: Path) -> None:
    base = np.random.default_rng(0).bytes(2 * BLOCK + 7)
    assert len(delta_of(tmp_path, base, base)) == HEADER + 3 * 16
    assert applied(tmp_path) == base


@pytest.mark.parametrize("base", [b"old" * 999, None], ids=["another size", "none"])
def test_a_file_without_a_base_is_sent_whole_and_can_be_made_without_it(tmp_path: Path, base: bytes | None) -> None:
    new = b"new" * 1000
    make(tmp_path / "new", {"w": new})
    if base is not None:
        make(tmp_path / "base", {"w": base})
    encode(tmp_path / "base", tmp_path / "new", ["w"], tmp_path / "deltas")
    assert (tmp_path / "deltas" / "w").read_bytes() == b"DORADLT1" + bytes(16) + new
    shutil.rmtree(tmp_path / "base", ignore_errors=True)
    assert applied(tmp_path) == new


def test_a_file_that_changed_too_much_is_sent_whole(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    base, new = rng.bytes(BLOCK + 1000), rng.bytes(BLOCK + 1000)
    assert delta_of(tmp_path, base, new) == b"DORADLT1" + bytes(16) + new
    assert applied(tmp_path) == new


def test_steps_to_neighbors_take_a_fraction_of_changes_to_any_value(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    base = rng.bytes(200_000)
    places = np.flatnonzero(rng.random(100_000) < 0.1).tolist()
    near = delta_of(tmp_path / "near", base, changed(base, {place: 1 - 2 * (place % 2) for place in places}))
    far = delta_of(tmp_path / "far", base, changed(base, {place: int(rng.integers(2**16)) for place in places}))
    assert len(near) < 0.05 * len(base) < 0.12 * len(base) < len(far)


def test_a_version_has_many_files_in_folders_of_their_own(tmp_path: Path) -> None:
    base = {"config.json": b"{}", "old.json": b"[]", **{f"part/{i}.safetensors": bytes([i]) * 9999 for i in range(3)}}
    new = {**base, "part/1.safetensors": b"\1" * 9998 + b"\2", "new.json": b"{}", "empty": b""}
    del new["old.json"]
    make(tmp_path / "base", base)
    make(tmp_path / "new", {**new, "unnamed": b"?"})
    encode(tmp_path / "base", tmp_path / "new", new, tmp_path / "deltas")
    files = {name: checksum_of(tmp_path / "new" / name) for name in new}
    apply(tmp_path / "base", tmp_path / "deltas", tmp_path / "into", files)
    made = [path for path in (tmp_path / "into").rglob("*") if path.is_file()]
    assert {path.relative_to(tmp_path / "into").as_posix(): path.read_bytes() for path in made} == new


@pytest.mark.parametrize(
    "wrong", [b"old" * 999 + b"odd", b"old" * 999, b"", None], ids=["other bytes", "another size", "empty", "none"]
)
def test_a_wrong_base_of_any_file_is_refused_before_anything_is_written(tmp_path: Path, wrong: bytes | None) -> None:
    base = {"a": b"old" * 1000, "w": b"old" * 1000}
    new = {name: b"new" + content[3:] for name, content in base.items()}
    make(tmp_path / "base", base)
    make(tmp_path / "new", new)
    encode(tmp_path / "base", tmp_path / "new", ["a", "w"], tmp_path / "deltas")
    files = {name: checksum_of(tmp_path / "new" / name) for name in new}
    (tmp_path / "base" / "w").unlink()
    if wrong is not None:
        make(tmp_path / "base", {"w": wrong})
    (tmp_path / "a file").touch()  # so that the first attempt to write is another error
    with pytest.raises(StoreError) as refusal:
        apply(tmp_path / "base", tmp_path / "deltas", tmp_path / "a file" / "into", files)
    said = str(refusal.value)
    assert said.startswith(f"cannot apply the delta of 'w' in {tmp_path / 'deltas'} to {tmp_path / 'base'}: ")
    assert ("belongs to another base" if wrong is not None else "No such file") in said


def test_a_result_that_is_not_the_new_version_is_refused(tmp_path: Path) -> None:
    base = b"old" * 1000
    delta = delta_of(tmp_path, base, b"new" + base[3:])
    make(tmp_path / "new", {"w": base})
    assert "the result has the checksum" in refused(tmp_path, delta)
    assert "the result has the checksum" in refused(tmp_path, b"DORADLT1" + bytes(16) + b"new" + base[3:])


@pytest.fixture(params=["changes", "whole"])
def small(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, bytes, bytes]:
    """The folders of a small delta, its bytes, and the new file."""
    base = np.random.default_rng(0).bytes(2001)
    new = changed(base, {3: 1, 5: -1, 700: 12_345, 1000: 1}) if request.param == "changes" else base[:-1700]
    delta = delta_of(tmp_path, base, new)
    assert any(delta[8:HEADER]) == (request.param == "changes")
    return tmp_path, delta, new


def test_every_truncated_delta_is_refused(small: tuple[Path, bytes, bytes]) -> None:
    root, delta, _ = small
    for length in range(len(delta)):
        refused(root, delta[:length])
    refused(root, delta + b"\0")


def test_a_flipped_bit_is_refused_or_changes_nothing(small: tuple[Path, bytes, bytes]) -> None:
    root, delta, new = small
    harmless = 0
    for bit in range(8 * min(len(delta), 200)):
        flipped = bytearray(delta)
        flipped[bit // 8] ^= 1 << bit % 8
        (root / "deltas" / "w").write_bytes(flipped)
        try:
            assert applied(root) == new
            harmless += 1
        except StoreError:
            assert not (root / "into").exists()
    assert harmless < 16  # padding of the zlib stream, and codes that it does not use


def record(gaps: list[int], changes: list[int], *, num_gaps: int | None = None, end: bytes = b"") -> bytes:
    """Return a record of any contents; `end` follows in the stream."""
    planes = [bytes(word >> shift & 255 for word in words) for words in (gaps, changes) for shift in (0, 8)]
    stream = zlib.compress(b"".join(planes)) + end
    return struct.pack("<II", len(gaps) if num_gaps is None else num_gaps, len(stream)) + stream


HOSTILE = {
    "gaps beyond the block": record([SKIP - 1], [2]),
    "a last word beyond the block": record([999, 1], [2, 2]),
    "skips beyond the block": record([SKIP] * 999, []),
    "more gaps than words": record([0] * 1002, [2] * 1002),
    "more gaps than any file": struct.pack("<II", 2**32 - 1, 2**32 - 1),
    "a longer stream than any": struct.pack("<II", 1, 2**32 - 1),
    "fewer words than claimed": record([0], [2], num_gaps=2),
    "more words than claimed": record([0, 0], [2, 2], num_gaps=1),
    "half a word": record([0], [2], num_gaps=1)[:8] + zlib.compress(b"\0\0\2"),
    "fewer changes than gaps": record([0, 0], [2]),
    "more changes than gaps": record([0], [2, 2]),
    "a change for a skip": record([SKIP, 0], [2, 2]),
    "no stream": struct.pack("<II", 0, 0),
    "no zlib stream": struct.pack("<II", 1, 9) + b"\xff" * 9,
    "bytes after the stream": record([0], [2], end=b"x"),
    "two records": record([0], [2]) + record([0], [2]),
}  # fmt: skip


@pytest.fixture
def hostile(tmp_path: Path) -> tuple[Path, bytes]:
    """The folders of a delta of 1,001 words, and its header."""
    delta = delta_of(tmp_path, bytes(2002), b"\1" + bytes(2001))
    assert delta[HEADER:] != record([0], [2])  # compressed otherwise
    (tmp_path / "deltas" / "w").write_bytes(delta[:HEADER] + record([0], [2]))
    assert applied(tmp_path) == b"\1" + bytes(2001)
    return tmp_path, delta[:HEADER]


@pytest.mark.parametrize("name", HOSTILE)
def test_an_impossible_record_is_refused(hostile: tuple[Path, bytes], name: str) -> None:
    root, header = hostile
    said = refused(root, header + HOSTILE[name])
    assert "the result has the checksum" not in said, "it was not noticed by itself"


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(noise: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        delta = delta_of(Path(folder), bytes(2002), b"\1" + bytes(2001))
        refused(Path(folder), noise)
        refused(Path(folder), delta[:HEADER] + noise)


@given(st.lists(st.integers(0, SKIP)), st.lists(st.integers(0, SKIP)), st.none() | st.integers(0, 1001))
def test_any_words_are_refused(gaps: list[int], changes: list[int], num_gaps: int | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        delta = delta_of(Path(folder), bytes(2002), b"\xff" * 4 + bytes(1998))
        refused(Path(folder), delta[:HEADER] + record(gaps, changes, num_gaps=num_gaps))


@pytest.mark.parametrize("num_gaps", [BLOCK // 2, 2**32 - 1])
def test_a_bomb_takes_no_more_memory_than_some_blocks(tmp_path: Path, num_gaps: int) -> None:
    delta = delta_of(tmp_path, bytes(BLOCK), b"\1" + bytes(BLOCK - 1))
    deflate = zlib.compressobj()
    bomb = b"".join(deflate.compress(bytes(1 << 20)) for _ in range(256)) + deflate.flush()
    (tmp_path / "deltas" / "w").write_bytes(delta[:HEADER] + struct.pack("<II", num_gaps, len(bomb)) + bomb)
    tracemalloc.start()
    try:
        with pytest.raises(StoreError, match=r"a block (does not hold what it claims|claims more)"):
            applied(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 20 * BLOCK
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("share", [0.1, 1])
def test_memory_is_that_of_some_blocks_whatever_the_size(tmp_path: Path, share: float) -> None:
    peaks = []
    for num_blocks in (1, 4):
        rng = np.random.default_rng(0)
        base = np.zeros(num_blocks * BLOCK // 2, "<u2")
        new = (base + (rng.random(len(base)) < share)).astype("<u2")
        root = tmp_path / str(num_blocks)
        make(root / "base", {"w": base.tobytes()})
        make(root / "new", {"w": new.tobytes()})
        tracemalloc.start()
        try:
            encode(root / "base", root / "new", ["w"], root / "deltas")
            apply(root / "base", root / "deltas", root / "into", {"w": checksum_of(root / "new" / "w")})
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert (root / "deltas" / "w").stat().st_size < 0.3 * base.nbytes
    assert peaks[1] < peaks[0] + BLOCK
    assert peaks[1] < 32 * BLOCK


def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    make(tmp_path, {"outside": b"DORADLT1" + bytes(16) + b"evil", "deltas/in/w": b""})
    checksum = xxhash.xxh3_128_hexdigest(b"evil")
    for name in ("../outside", "in/../../outside", str(tmp_path / "outside")):
        with pytest.raises(StoreError, match="leads out of the folder"):
            apply(tmp_path / "base", tmp_path / "deltas", tmp_path / "root" / "into", {name: checksum})
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("name", ["", ".", "\0", "\ud800", "\n", "w/x", "w" * 300, "x" * 5000])
def test_a_name_that_no_file_has_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    delta_of(tmp_path, b"old" * 9, b"new" * 9)
    with pytest.raises(StoreError) as refusal:
        apply(tmp_path / "base", tmp_path / "deltas", tmp_path / "into", {"w": "0" * 32, name: "0" * 32})
    assert str(refusal.value).isprintable()
    assert not (tmp_path / "into").exists()


def test_a_link_in_place_of_a_delta_or_of_the_base_is_not_followed(tmp_path: Path) -> None:
    delta = delta_of(tmp_path, b"old" * 99, b"new" + b"old" * 98)
    for link in (tmp_path / "base" / "w", tmp_path / "deltas" / "w"):
        link.rename(tmp_path / "elsewhere")
        link.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(StoreError, match="is a link, not a regular file"):
            applied(tmp_path)
        (tmp_path / "elsewhere").rename(link)
    assert (tmp_path / "deltas" / "w").read_bytes() == delta
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "fifo").rename(tmp_path / "deltas" / "w")
    with pytest.raises(StoreError, match="is a pipe, not a regular file"):
        applied(tmp_path)


def test_a_file_that_cannot_be_read_ends_the_encoding_with_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    make(tmp_path / "new", {"w": b"new"})
    with pytest.raises(StoreError, match=r"cannot encode 'gone' of .*new against .*base: .*No such file"):
        encode(tmp_path / "base", tmp_path / "new", ["w", "gone"], tmp_path / "deltas")
    assert not (tmp_path / "deltas").exists()
