"""The real trackers, offline: each record is read back row for row and compared with metrics.jsonl."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dora import files
from dora.errors import ConfigError
from dora.journal.run_folder import RunFolder
from dora.trackers.api import Position
from dora.trackers.follow import follow, num_rows, read_position
from dora.trackers.kinds import require_installed, title, tracker_env
from tests.escapes import require_harmless
from tests.trackers import records

BAD = "tests/trackers/bad.py"


def rows(first: int, count: int) -> Iterator[dict[str, Any]]:
    """Steps, with an evaluation of two sets after every other one."""
    for step in range(first, first + count):
        trainer = {"loss": -0.1 * step, "all/entropy": 1.0 / (step + 1), "grad_norm": None if step % 3 else 0.3}
        yield {"kind": "step", "at": 1.5 * step, "step": step, "staleness": [step, 1], "alarms": [], "trainer": trainer}
        if step % 2:
            for name in ("heldout", "hard"):
                yield {"kind": "evaluation", "at": 1.5 * step, "version": step + 1, "name": name, "mean": 0.1 * step}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return records.make_folder(tmp_path / "runs", rows(0, 5))


def expect(folder: RunFolder) -> list[records.Logged]:
    found = records.expected(folder)
    assert len(found) == num_rows(folder)
    return found


# -- TensorBoard ------------------------------------------------------------------------------------------------------


def tensorboard_has_all(folder: RunFolder, name: str = "tensorboard") -> bool:
    wanted = expect(folder)
    return records.from_tensorboard(folder.tracker(title(name)), wanted) == records.in_float32(wanted)


def test_tensorboards_file_has_every_row_once_after_a_resume(folder: RunFolder) -> None:
    assert records.track(folder, "tensorboard") == num_rows(folder)
    assert tensorboard_has_all(folder)
    assert records.track(folder, "tensorboard") == num_rows(folder)  # nothing is left
    records.append(folder, rows(5, 4))
    records.track(folder, "tensorboard")
    assert tensorboard_has_all(folder)
    steps = [event.step for event in records.tensorboard_events(folder.tracker("tensorboard"))[2:]]
    assert sorted(set(steps)) == list(range(9))


def test_what_a_crash_left_behind_the_position_is_written_again(folder: RunFolder) -> None:
    records.track(folder, "tensorboard")
    [path] = folder.tracker("tensorboard").glob("events.*")
    with path.open("ab") as file:
        file.write(b"half of a row")
    records.append(folder, rows(5, 1))
    records.track(folder, "tensorboard")
    assert tensorboard_has_all(folder)


@pytest.mark.parametrize("lost", ["file", "position", "end of the file"])
def test_a_record_that_was_lost_is_written_from_the_beginning(folder: RunFolder, lost: str) -> None:
    records.track(folder, "tensorboard")
    home = folder.tracker("tensorboard")
    [path] = home.glob("events.*")
    if lost == "end of the file":
        files.truncate(path, 50)
    else:
        (path if lost == "file" else home / "position.json").unlink()
    records.track(folder, "tensorboard")
    assert tensorboard_has_all(folder)


def test_rows_are_logged_while_they_are_written_and_the_last_ones_after_the_end(folder: RunFolder) -> None:
    ended, result = threading.Event(), []
    thread = threading.Thread(
        target=lambda: result.append(follow(folder, "tensorboard", project="dora", ended=ended)), daemon=True
    )
    thread.start()
    while read_position(folder.tracker("tensorboard")).rows < num_rows(folder):
        assert thread.is_alive()
        ended.wait(0.01)
    records.append(folder, rows(5, 2))
    ended.set()
    thread.join(30)
    assert result == [num_rows(folder)]
    assert tensorboard_has_all(folder)


# -- the others -------------------------------------------------------------------------------------------------------


def test_wandbs_offline_files_have_every_row_once_after_a_crash_and_a_resume(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    home = folder.tracker("wandb")
    crashed = home / "wandb" / "offline-run-20260101_000000-x"
    crashed.mkdir(parents=True)
    records.track(folder, "wandb")
    assert not crashed.exists(), "its rows were logged again"
    assert records.from_wandb(home) == expect(folder)
    records.append(folder, rows(5, 2))
    records.track(folder, "wandb")
    assert records.from_wandb(home) == expect(folder)
    assert len(read_position(home).mark["offline"]) == 2


def test_trackios_database_has_every_row_once_after_a_crash_and_a_resume(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trackio import sqlite_storage

    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path / "trackio")
    records.track(folder, "trackio")
    (folder.tracker("trackio") / "position.json").unlink()  # killed before it could write it
    records.append(folder, rows(5, 2))
    records.track(folder, "trackio")
    found = [*records.from_trackio(tmp_path / "trackio" / "dora.db", folder.run_id)]
    assert found == [(value, scalars) for _, value, scalars in expect(folder)]


# -- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Raising", "FullDisk"])
def test_a_tracker_that_fails_says_so_in_one_line_and_is_completed_later(folder: RunFolder, name: str) -> None:
    command = [sys.executable, "-m", "dora", "track", str(folder.root), "--to", f"{BAD}:{name}"]
    told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert told.returncode == 1
    assert re.fullmatch(rf"dora: {BAD}:{name}: (ConnectionError|OSError): .+\n", told.stderr)
    assert read_position(folder.tracker(name)).rows < num_rows(folder)
    (folder.tracking / "healed").touch()
    records.track(folder, f"{BAD}:{name}")
    assert tensorboard_has_all(folder, name)


@pytest.mark.parametrize("words", [("track", "DIR", "--to", f"{BAD}:Hostile"), ("follow", "DIR", f"{BAD}:Hostile")])
def test_text_of_a_service_is_shown_harmlessly(folder: RunFolder, words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "dora", *(str(folder.root) if word == "DIR" else word for word in words)]
    told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (told.returncode, told.stdout, told.stderr.count("\n")) == (1, "", 1)
    require_harmless(told.stderr)


def test_a_damaged_position_is_the_beginning(tmp_path: Path) -> None:
    assert read_position(tmp_path) == Position()
    (tmp_path / "position.json").write_text(json.dumps({"rows": "many"}))
    assert read_position(tmp_path) == Position()


def test_a_class_that_is_missing_is_refused_by_name() -> None:
    require_installed(["wandb", "tensorboard", "trackio", f"{BAD}:Raising"])
    with pytest.raises(ConfigError, match=r"^tracking\.trackers: .*has no function 'Missing'"):
        require_installed([f"{BAD}:Missing"])


def test_a_package_that_is_missing_is_refused_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"^tracking\.trackers: wandb is not installed; run pip install"):
        require_installed(["wandb"])


def test_a_process_gets_only_the_variables_of_its_tracker() -> None:
    environ = {
        **{"PATH": "/bin", "HOME": "/root", "https_proxy": "http://p", "LC_ALL": "C", "DORA_TOKEN": "t"},
        **{"WANDB_API_KEY": "w", "HF_TOKEN": "h", "TRACKIO_DIR": "d", "AWS_SECRET_ACCESS_KEY": "a"},
    }
    common = {"PATH", "HOME", "https_proxy", "LC_ALL"}
    assert set(tracker_env("wandb", environ)) == common | {"WANDB_API_KEY"}
    assert set(tracker_env("trackio", environ)) == common | {"HF_TOKEN", "TRACKIO_DIR"}
    assert set(tracker_env("tensorboard", environ)) == common
    assert set(tracker_env("a:B", environ, passed=["AWS_SECRET_ACCESS_KEY"])) == common | {"AWS_SECRET_ACCESS_KEY"}
