"""Run folders that someone else has made, with contents that no run writes: each command ends with one clear line, soon
and with little memory, reads and writes nothing outside, and executes nothing."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest

from dora.app.demo import unpack_demo
from dora.config.load import dump
from dora.config.schema import Config
from dora.core.commands import AdmitGroup
from dora.core.events import VersionPublished
from dora.core.ids import VersionId
from dora.journal.codec import FORMAT, Header
from dora.journal.run_folder import RunFolder
from dora.journal.writer import JournalWriter
from dora.weights.store import MANIFEST, Manifest, VersionStore, checksum_of
from tests.app.forked import Forks, Used
from tests.core.world import World
from tests.journal.recorded import full_run, write

COMMANDS = {
    "view": ("view", "DIR", "--port", "0"),
    "status": ("status", "DIR"),
    "audit": ("audit", "DIR"),
    "report": ("report", "DIR", "-o", "report.html"),
    "trace": ("trace", "DIR", "-o", "trace.json"),
    "export": ("export", "DIR", "--to", "exported"),
    "track": ("track", "DIR", "--to", "tensorboard"),
    "track as configured": ("track", "DIR"),
    "resume": ("run", "--resume", "DIR", "--set", "run.steps=10"),
    "simulate": ("simulate", "--from", "DIR", "--steps", "2"),
}
WRITTEN = ("report.html", "trace.json", "exported")
EXTRA_CPU_S, EXTRA_BYTES = 1.0, 200 << 20

Make = Callable[[RunFolder, Path], None]
#: Name -> what makes a run folder hostile, and, if every command must refuse it, what it says. The second argument is a
#: folder outside with a file `secret` in it.
KINDS: dict[str, tuple[Make, str]] = {}


def kind(name: str, *, refused: str = "") -> Callable[[Make], Make]:
    def add(make: Make) -> Make:
        KINDS[name] = (make, refused)
        return make

    return add


def instead(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(20 << 30)


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        where = os.getcwd()
        os.chdir(path.parent)  # the paths of sockets are short
        listener.bind(path.name)
        os.chdir(where)


def header(settings: object) -> bytes:
    return msgspec.msgpack.encode(Header(FORMAT, "r", "2026-01-01T00:00:00Z", "0", settings))  # type: ignore[arg-type]


# -- what is no file of a run -----------------------------------------------------------------------------------------


@kind("metrics are a link to /dev/zero", refused="metrics.jsonl: is a link, not a regular file")
def _(run: RunFolder, outside: Path) -> None:
    instead(run.metrics, lambda path: path.symlink_to("/dev/zero"))


@kind("the status is a pipe", refused="status.json: is a pipe, not a regular file")
def _(run: RunFolder, outside: Path) -> None:
    instead(run.status, os.mkfifo)


@kind("the journal is a link", refused="journal.msgpack: is a link, not a regular file")
def _(run: RunFolder, outside: Path) -> None:
    shutil.copy(run.journal, outside / "journal")
    instead(run.journal, lambda path: path.symlink_to(outside / "journal"))


@kind("the configuration is a link in a circle", refused="config.toml: is a link, not a regular file")
def _(run: RunFolder, outside: Path) -> None:
    instead(run.config, lambda path: path.symlink_to(path.name))


@kind("spans are a folder", refused="spans.jsonl: is a folder, not a regular file")
def _(run: RunFolder, outside: Path) -> None:
    instead(run.spans, Path.mkdir)


@kind("samples are a socket", refused="trajectories.jsonl: is a socket, not a regular file")
def _(run: RunFolder, outside: Path) -> None:
    instead(run.trajectories, bound)


@kind("the lock is a link", refused="lock: is a link, not a regular file")
def _(run: RunFolder, outside: Path) -> None:
    run.lock.unlink(missing_ok=True)
    run.lock.symlink_to(outside / "created")


@kind("a lease is a link", refused="lease-1-1: is a link, not a regular file")
def _(run: RunFolder, outside: Path) -> None:
    (run.root / "lease-1-1").symlink_to(outside / "secret")


@kind("versions lead outside", refused="versions: is not a folder, but a link or a file")
def _(run: RunFolder, outside: Path) -> None:
    run.versions.rename(outside / "versions")
    run.versions.symlink_to(outside / "versions")


@kind("versions lead in a circle", refused="versions: is not a folder, but a link or a file")
def _(run: RunFolder, outside: Path) -> None:
    shutil.rmtree(run.versions)
    run.versions.symlink_to("versions")


@kind("the tokens are of another user", refused="tokens.bin: belongs to another user")
def _(run: RunFolder, outside: Path) -> None:
    os.chown(run.tokens, 4_321, -1)


@kind("a file of a version leads outside")
def _(run: RunFolder, outside: Path) -> None:
    version(run, {"stolen": outside / "secret"}, link=True)


@kind("a folder of a version leads outside")
def _(run: RunFolder, outside: Path) -> None:
    folder = version(run, {"inner/secret": outside / "secret"})
    shutil.rmtree(folder / "inner")
    (folder / "inner").symlink_to(outside)


@kind("a log leads outside")
def _(run: RunFolder, outside: Path) -> None:
    run.logs.mkdir(exist_ok=True)
    (run.logs / "trainer.log").symlink_to(outside / "secret")


@kind("the record of a tracker leads outside")
def _(run: RunFolder, outside: Path) -> None:
    home = run.tracker("tensorboard")
    home.mkdir(parents=True)
    (home / f"events.out.tfevents.1767225600.{run.run_id}").symlink_to(outside / "secret")


@kind("the folder of a tracker leads outside")
def _(run: RunFolder, outside: Path) -> None:
    run.tracking.mkdir()
    run.tracker("tensorboard").symlink_to(outside)


# -- sizes and numbers ------------------------------------------------------------------------------------------------


@kind("a status of 20 GB")
def _(run: RunFolder, outside: Path) -> None:
    sparse(run.status)


@kind("a journal of 20 GB")
def _(run: RunFolder, outside: Path) -> None:
    sparse(run.journal)


@kind("tokens of 20 GB")
def _(run: RunFolder, outside: Path) -> None:
    sparse(run.tokens)


@kind("a configuration of 20 GB", refused="config.toml: has more than 1,048,576 bytes")
def _(run: RunFolder, outside: Path) -> None:
    sparse(run.config)


@kind("rows of 20 GB in one line")
def _(run: RunFolder, outside: Path) -> None:
    for path in (run.metrics, run.spans, run.timeline, run.trajectories):
        sparse(path)


@kind("a journal of one endless line")
def _(run: RunFolder, outside: Path) -> None:
    run.journal.write_bytes(b"A" * (32 << 20))


@kind("a damaged journal full of heads of frames")
def _(run: RunFolder, outside: Path) -> None:
    from dora.journal.frames import _HEAD, _LENGTH, crc32

    length = _LENGTH.pack(8 << 20)
    run.journal.write_bytes(run.journal.read_bytes()[:200] + _HEAD.pack(8 << 20, crc32(length), 1) * (1 << 20))


@kind("a group of 10^12 answers")
def _(run: RunFolder, outside: Path) -> None:
    alter(run, group_size=10**12)


@kind("no group, no rank, no step")
def _(run: RunFolder, outside: Path) -> None:
    alter(run, group_size=0, num_ranks=0, steps=0, updates=0, groups_per_step=0)


@kind("versions that begin at -10^15, admitted to steps of 10^15")
def _(run: RunFolder, outside: Path) -> None:
    world = full_run()
    far = VersionPublished(0.0, VersionId(-(10**15)), 1, {})
    order = AdmitGroup(0, VersionId(-(10**15)), 10**15)  # type: ignore[arg-type]
    run.journal.unlink()
    write(run, world.state.settings, [(far, [order]), *world.journal], with_tokens=False)


@kind("times that are no numbers")
def _(run: RunFolder, outside: Path) -> None:
    world = full_run()
    run.journal.unlink()
    times = [float("nan"), float("inf"), -1e308, 1e308]
    entries = [
        (msgspec.structs.replace(event, at=times[number % 7]) if number % 7 < 4 else event, commands)
        for number, (event, commands) in enumerate(world.journal)
    ]
    write(run, world.state.settings, entries, with_tokens=False)


@kind("a status with counts of 10^18 servers")
def _(run: RunFolder, outside: Path) -> None:
    saved = json.loads(run.status.read_bytes())
    for row in saved["snapshot"]["versions"]:
        row |= {"serving": 10**18, "loading": 10**18}
    saved["snapshot"] |= {"progress": 1e300, "uptime_s": 1e308, "eta_s": 1e308, "phase": "interrupted"}
    saved["snapshot"] |= {"max_staleness": 10**18, "num_steps": 10**18}
    run.status.write_text(json.dumps(saved))


@kind("rows with numbers that no float holds")
def _(run: RunFolder, outside: Path) -> None:
    huge = "1" + "0" * 400
    rows = [
        *(f'{{"kind":"step","at":{at},"step":{step},"loss":{loss}}}'
          for at, step, loss in ((1, 1, huge), (huge, 1, 1), (1, huge, 1), ("1e308", 10**30, "-1e308"))),
        f'{{"kind":"step","at":1,"step":1,"deep":{"[" * 100_000}{"]" * 100_000}}}',
        f'{{"kind":"step","at":1,"step":1,"deep":{deep(500)}}}',
    ]  # fmt: skip
    with run.metrics.open("a") as file:
        file.writelines(f"{row}\n" for row in rows)
    with run.spans.open("a") as file:
        file.write('["rank",0,1e308,1e308,"start",null]\n["rank",99999999999999999999,0,1,"start",null]\n')


@kind("a status nested a hundred thousand deep")
def _(run: RunFolder, outside: Path) -> None:
    run.status.write_bytes(b'{"at":' + b"[" * 100_000)


@kind("a journal nested a hundred thousand deep")
def _(run: RunFolder, outside: Path) -> None:
    run.journal.unlink()
    with JournalWriter(run.journal) as journal:
        journal.write(b"\x82\xa4type\xa6Header\xa6format" + b"\x91" * 100_000 + b"\x01")


@kind("manifests with names outside")
def _(run: RunFolder, outside: Path) -> None:
    for number, name in enumerate(("../../../outside/secret", str(outside / "secret"), "a/../../b", "", "\0")):
        folder = run.versions / f"v{number:06d}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        manifest = Manifest(VersionId(number), {name: checksum_of(outside / "secret")}, 6)
        (folder / MANIFEST).write_text(json.dumps(asdict(manifest)))


@kind("a tracker of its own")
def _(run: RunFolder, outside: Path) -> None:
    tracker = run.root / "tracker.py"
    tracker.write_text(f"open({str(outside / 'executed')!r}, 'w')\nclass Tracker: pass\n")
    config = Config().model_dump(mode="json")
    config["tracking"]["trackers"] = [f"{tracker}:Tracker"]
    run.config.write_text(dump(Config.model_validate_json(json.dumps(config), strict=True)))


def deep(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


def alter(run: RunFolder, **changes: int) -> None:
    """Give the header other settings."""
    world = full_run()
    run.journal.unlink()
    write(run, msgspec.structs.replace(world.state.settings, **changes), world.journal, with_tokens=False)


def version(run: RunFolder, names: dict[str, Path], *, link: bool = False) -> Path:
    """Version 9, newer than all others, with these files."""
    folder = run.versions / "v000009"
    folder.mkdir()
    for name, source in names.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(source) if link else shutil.copy(source, folder / name)
    size = sum(source.stat().st_size for source in names.values())
    manifest = Manifest(VersionId(9), {name: checksum_of(source) for name, source in names.items()}, size)
    (folder / MANIFEST).write_text(json.dumps(asdict(manifest)))
    return folder


# -- the commands -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working folder of all commands."""
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="module")
def forks(place: Path) -> Iterator[Forks]:
    with Forks(place) as process:
        yield process


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The folder of a finished run, which all commands accept."""
    run = RunFolder(unpack_demo(tmp_path_factory.mktemp("run")))
    run.journal.unlink()
    world: World = full_run()
    write(run, world.state.settings, world.journal)
    run.config.write_text(dump(Config()))
    run.spans.write_text('["rank",0,0.0,1.0,"start",null]\n')
    store = VersionStore(memory_root=run.versions, durable_root=run.versions)
    staged = store.stage(VersionId(1))
    (staged / "config.json").write_text("{}")
    (staged / "model.safetensors").write_bytes(b"weights")
    store.seal(VersionId(1), staged)
    return run


@pytest.fixture(scope="module")
def allowed(forks: Forks, place: Path) -> dict[str, Used]:
    """What each command uses for an empty folder."""
    (place / "empty").mkdir()
    return {name: execute(forks, command, place / "empty", place) for name, command in COMMANDS.items()}


def execute(forks: Forks, command: tuple[str, ...], folder: Path, place: Path) -> Used:
    for name in WRITTEN:
        shutil.rmtree(place / name, ignore_errors=True)
        (place / name).unlink(missing_ok=True)
    return forks.run(*(str(folder) if word == "DIR" else word for word in command))


def test_every_command_accepts_the_folder_that_is_not_hostile(
    forks: Forks, place: Path, original: RunFolder, tmp_path: Path
) -> None:
    run = RunFolder(shutil.copytree(original.root, tmp_path / "fine"))
    found = {name: execute(forks, command, run.root, place) for name, command in COMMANDS.items()}
    ended = {"resume": 2, "track as configured": 2}
    assert {name: used.code for name, used in found.items()} == {name: ended.get(name, 0) for name in COMMANDS}, found
    assert "is not signed with a key of yours" in found["resume"].err
    assert {name: status for name, (status, _) in found["view"].answers.items() if status != 200} == {}


@pytest.mark.parametrize("name", KINDS)
def test_a_hostile_folder_ends_every_command_with_one_line(
    name: str, forks: Forks, place: Path, original: RunFolder, allowed: dict[str, Used], tmp_path: Path
) -> None:
    make, refused = KINDS[name]
    if "another user" in name and os.geteuid() != 0:
        pytest.skip("needs root, to make a file of another user")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    run = RunFolder(shutil.copytree(original.root, tmp_path / "hostile"))
    make(run, outside)
    before = contents(outside)
    for label, command in COMMANDS.items():
        used = execute(forks, command, run.root, place)
        lines = used.err.splitlines()
        assert used.code in (0, 1, 2, 3), (label, used)
        assert len(lines) == (used.code in (1, 2)), (label, used)
        assert all(line.startswith("dora: ") for line in lines), (label, used)
        if refused:
            assert used.code == 2, (label, used)
            assert refused in used.err, (label, used)
        assert used.cpu_s <= allowed[label].cpu_s + EXTRA_CPU_S, (label, used.cpu_s)
        assert used.peak_bytes <= allowed[label].peak_bytes + EXTRA_BYTES, (label, used.peak_bytes >> 20)
        assert contents(outside) == before, label
        assert not any("secret" in read(path) for path in place.rglob("*") if path.is_file()), label
        for status, text in used.answers.values():
            assert status == 200 or (status == 503 and json.loads(text)["said"]), (label, used.answers)


def contents(folder: Path) -> dict[str, str]:
    return {str(path): read(path) if path.is_file() else "" for path in sorted(folder.rglob("*"))}


def read(path: Path) -> str:
    return path.read_bytes().decode(errors="replace")
