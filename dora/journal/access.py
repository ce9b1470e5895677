"""File permissions of a run: read and write for the owner, read for the members of `run.group`, none for others.

Invariant: this holds for the files of every process of the run, whatever its umask, because others cannot enter the
top-level folders (`restrict`). The umask, which child processes inherit, sets the permissions inside them.
"""

from __future__ import annotations

import grp
import os
import shutil
import stat
from pathlib import Path

from dora.errors import ConfigError


def require_group(group: str | None) -> None:
    """Raise ConfigError if this user cannot assign files to `group`."""
    if group is None:
        return
    try:
        number = grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(f"run.group: no group {group} on this host; choose one that you belong to") from None
    if os.geteuid() != 0 and number not in (os.getegid(), *os.getgroups()):
        raise ConfigError(f"run.group: you are not a member of {group}; choose a group that you belong to")


def set_umask(group: str | None) -> None:
    """Set the umask of this process and of its future child processes."""
    os.umask(0o077 if group is None else 0o027)


def restrict(folder: Path, *, group: str | None) -> None:
    """Deny access to `folder` to all but its owner and `group`; files created in it later get the same group."""
    if group is not None:
        shutil.chown(folder, group=group)
    folder.chmod(0o700 if group is None else 0o2750)


def adopt(written: Path, *, like: Path) -> None:
    """Make `written`, a folder inside `like`, readable for all users that can read `like`."""
    mode = stat.S_IMODE(like.stat().st_mode) & 0o755
    for path in (*written.rglob("*"), written):
        path.chmod(mode if path.is_dir() else mode & 0o644)
