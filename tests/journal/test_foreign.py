"""dora.foreign: what others placed is read only if it is a regular file of bounded size."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from dora import foreign
from dora.foreign import ForeignFileError


def _link(path: Path) -> None:
    (path.parent / "target").write_text("secret")
    path.symlink_to("target")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


@pytest.mark.parametrize(
    ("make", "kind"),
    [(_link, "a link"), (os.mkfifo, "a pipe"), (Path.mkdir, "a folder"), (_socket, "a socket")],
)
def test_what_is_not_a_regular_file_is_not_read(tmp_path: Path, make, kind: str) -> None:
    make(tmp_path / "file")
    with pytest.raises(ForeignFileError, match=f"file: is {kind}, not a regular file"):
        foreign.read(tmp_path / "file", max_bytes=100)


@pytest.mark.parametrize("target", ["/dev/zero", "/dev/tty"])
def test_a_link_to_a_device_is_refused_even_where_links_may_be_followed(tmp_path: Path, target: str) -> None:
    (tmp_path / "file").symlink_to(target)
    with pytest.raises(ForeignFileError, match="is a device"):
        foreign.read(tmp_path / "file", max_bytes=100, follow_links=True)


def test_a_link_to_a_file_is_followed_only_if_asked_for(tmp_path: Path) -> None:
    _link(tmp_path / "file")
    assert foreign.read(tmp_path / "file", max_bytes=100, follow_links=True) == b"secret"


def test_a_file_is_read_up_to_its_bound_and_not_beyond(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert foreign.read(tmp_path / "file", max_bytes=5) == b"12345"
    with pytest.raises(ForeignFileError, match="has more than 4 bytes"):
        foreign.read(tmp_path / "file", max_bytes=4)


def test_a_sparse_giant_is_refused_by_its_size(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ForeignFileError, match="has more than 1,000 bytes"):
        foreign.read(tmp_path / "file", max_bytes=1_000)


def test_a_file_that_claims_no_size_is_read_up_to_the_bound(tmp_path: Path) -> None:
    with pytest.raises(ForeignFileError, match="has more than 10 bytes"):
        foreign.read(Path("/proc/self/status"), max_bytes=10)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a file of another user")
def test_a_file_of_another_user_in_a_folder_of_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")
    os.chown(tmp_path / "file", 4_321, -1)
    with pytest.raises(ForeignFileError, match="belongs to another user"):
        foreign.read(tmp_path / "file", max_bytes=100)
    os.chown(tmp_path, 4_321, -1)
    assert foreign.read(tmp_path / "file", max_bytes=100) == b"1"


def test_a_missing_file_is_reported_as_the_system_does(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        foreign.read(tmp_path / "file", max_bytes=100)
