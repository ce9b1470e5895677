"""The checker finds the violation of each rule in a run folder that was altered."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.chaos.checker import check
from tests.chaos.recorded import CHUNK, FRAME, PROMPT, Record, read_frames, unpack
from tests.chaos.session import ROOT, Session

pytestmark = [pytest.mark.deep, pytest.mark.timeout(400)]

STEPS = 3


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run."""
    with Session(tmp_path_factory.mktemp("good"), steps=STEPS, grade_s=0.0) as session:
        session.start()
        assert session.end() == 0, session.told
        assert session.folder is not None
        return session.folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / good.name))


def frame(records: list[bytes]) -> bytes:
    payload = b"".join(struct.pack("<I", len(record)) + record for record in records)
    length = struct.pack("<I", len(payload))
    return FRAME.pack(len(payload), zlib.crc32(length), zlib.crc32(payload)) + payload


Journal = list[Record]


def orders(journal: Journal, kind: str) -> list[Record]:
    return [o for r in journal if r["type"] == "Handled" for o in r["commands"] if o["type"] == kind]


def facts(journal: Journal, kind: str) -> list[Record]:
    return [r["event"] for r in journal if r["type"] == "Handled" and r["event"]["type"] == kind]


def without(journal: Journal, kind: str, *, last: bool = False) -> None:
    """Remove the first or last command of a kind."""
    holding = [r for r in journal if r["type"] == "Handled" and any(o["type"] == kind for o in r["commands"])]
    record = holding[-1 if last else 0]
    record["commands"].remove(next(o for o in record["commands"] if o["type"] == kind))


def again(journal: Journal, kind: str) -> None:
    """Repeat a command at the end."""
    order = orders(journal, kind)[0]
    handled = [r for r in journal if r["type"] == "Handled"]
    handled[-1]["commands"].insert(0, dict(order))


def repeat_fact(journal: Journal, kind: str, **changes: object) -> None:
    """Repeat an event directly after itself, altered."""
    place = next(i for i, r in enumerate(journal) if r["type"] == "Handled" and r["event"]["type"] == kind)
    journal.insert(place + 1, {"type": "Handled", "event": journal[place]["event"] | changes, "commands": []})


def alter(item: Record, **changes: object) -> None:
    item.update(changes)


def span_of(journal: Journal, change: Callable[[list[list[int]]], object]) -> None:
    event = next(e for e in facts(journal, "GenerationFinished") if e["trajectory"] >= 0)
    change(event["spans"])


def split_wave(journal: Journal) -> None:
    """Remove one trajectory from its wave."""
    wave = next(w for w in orders(journal, "TrainMicroBatch") if w["ranks"][0])
    wave["ranks"][0].pop()


def resend_wave(journal: Journal) -> None:
    wave = orders(journal, "TrainMicroBatch")[0]
    handled = [r for r in journal if r["type"] == "Handled"]
    handled[-1]["commands"].insert(0, wave | {"last": not wave["last"]})


