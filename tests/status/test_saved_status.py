"""The status in a run folder, and `dora status` of a folder and of an address."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from dora import files
from dora.app import saved_status as saving
from dora.app.saved_status import SavedStatus, read_saved, read_status, saved_status
from dora.cli import status as command
from dora.errors import ConfigError
from dora.journal.run_folder import RunFolder
from dora.node.holder import Holder
from dora.observe.sentence import sentence
from dora.observe.snapshot import Snapshot
from dora.status.frame import frame
from dora.status.server import StatusServer
from tests.status.test_endpoint import Desk

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run folder without a status."""
    found = RunFolder(tmp_path / "dora-1")
    found.root.mkdir()
    found.config.touch()
    found.journal.touch()
    return found


def save(folder: RunFolder, snapshot: Snapshot, *, url: str = NOWHERE, age_s: float = 0.0) -> None:
    folder.status.write_bytes(msgspec.json.encode(SavedStatus(time.time() - age_s, url, snapshot)))


def ended(snapshot: Snapshot, phase: str) -> Snapshot:
    now = replace(snapshot, phase=phase, reason="all 8 steps are trained")
    return replace(now, sentence=sentence(now))


def served(snapshot: Snapshot) -> StatusServer:
    return StatusServer(lambda: snapshot, host="127.0.0.1", port=0, requests=Desk(), token="open sesame")


async def test_the_file_has_the_latest_status_while_a_run_goes_on_and_the_last_one_after_it(
    folder: RunFolder, middle: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "SAVE_EVERY_S", 0.0)
    taken: asyncio.Queue[Snapshot] = asyncio.Queue()
    states: Iterator[Snapshot] = iter([middle, replace(middle, steps_trained=5)])
    last = ended(middle, "finished")

    def take() -> Snapshot:
        now = next(states, last)
        taken.put_nowait(now)
        return now

    async with asyncio.timeout(10), saved_status(folder.status, take, url=NOWHERE):
        for _ in range(3):
            await taken.get()
        assert (await read_status(folder.root)).run_id == middle.run_id
    assert await read_status(folder.root) == last
    assert read_saved(folder.root).holder == Holder.of(os.getpid())
    assert [path.name for path in folder.root.glob("*status*")] == ["status.json"]


async def test_the_last_status_is_on_the_disk(folder: RunFolder, middle: Snapshot) -> None:
    done: list[files.Operation] = []
    with files.observed(done.append):
        async with asyncio.timeout(10), saved_status(folder.status, lambda: middle, url=NOWHERE):
            pass
    last = done[-4:]
    assert [operation.kind for operation in last] == ["write", "sync", "rename", "sync_folder"]
    assert [last[1].path, last[2].target, last[3].path] == [last[0].path, folder.status, folder.root]


def test_a_run_goes_on_if_its_status_cannot_be_written(tmp_path: Path, middle: Snapshot) -> None:
    path = tmp_path / "missing" / "status.json"

    async def go_on() -> str:
        async with saved_status(path, lambda: middle, url=NOWHERE):
            return "goes on"

    assert asyncio.run(go_on()) == "goes on"
    assert not path.exists()


@pytest.mark.parametrize("phase", ["finished", "interrupted", "failed"])
async def test_a_run_that_has_ended_is_shown_as_it_was_whenever_and_wherever(
    folder: RunFolder, middle: Snapshot, phase: str, tmp_path: Path
) -> None:
    save(folder, ended(middle, phase), age_s=1e6)
    copy = folder.root.rename(tmp_path / "a copy")
    assert await read_status(copy) == ended(middle, phase)


async def test_a_run_that_goes_on_is_asked_itself(folder: RunFolder, middle: Snapshot) -> None:
    now = replace(middle, steps_trained=5)
    async with served(now) as server:
        save(folder, middle, url=server.url)
        assert await read_status(folder.root) == now
    assert await read_status(folder.root) == middle, "it does not answer from here: what it wrote seconds ago"


