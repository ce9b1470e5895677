"""Checkpoints of hosts without shared storage: whole on both, or used on neither."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hosts import CHAIN, Fault, Hosts, load, save

from dora.errors import ConfigError
from dora.trainer.checkpoint import SavedFiles
from dora.weights.checkpoints import MANIFEST, keep_only, rank_file
from dora.weights.fence import StaleEpoch, raise_fence
from dora.weights.store import checksum_of

NAMES = [f"step-00000{step}-{CHAIN[:8]}" for step in range(10)]
#: File operations of a host that saves: begin, write, complete, rename.
OPERATIONS = 8


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    """Both have the checkpoints of steps 1 and 2."""
    made = Hosts(tmp_path)
    made.run(partial(save, step=1), partial(save, step=2))
    return made


def newest(hosts: Hosts, rank: int) -> Path:
    return hosts.folders[rank] / NAMES[2]


def test_a_folder_has_the_files_of_its_ranks_and_the_manifest_of_all(hosts: Hosts) -> None:
    saved = hosts.run(partial(save, step=3))
    for rank, one in enumerate(saved):
        assert isinstance(one, SavedFiles)
        assert one.folder == hosts.folders[rank] / NAMES[3]
        assert sorted(one.files) == [MANIFEST, f"rank-{rank}.safetensors"]
        assert {path.name: checksum_of(path) for path in one.folder.iterdir()} == one.files
        assert sum(path.stat().st_size for path in one.folder.iterdir()) == one.num_bytes
    manifests = [(one.folder / MANIFEST).read_bytes() for one in saved]
    assert manifests[0] == manifests[1]
    of_files = json.loads(manifests[0])["file_checksums"]
    assert of_files == [one.files[f"rank-{rank}.safetensors"] for rank, one in enumerate(saved)]


def test_ranks_that_share_a_folder_write_one_checkpoint(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, is_shared=True)
    first, second = hosts.run(partial(save, step=3))
    assert first == second
    assert sorted(first.files) == [MANIFEST, "rank-0.safetensors", "rank-1.safetensors"]
    assert {path.name: checksum_of(path) for path in first.folder.iterdir()} == first.files
    rank_file(first.folder, 1).unlink()
    assert [found[0] for found in hosts.run(partial(load, steps=[3]))] == [0, 0]
    assert hosts.visible() == [[], []]


def test_a_checkpoint_that_all_have_is_not_written_again(hosts: Hosts) -> None:
    before = [rank_file(newest(hosts, rank), rank).stat().st_ino for rank in range(2)]
    assert hosts.run(partial(save, step=2)) == hosts.run(partial(save, step=2))
    assert [rank_file(newest(hosts, rank), rank).stat().st_ino for rank in range(2)] == before


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("at", range(OPERATIONS))
def test_a_host_killed_at_any_point_leaves_a_checkpoint_that_all_use_or_none(hosts: Hosts, rank: int, at: int) -> None:
    """Even if the controller believed in it; and the next attempt completes it."""
    assert None in hosts.run(partial(save, step=3), fault=Fault(rank, at))
    found = hosts.run(partial(load, steps=[3, 2]))
    assert found[0][0] == found[1][0] != 0, "load compares the state"
    assert [step for step, _ in hosts.run(partial(save, step=3), partial(load, steps=[3, 2]))] == [3, 3]


def test_a_checkpoint_that_one_host_alone_has_renamed_is_not_used_and_then_completed(hosts: Hosts) -> None:
    """As if the other was killed before its rename."""
    hosts.run(partial(save, step=3))
    (hosts.folders[1] / NAMES[3]).rename(hosts.folders[1] / f".{NAMES[3]}")
    assert hosts.visible() == [NAMES[1:4], NAMES[1:3]]
    assert [step for step, _ in hosts.run(partial(load, steps=[3, 2]))] == [2, 2]
    assert None not in hosts.run(partial(save, step=3))
    assert hosts.visible() == [NAMES[1:4]] * 2


def test_no_more_points_are_left_out(hosts: Hosts) -> None:
    assert None not in hosts.run(partial(save, step=3), fault=Fault(0, OPERATIONS))
    assert None not in hosts.run(partial(save, step=4), fault=Fault(1, OPERATIONS))


@pytest.mark.parametrize("at", [0, 2])
def test_a_host_whose_disk_is_full_for_a_while_holds_up_the_other(hosts: Hosts, at: int) -> None:
    assert None not in hosts.run(partial(save, step=3), fault=Fault(1, at, "full"))
    assert [step for step, _ in hosts.run(partial(load, steps=[3]))] == [3, 3]


def truncate(folder: Path, rank: int) -> None:
    with rank_file(folder, rank).open("r+b") as file:
        file.truncate(40)


def flip_a_byte(folder: Path, rank: int) -> None:
    content = bytearray(rank_file(folder, rank).read_bytes())
    content[-1] ^= 1
    rank_file(folder, rank).write_bytes(content)


def lose_a_file(folder: Path, rank: int) -> None:
    rank_file(folder, rank).unlink()


def lose_the_manifest(folder: Path, rank: int) -> None:
    (folder / MANIFEST).unlink()


def lose_the_folder(folder: Path, rank: int) -> None:
    shutil.rmtree(folder)


def replace_by_the_older(folder: Path, rank: int) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name(NAMES[1]), folder)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "damage", [truncate, flip_a_byte, lose_a_file, lose_the_manifest, lose_the_folder, replace_by_the_older]
)
def test_a_checkpoint_that_one_host_has_lost_is_skipped_by_both(
    hosts: Hosts, damage: Callable[[Path, int], None], rank: int
) -> None:
    damage(newest(hosts, rank), rank)
    found = hosts.run(partial(load, steps=[2, 1]))
    assert [step for step, _ in found] == [1, 1]
    assert [len(skipped) for _, skipped in found] == [rank == 0, rank == 1], "the reason is that of the damaged host"
    assert hosts.visible()[rank] == NAMES[1:2]
    assert hosts.visible()[1 - rank] == NAMES[1:3], "a copy of the other host may complete it"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_with_the_checkpoint_of_another_run_is_not_believed_and_neither_is_the_other(
    hosts: Hosts, tmp_path: Path, rank: int
) -> None:
    """Both are whole and of the same name; on a GPU, two attempts at one step may differ like this too."""
    other = Hosts(tmp_path / "other")
    other.run(partial(save, step=2, run=1))
    shutil.rmtree(newest(hosts, rank))
    shutil.copytree(newest(other, rank), newest(hosts, rank))
    found = hosts.run(partial(load, steps=[2, 1]))
    assert [step for step, _ in found] == [1, 1]
    assert [skipped[0].endswith("is not the same checkpoint on all hosts") for _, skipped in found] == [True, True]
    assert hosts.visible() == [NAMES[1:2]] * 2


def test_both_with_the_checkpoint_of_another_history_under_this_name_do_not_believe_it(hosts: Hosts) -> None:
    hosts.run(partial(save, step=2, chain="f00d" + CHAIN, run=1))
    for rank in range(2):
        shutil.rmtree(newest(hosts, rank))
        (hosts.folders[rank] / "step-000002-f00d0a1b").rename(newest(hosts, rank))
    assert [step for step, _ in hosts.run(partial(load, steps=[2, 1]))] == [1, 1]


def test_a_checkpoint_of_fewer_ranks_is_refused_by_name(hosts: Hosts) -> None:
    path = newest(hosts, 0) / MANIFEST
    manifest = json.loads(path.read_bytes())
    one_rank = {name: value[:1] if isinstance(value, list) else value for name, value in manifest.items()}
    for rank in range(2):
        (newest(hosts, rank) / MANIFEST).write_text(json.dumps(one_rank | {"world_size": 1}))
    first, _ = hosts.run(partial(load, steps=[2, 1]))
    assert isinstance(first, ConfigError)
    assert "was written by 1 ranks, whose files are not all on this host; set trainer.ranks to that number" in str(
        first
    )


def test_a_host_that_follows_a_newer_controller_makes_nothing_visible_and_nobody_uses_the_rest(hosts: Hosts) -> None:
    raise_fence(hosts.folders[1] / "epoch", epoch=1)
    _, second = hosts.run(partial(save, step=3))
    assert isinstance(second, StaleEpoch)
    assert hosts.visible()[1] == NAMES[1:3]
    raise_fence(hosts.folders[1] / "epoch", epoch=0)
    assert [step for step, _ in hosts.run(partial(load, steps=[3, 2]))] == [2, 2]


def test_what_the_reports_name_restores_a_host_that_has_lost_its_disk(hosts: Hosts, tmp_path: Path) -> None:
    copy = tmp_path / "copy" / NAMES[3]
    copy.mkdir(parents=True)
    for saved in hosts.run(partial(save, step=3)):
        for name, checksum in saved.files.items():
            shutil.copy(saved.folder / name, copy / name)
            assert checksum_of(copy / name) == checksum
    shutil.rmtree(hosts.folders[1] / NAMES[3])
    shutil.copytree(copy, hosts.folders[1] / NAMES[3])
    assert hosts.run(partial(load, steps=[3, 2])) == [(3, ()), (3, ())]


def test_a_folder_is_cleared_of_all_checkpoints_but_those_that_are_named(tmp_path: Path) -> None:
    mine = [*NAMES[1:4], f".{NAMES[5]}", f".trash-{NAMES[1]}-ab", f".damaged-{NAMES[2]}-ab", f".aside-{NAMES[3]}-ab"]
    for name in (*mine, "data", ".cache"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / "epoch").touch()
    keep_only(tmp_path, NAMES[2:4])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*NAMES[2:4], "data", ".cache", "epoch"])
    keep_only(tmp_path / "absent", ())
