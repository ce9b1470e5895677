"""Only the owner of a run, or the members of one group, can read its files."""

from __future__ import annotations

import grp
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dora.errors import ConfigError
from dora.journal.access import adopt, require_group, restrict
from dora.journal.run_folder import RunFolder

#: A run that writes with a permissive umask, as ranks started in another terminal may.
WRITE = """
import os, sys
from pathlib import Path
from dora.journal.run_folder import RunFolder
os.umask(0)
folder = RunFolder.create(Path(sys.argv[1]), name="a", group=sys.argv[2] or None)
(folder.checkpoints / "step-1").mkdir()
folder.journal.touch()
print(folder.root)
"""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def another_group() -> str:
    """A group that this user may give files to, but that new files do not have by default."""
    numbers = {entry.gr_gid for entry in grp.getgrall()} if os.geteuid() == 0 else set(os.getgroups())
    names = [grp.getgrgid(number).gr_name for number in sorted(numbers - {os.getegid()})]
    if not names:
        pytest.skip("this user has one group only")
    return names[0]


def created(parent: Path, *, group: str) -> Path:
    argv = [sys.executable, "-c", WRITE, str(parent), group]
    return Path(subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout.strip())


def test_a_run_folder_is_closed_to_others_under_any_umask(tmp_path: Path) -> None:
    root = created(tmp_path, group="")
    assert [mode(path) & 0o777 for path in (root, root / "versions", root / "logs")] == [0o700] * 3


def test_a_group_can_read_a_run_folder_and_owns_files_created_in_it_later(tmp_path: Path) -> None:
    group = another_group()
    root = created(tmp_path, group=group)
    assert [mode(path) for path in (root, root / "versions")] == [0o2750] * 2
    assert {path.group() for path in (root, *root.rglob("*"))} == {group}


def test_a_folder_of_an_earlier_release_is_closed_when_its_run_is_resumed(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, name="a")
    for path in (folder.root, folder.versions):
        path.chmod(0o755)
    folder.restrict(group=None)
    assert (mode(folder.root), mode(folder.versions)) == (0o700, 0o700)


def test_an_adopted_folder_is_readable_by_the_readers_of_its_parent(tmp_path: Path) -> None:
    group = another_group()
    restrict(tmp_path, group=group)
    written = tmp_path / "aside"
    (written / "inner").mkdir(parents=True)
    for file in (written / "a", written / "inner" / "b"):
        file.touch(mode=0o600)
    written.chmod(0o700)
    adopt(written, like=tmp_path)
    assert [mode(path) & 0o777 for path in (written, written / "inner")] == [0o750, 0o750]
    assert [mode(path) for path in (written / "a", written / "inner" / "b")] == [0o640, 0o640]
    restrict(tmp_path, group=None)
    adopt(written, like=tmp_path)
    assert (mode(written), mode(written / "inner" / "b")) == (0o700, 0o600)


def test_a_group_that_does_not_exist_is_refused() -> None:
    require_group(None)
    with pytest.raises(ConfigError, match=r"^run\.group: no group no-such-group on this host; choose one"):
        require_group("no-such-group")