JOURNAL: dict[str, tuple[str, Callable[[Journal], object]]] = {
    "a group trained twice": ("once", lambda j: again(j, "ForgetGroups")),
    "a group that is never trained": ("once", lambda j: without(j, "ForgetGroups", last=True)),
    "a group admitted twice": ("once", lambda j: again(j, "AdmitGroup")),
    "a group committed twice": ("once", lambda j: again(j, "CommitGroup")),
    "a group dropped after its commit": (
        "once",
        lambda j: j[-1]["commands"].insert(0, {"type": "DropGroup", "group": 0, "outcome": "failed", "reason": "x"}),
    ),
    "a group dropped without a reason": (
        "reason",
        lambda j: j[-1]["commands"].insert(0, {"type": "DropGroup", "group": 0, "outcome": "failed", "reason": ""}),
    ),
    "a step with a group too few": ("step", lambda j: without(j, "CommitGroup")),
    "a step that counts wrongly": ("step", lambda j: alter(orders(j, "CloseStep")[0], num_groups=3)),
    "a step closed twice": ("step", lambda j: again(j, "CloseStep")),
    "a step that is not trained": ("step", lambda j: alter(facts(j, "StepTrained")[-1], step=STEPS)),
    "a stale group": ("staleness", lambda j: alter(orders(j, "CommitGroup")[-1], step=STEPS + 7)),
    "a group of the future": ("staleness", lambda j: alter(orders(j, "CommitGroup")[0], version=1)),
    "a late deadline": ("staleness", lambda j: alter(orders(j, "AdmitGroup")[0], deadline=STEPS)),
    "a group that changes its tag": ("tag", lambda j: alter(orders(j, "CommitGroup")[0], version=1)),
    "a request to a server of another version": (
        "serving",
        lambda j: alter(next(o for o in orders(j, "Generate") if o["trajectory"] >= 0), version=9),
    ),
    "a span of another version": ("spans", lambda j: span_of(j, lambda s: s[0].__setitem__(0, 9))),
    "tokens that no span names": ("spans", lambda j: span_of(j, lambda s: s[-1].__setitem__(2, s[-1][2] - 1))),
    "a span that leaves a gap": ("spans", lambda j: span_of(j, lambda s: s[0].__setitem__(1, 1))),
    "an answer that becomes shorter": (
        "tokens",
        lambda j: alter(next(e for e in facts(j, "GenerationFinished") if e["trajectory"] >= 0), num_tokens=-1),
    ),
    "an answer over its budget": ("tokens", lambda j: alter(facts(j, "GenerationFinished")[-1], num_tokens=1000)),
    "no grade and no reason": ("reason", lambda j: alter(facts(j, "TrajectoryGraded")[0], reward=None)),
    "a wave that is another when it is sent again": ("waves", resend_wave),
    "a trajectory in no wave": ("waves", split_wave),
    "a step without its last wave": ("waves", lambda j: alter(orders(j, "TrainMicroBatch")[-1], last=False)),
    "a wave that is missing": ("waves", lambda j: without(j, "TrainMicroBatch")),
    "a step trained on two histories": ("chain", lambda j: repeat_fact(j, "StepTrained", chain="another")),
    "a version of another history": ("chain", lambda j: alter(facts(j, "VersionPublished")[-1], chain="another")),
    "a checkpoint of another history": ("chain", lambda j: alter(facts(j, "CheckpointSaved")[0], chain="another")),
    "a version that gets other files": (
        "version",
        lambda j: repeat_fact(j, "VersionPublished", files={"model.safetensors": "0"}),
    ),
    "a version made again differently": ("version", lambda j: alter(facts(j, "VersionPublished")[0], differs="0")),
    "an epoch that is missing": ("journal", lambda j: alter(next(r for r in j if r["type"] == "Epoch"), epoch=1)),
    "facts after the end": ("journal", lambda j: j.append({**j[-1], "commands": [orders(j, "AdmitGroup")[0]]})),
}


@pytest.mark.parametrize("what", JOURNAL)
def test_a_journal_that_breaks_a_rule_is_found(what: str, folder: Path) -> None:
    rule, tamper = JOURNAL[what]
    path = folder / "journal.msgpack"
    journal = [unpack(record) for record in read_frames(path).records]
    tamper(journal)
    path.write_bytes(frame([msgspec.msgpack.encode(record) for record in journal]))
    assert rule in {violation.rule for violation in check(folder).violations}


