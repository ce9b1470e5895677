"""Files of a run: journal, token store, kept trajectories, metrics, manifests."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from dora.core.events import Event
from dora.core.ids import GroupId, TrajectoryId
from dora.errors import ConfigError
from dora.journal.codec import FORMAT, Epoch, Handled, Header, Note, decode, encode, format_of
from dora.journal.deep import KeptTrajectory, encode_kept, read_kept
from dora.journal.frames import FrameReader, FrameWriter
from dora.journal.reader import Journal
from dora.journal.tokens import DIGEST_BYTES, TokenWriter, read_tokens
from dora.observe.scores import Score
from dora.weights.checkpoints import MANIFEST, CheckpointManifest, rank_file, read_manifest
from dora.weights.store import Manifest, VersionStore, checksum_of
from tests.fuzz.parsers import LONG, Parser, drive, require_robust, require_samples
from tests.journal.recorded import full_run
from tests.observe.builders import resumed

_VERSION: Final = 3


def written(scratch: Path, data: bytes) -> Path:
    path = scratch / "file"
    path.write_bytes(data)
    return path


@cache
def framer() -> FrameWriter:
    """A writer that makes frames and stores none: a sync for each input would take too long."""
    with tempfile.TemporaryDirectory() as folder, FrameWriter(Path(folder) / "file") as writer:
        return writer


def contents(*records: bytes) -> bytes:
    """A file of frames; every third record ends one."""
    writer, frames = framer(), b""
    for number, record in enumerate(records):
        writer.write(record)
        if number % 3 == 2:
            frames += writer.take()
    return frames + writer.take()


@cache
def journal_records() -> list[bytes]:
    """The journal records of a run in which everything happens."""
    world = full_run()
    header = Header(FORMAT, "test", "2026-01-01T00:00:00Z", "0.1.0", world.state.settings)
    kinds: dict[type[Event], bytes] = {}
    for event, commands in world.journal:
        kinds.setdefault(type(event), encode(Handled(event, tuple(commands))))
    rest = (Epoch(0, 0.0, "0" * 64), Note(1.5, "published", {"version": 1, "name": "a", "size": 0.5}))
    return [encode(header), *map(encode, rest), *kinds.values()]


@cache
@cache
def token_records() -> list[bytes]:
    with tempfile.TemporaryDirectory() as parent:
        path = Path(parent) / "tokens.bin"
        with TokenWriter(path) as writer:
            writer.prompt(1, [5, 6, 7], digest=bytes(DIGEST_BYTES), group_size=8)
            writer.append(8, 0, [1, 2], [-0.5, -1.5], start=0)
            writer.append(8, 1, [3], [-0.25], start=1, loss_mask=[0])
            writer.append(9, 0, [], [], start=0)
        return [record for _, record in FrameReader(path)]


def framed(scratch: Path, *records: bytes) -> Path:
    """A file of whole frames with any contents, so that the parsers behind the checksums are tested too."""
    return written(scratch, contents(*records))


def parse_frames(data: bytes, scratch: Path) -> None:
    reader = FrameReader(written(scratch, data))
    records = [record for _, record in reader]
    assert reader.num_bytes + reader.torn_bytes == len(data)
    assert [record for _, record in FrameReader(framed(scratch, *records))] == records


def parse_journal(data: bytes, scratch: Path) -> None:
    for record in Journal(written(scratch, data)).records():
        assert repr(decode(encode(record))) == repr(record)


def parse_record(data: bytes, scratch: Path) -> None:
    format_of(data)
    record = decode(data)
    assert repr(decode(encode(record))) == repr(record)


def parse_header(data: bytes, scratch: Path) -> None:
    """Read a journal whose first record is `data`."""
    list(Journal(framed(scratch, data)).records())


def parse_tokens(data: bytes, scratch: Path) -> None:
    check_tokens(written(scratch, data))


def parse_token_record(data: bytes, scratch: Path) -> None:
    """Read `data` twice after a whole answer: it may reset the group, continue the answer or cut it."""
    check_tokens(framed(scratch, *token_records(), data, data))


def check_tokens(path: Path) -> None:
    store = read_tokens(path)
    for trajectory, answer in store.answers.items():
        assert len(answer.tokens) == len(answer.logprobs) == len(answer.loss_mask) == store.counts[trajectory]
    assert read_tokens(path, wanted=()).counts == store.counts


def parse_kept(data: bytes, scratch: Path) -> None:
    path = written(scratch, data)
    kept = list(read_kept(path))
    path.write_bytes(b"".join(map(encode_kept, kept)))
    assert repr(list(read_kept(path))) == repr(kept)


def kept_lines() -> list[bytes]:
    kept = KeptTrajectory(
        **{"step": 1, "group": GroupId(2), "trajectory": TrajectoryId(9), "version": 1, "reward": 0.5},
        **{"truncated": "", "prompt": "1+1=", "text": "2", "prompt_tokens": (3, 4), "tokens": (5,)},
        logprobs=(-0.5,),
    )
    return [encode_kept(kept), encode_kept(kept) * 3, encode_kept(kept) + encode_kept(kept)[:30]]


def parse_metrics(data: bytes, scratch: Path) -> None:
    for score in resumed(written(scratch, data)).facts.scores:
        assert isinstance(score.name, str)
        assert type(score.version) is int
        assert isinstance(score.mean, float)


def metrics_lines() -> list[bytes]:
    score = asdict(Score(name="heldout", version=4, mean=0.5, pass_at_n=0.75, num_samples=64))
    step = {"kind": "step", "at": 1.5, "step": 3, "staleness": [4, 0], "trainer": {"loss": float("nan")}}
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in (step, {"kind": "evaluation", "at": 2.0, **score}))
    return [lines, lines * 2, lines + lines[:20]]


def stored(scratch: Path, manifest: bytes) -> VersionStore:
    """A store with one version, whose manifest is `manifest`."""
    store = VersionStore(memory_root=scratch / "versions", durable_root=scratch / "versions")
    folder = scratch / "versions" / f"v{_VERSION:06d}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(b"{}")
    (folder / "manifest.json").write_bytes(manifest)
    return store


def parse_version(data: bytes, scratch: Path) -> None:
    store = stored(scratch, data)
    assert store.live() in ([], [_VERSION])
    manifest = store.manifest(_VERSION)
    assert manifest.version == _VERSION
    folder = store.folder(_VERSION)
    assert all((folder / name).resolve().is_relative_to(folder.resolve()) for name in manifest.files)


def version_manifests() -> list[bytes]:
    with tempfile.TemporaryDirectory() as parent:
        file = Path(parent) / "config.json"
        file.write_bytes(b"{}")
        manifest = Manifest(version=_VERSION, files={"config.json": checksum_of(file)}, num_bytes=2)
    return [json.dumps(asdict(manifest), indent=1).encode()]


def parse_checkpoint(data: bytes, scratch: Path) -> None:
    (scratch / MANIFEST).write_bytes(data)
    rank_file(scratch, 0).write_bytes(b"12345")
    manifest = read_manifest(scratch)
    if manifest is None:
        raise ConfigError("no checkpoint")
    assert manifest.world_size == len(manifest.state_checksums) == 1
    (scratch / MANIFEST).write_bytes(json.dumps(asdict(manifest)).encode())
    assert read_manifest(scratch) == manifest


def checkpoint_manifests() -> list[bytes]:
    manifest = CheckpointManifest(
        step=7, world_size=1, chain="ab", state_checksums=["cd"], num_bytes=[5], file_checksums=["ef"]
    )
    return [json.dumps(asdict(manifest), indent=1).encode()]


PARSERS: Final = [
    Parser("frames", lambda: [contents(*token_records()), contents(*journal_records()[3:9])], parse_frames),
    Parser("journal", lambda: [contents(*journal_records()[:6])], parse_journal),
    Parser("record", journal_records, parse_record),
    Parser("header", lambda: journal_records()[:1], parse_header),
    Parser("token file", lambda: [contents(*token_records())], parse_tokens),
    Parser("token record", token_records, parse_token_record),
    Parser("kept trajectories", kept_lines, parse_kept),
    Parser("metrics", metrics_lines, parse_metrics),
    Parser("version manifest", version_manifests, parse_version),
    Parser("checkpoint manifest", checkpoint_manifests, parse_checkpoint),
]


@pytest.mark.parametrize("parser", PARSERS, ids=str)
def test_any_bytes_of_a_file_are_read_or_refused_in_one_line(parser: Parser, tmp_path: Path) -> None:
    require_samples(parser, tmp_path)
    require_robust(parser, tmp_path)


@pytest.mark.deep
@pytest.mark.timeout(0 if LONG else 120)
@pytest.mark.parametrize("parser", PARSERS, ids=str)
def test_many_more_files_are_read_or_refused(parser: Parser, tmp_path: Path) -> None:
    drive(parser, tmp_path)