async def test_another_run_at_the_same_address_is_not_shown(folder: RunFolder, middle: Snapshot) -> None:
    async with served(replace(middle, run_id="another")) as server:
        save(folder, middle, url=server.url)
        assert await read_status(folder.root) == middle


async def test_a_run_whose_status_is_old_was_interrupted(folder: RunFolder, middle: Snapshot) -> None:
    save(folder, middle, age_s=saving.FRESH_S + 1)
    now = await read_status(folder.root)
    assert now.phase == "interrupted"
    assert now.sentence == "Interrupted after 3 of 8 steps: the controller ended without notice."


@pytest.mark.parametrize("body", [b"", b"{}", b"\xff", b"[" * 10_000])
async def test_a_damaged_status_is_one_clear_error(folder: RunFolder, body: bytes) -> None:
    folder.status.write_bytes(body)
    with pytest.raises(ConfigError, match=r"status\.json: is not the status of a run: ") as raised:
        await read_status(folder.root)
    assert len(str(raised.value).splitlines()) == 1


async def test_a_folder_without_a_status_is_one_clear_error(folder: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no status\.json: did the run never start"):
        await read_status(folder.root)
    with pytest.raises(ConfigError, match="is not a run folder"):
        await read_status(tmp_path)


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_command_shows_a_finished_run(
    folder: RunFolder, middle: Snapshot, capsys: pytest.CaptureFixture[str]
) -> None:
    last = ended(middle, "finished")
    save(folder, last)
    command.status(str(folder.root), watch=False)
    assert capsys.readouterr().out.splitlines() == [line.text for line in frame(last, Console().width)]


def test_the_command_says_how_to_continue(
    folder: RunFolder, middle: Snapshot, capsys: pytest.CaptureFixture[str]
) -> None:
    save(folder, ended(middle, "interrupted"))
    command.status(str(folder.root), watch=False)
    assert capsys.readouterr().out.endswith(f"\nto continue it: dora run --resume {folder.root}\n")
    save(folder, ended(replace(middle, num_steps=0), "interrupted"))  # an evaluation
    command.status(str(folder.root), watch=False)
    assert capsys.readouterr().out.endswith(f"\nto continue it: dora eval --resume {folder.root}\n")


def test_a_watched_run_is_shown_until_it_has_ended(
    folder: RunFolder, middle: Snapshot, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "REFRESH_S", 0.0)
    save(folder, middle)
    states = iter([middle, middle, ended(middle, "finished")])

    async def read(folder: Path) -> Snapshot:
        return next(states)

    monkeypatch.setattr(command, "read_status", read)
    command.status(str(folder.root), watch=True)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[len(middle.scores) : -1]] == ["step 1/8", "step 2/8", "step 3/8"]
    assert lines[-1].startswith("Finished in ")


def test_a_watched_run_that_answers_no_more_is_said_to_have_ended(
    middle: Snapshot, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "REFRESH_S", 0.0)
    states = iter([middle])

    async def fetch(url: str) -> Snapshot:
        for now in states:
            return now
        raise ConfigError(f"{url}: no answer")

    monkeypatch.setattr(command, "fetch", fetch)
    command.status(NOWHERE, watch=True)
    assert f"dora: {NOWHERE} no longer answers: the run has ended, or cannot be reached" in capsys.readouterr().err


def test_what_is_neither_an_address_nor_a_folder_is_refused() -> None:
    for source in ("127.0.0.1:8421", "/nowhere", "ftp://a"):
        with pytest.raises(ConfigError, match=r"neither an address \(http://HOST:PORT\) nor a run folder"):
            command.status(source, watch=False)


def test_a_terminal_without_the_characters_of_a_curve_shows_the_rest(folder: RunFolder, middle: Snapshot) -> None:
    save(folder, ended(middle, "finished"))
    shown = subprocess.run(
        [sys.executable, "-m", "dora", "status", str(folder.root)],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("Finished in ")
    assert "0.250 ? 0.270" in shown.stdout