def edit(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def tokens(folder: Path, change: Callable[[list[bytes]], object]) -> None:
    records = read_frames(folder / "tokens.bin").records
    change(records)
    (folder / "tokens.bin").write_bytes(frame(records))


def first_chunk(records: list[bytes]) -> int:
    """Of a training answer."""
    return next(i for i, r in enumerate(records) if CHUNK.unpack_from(r)[0] != PROMPT and CHUNK.unpack_from(r)[1] >= 0)


def mix_admissions(records: list[bytes]) -> None:
    """Give the first half of an answer an older epoch than its prompt."""
    for i, record in enumerate(records):
        kind, *rest = CHUNK.unpack_from(record)
        rest[1] += kind == PROMPT
        records[i] = CHUNK.pack(kind, *rest) + record[CHUNK.size :]


def manifest(path: Path, **changes: object) -> None:
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def newest(folder: Path, name: str) -> Path:
    return max((folder / name).glob("[vs]*"))


FILES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a flipped byte in the journal": ("damage", lambda f: edit(f / "journal.msgpack", flip)),
    "a flipped byte among the tokens": ("damage", lambda f: edit(f / "tokens.bin", flip)),
    "a prompt that is missing": ("token store", lambda f: tokens(f, lambda r: r.pop(0))),
    "tokens that are missing": ("token store", lambda f: tokens(f, lambda r: r.pop(first_chunk(r)))),
    "an answer of two admissions": ("token store", lambda f: tokens(f, mix_admissions)),
    "a row that comes twice": ("metrics", lambda f: edit(f / "metrics.jsonl", lambda d: d + d)),
    "a row that is missing": (
        "metrics",
        lambda f: edit(f / "metrics.jsonl", lambda d: b"".join(d.splitlines(keepends=True)[2:])),
    ),
    "a torn row": ("metrics", lambda f: edit(f / "metrics.jsonl", lambda d: d[:-9])),
    "a row torn in the middle": ("metrics", lambda f: edit(f / "metrics.jsonl", lambda d: b'{"kind": "st\n' + d)),
    "a torn trajectory": ("metrics", lambda f: edit(f / "trajectories.jsonl", lambda d: d[:-9])),
    "a trajectory of another step": (
        "metrics",
        lambda f: edit(f / "trajectories.jsonl", lambda d: d.replace(b'"step":0', b'"step":2')),
    ),
    "a flipped byte in a version": ("version", lambda f: edit(newest(f, "versions") / "model.safetensors", flip)),
    "a version with other files": ("version", lambda f: manifest(newest(f, "versions"), files={})),
    "a version without a manifest": ("version", lambda f: (newest(f, "versions") / "manifest.json").unlink()),
    "a version folder of another history": ("chain", lambda f: manifest(newest(f, "versions"), chain="another")),
    "no result": ("version", lambda f: shutil.rmtree(newest(f, "versions"))),
    "a checkpoint folder of another history": ("checkpoint", lambda f: manifest(newest(f, "checkpoints"), chain="x")),
    "no last checkpoint": ("checkpoint", lambda f: shutil.rmtree(newest(f, "checkpoints"))),
}


@pytest.mark.parametrize("what", FILES)
def test_a_file_that_breaks_a_rule_is_found(what: str, folder: Path) -> None:
    rule, tamper = FILES[what]
    tamper(folder)
    assert rule in {violation.rule for violation in check(folder).violations}


def test_a_good_run_has_no_violation(good: Path) -> None:
    verdict = check(good)
    assert verdict.violations == []
    assert (verdict.finished, verdict.trained, verdict.lost, verdict.twice) == (True, 4 * STEPS, 0, 0)


def test_a_run_that_may_go_on_may_have_a_torn_end(folder: Path) -> None:
    path = folder / "journal.msgpack"
    journal = [unpack(record) for record in read_frames(path).records]
    kept = journal[: len(journal) // 2]
    path.write_bytes(frame([msgspec.msgpack.encode(record) for record in kept]) + b"torn")
    for name in ("metrics.jsonl", "trajectories.jsonl"):
        (folder / name).write_bytes(b'{"kind')
    assert [v for v in check(folder).violations if v.rule != "token store"] == []


def test_the_command_prints_what_it_finds_and_exits_with_3(folder: Path) -> None:
    command = [sys.executable, "-m", "tests.chaos.checker", str(folder)]
    assert subprocess.run(command, cwd=ROOT, check=False, capture_output=True).returncode == 0
    shutil.rmtree(newest(folder, "versions"))
    told = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert told.returncode == 3
    assert "has no durable copy" in told.stdout
