"""A run folder is created once, under its own id, and only a run folder is opened."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dora.errors import ConfigError
from dora.journal.frames import FrameWriter
from dora.journal.run_folder import RunFolder


def begin(path: Path) -> None:
    with FrameWriter(path) as journal:
        journal.write(b"a header")


def test_a_run_id_is_the_name_the_time_and_random_digits_and_names_the_folder(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "runs", name="my.run-1")
    assert re.fullmatch(r"my\.run-1-\d{8}-\d{6}-[0-9a-f]{4}", folder.run_id)
    assert folder.root == tmp_path / "runs" / folder.run_id
    assert all(path.is_dir() for path in (folder.checkpoints, folder.versions, folder.rollouts, folder.logs))


def test_runs_of_one_second_get_different_ids(tmp_path: Path) -> None:
    folders = [RunFolder.create(tmp_path, name="a") for _ in range(20)]
    assert len({folder.run_id for folder in folders}) == 20


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b", "ä"])
def test_a_name_that_cannot_be_part_of_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name"):
        RunFolder.create(tmp_path, name=name)
    assert list(tmp_path.iterdir()) == []


def test_a_parent_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(ConfigError, match=r"run\.folder: cannot create .*runs"):
        RunFolder.create(tmp_path / "runs", name="a")


def test_a_folder_that_is_not_a_run_folder_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such run folder"):
        RunFolder.open(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"has no config\.toml and no journal\.msgpack"):
        RunFolder.open(tmp_path)
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(ConfigError, match=r"has no journal\.msgpack"):
        RunFolder.open(tmp_path)
    with pytest.raises(ConfigError, match="is a file"):
        RunFolder.open(tmp_path / "config.toml")


def test_an_earlier_run_is_opened_under_the_same_id(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, name="a")
    folder.config.write_text("")
    folder.journal.write_bytes(b"")
    assert RunFolder.open(folder.root).run_id == folder.run_id


def test_the_newest_run_of_a_name_is_the_last_that_has_begun_a_journal(tmp_path: Path) -> None:
    assert RunFolder.newest(tmp_path, name="a") is None
    ids = ["a-20260101-000000-ffff", "a-20260102-000000-0000", "a-20260103-000000-0000", "a-b-20260104-000000-0000"]
    for run_id in ids:
        (tmp_path / run_id).mkdir()
    for run_id in (ids[0], ids[1], ids[3]):
        begin(RunFolder(tmp_path / run_id).journal)
    newest = RunFolder.newest(tmp_path, name="a")
    assert newest is not None
    assert newest.name == ids[1]


def test_a_start_that_ended_before_its_first_frame_was_whole_is_not_the_newest_run(tmp_path: Path) -> None:
    earlier, later = (tmp_path / f"a-2026010{day}-000000-0000" for day in (1, 2))
    for path in (earlier, later):
        path.mkdir()
        begin(RunFolder(path).journal)
    journal = RunFolder(later).journal
    whole = journal.read_bytes()
    for size in range(len(whole)):
        journal.write_bytes(whole[:size])
        assert RunFolder.newest(tmp_path, name="a") == earlier
    journal.write_bytes(whole + whole[:-1])
    assert RunFolder.newest(tmp_path, name="a") == later


def test_a_reserved_folder_is_filled_once_under_its_own_id(tmp_path: Path) -> None:
    made = RunFolder.reserve(tmp_path / "runs", name="a")
    made.config.write_text("")
    made.output.write_text("")
    found = RunFolder.reserved(made.root)
    found.fill(group=None)
    assert (found.run_id, found.logs.is_dir()) == (made.run_id, True)
    with pytest.raises(ConfigError, match=r"is not a reserved run folder: it has a checkpoints"):
        RunFolder.reserved(made.root)
    with pytest.raises(ConfigError, match="File exists"):
        made.fill(group=None)


def test_a_folder_with_files_of_others_or_another_name_is_not_reserved(tmp_path: Path) -> None:
    made = RunFolder.reserve(tmp_path, name="a")
    (tmp_path / "mine").mkdir()
    (tmp_path / "a-20260101-000000-ffff").symlink_to(made.root)
    with pytest.raises(ConfigError, match="its name is not the id of a run"):
        RunFolder.reserved(tmp_path / "mine")
    with pytest.raises(ConfigError, match="is not a folder, but a link or a file"):
        RunFolder.reserved(tmp_path / "a-20260101-000000-ffff")
    with pytest.raises(ConfigError, match=r"is not a reserved run folder \(No such file"):
        RunFolder.reserved(tmp_path / "a-20260101-000000-0000")
    made.output.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is a link, not a regular file"):
        RunFolder.reserved(made.root)
