"""The version store on real files: atomic, verified, first bytes win, nothing half-written is ever visible."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from dora import files
from dora.core.ids import VersionId
from dora.errors import RunFailed
from dora.files import Operation, observed
from dora.journal.access import restrict
from dora.weights import fence as fence_module
from dora.weights import store as weights_store
from dora.weights.fence import StaleEpoch, pass_fence, raise_fence, raise_fence_patiently
from dora.weights.store import (
    MANIFEST,
    OWNER,
    Manifest,
    StoreError,
    VersionLost,
    VersionStore,
    checksum_of_files,
    choose_memory_root,
    claim,
    sweep_orphans,
)
from tests.journal.test_access import another_group

FILES = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 64}
NUM_BYTES = sum(map(len, FILES.values()))


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    return VersionStore(memory_root=tmp_path / "memory", durable_root=tmp_path / "durable")


def publish(store: VersionStore, version: int, files: dict[str, bytes] = FILES) -> None:
    store.seal(version, fill(store.stage(version), files))


def fill(folder: Path, files: dict[str, bytes] = FILES) -> Path:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def visible(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_staged_version_is_invisible_until_it_is_sealed(store: VersionStore, tmp_path: Path) -> None:
    staged = fill(store.stage(3))
    assert store.live() == []
    with pytest.raises(StoreError, match=r"version 3 is complete neither in .*memory nor in .*durable"):
        store.folder(3)
    manifest = store.seal(3, staged)
    assert store.live() == [3]
    assert store.folder(3) == tmp_path / "memory" / "v000003"
    assert {name: (store.folder(3) / name).read_bytes() for name in FILES} == FILES
    assert (manifest.version, set(manifest.files), manifest.num_bytes) == (3, set(FILES), NUM_BYTES)
    assert store.manifest(3) == manifest
    assert visible(tmp_path / "memory") == ["v000003"]


def test_every_byte_of_a_version_is_on_the_disk_before_it_is_visible(store: VersionStore, tmp_path: Path) -> None:
    for make in (lambda: publish(store, 3), lambda: store.copy_durable(3)):
        done: list[files.Operation] = []
        with files.observed(done.append):
            make()
        renamed = next(i for i, operation in enumerate(done) if operation.kind == "rename")
        synced = {operation.path.name for operation in done[:renamed] if operation.kind == "sync"}
        assert synced == {*FILES, MANIFEST}
        assert (done[renamed - 1].kind, done[renamed - 1].path) == ("sync_folder", done[renamed].path)
        assert [(operation.kind, operation.path) for operation in done[renamed + 1 :]] == [
            ("sync_folder", done[renamed].path.parent)
        ]


def test_a_process_of_a_controller_that_was_replaced_makes_no_version_visible(tmp_path: Path) -> None:
    raise_fence(tmp_path / "epoch", epoch=1)
    fence = partial(pass_fence, tmp_path / "epoch", epoch=0)
    store = VersionStore(memory_root=tmp_path / "memory", durable_root=tmp_path / "durable", fence=fence)
    with pytest.raises(StaleEpoch, match=r"1\.0 have taken over the run"):
        publish(store, 3)
    assert store.live() == []
    raise_fence(tmp_path / "epoch", epoch=0)
    publish(store, 3)
    assert store.live() == [3]


def test_a_rank_that_was_replaced_makes_no_version_visible(tmp_path: Path) -> None:
    raise_fence(tmp_path / "epoch", epoch=3, incarnation=1)
    roots = {"memory_root": tmp_path / "memory", "durable_root": tmp_path / "durable"}
    replaced, present = (
        VersionStore(**roots, fence=partial(pass_fence, tmp_path / "epoch", epoch=3, incarnation=number))
        for number in range(2)
    )
    with pytest.raises(StaleEpoch, match=r"3\.1 have taken over the run; this process belongs to 3\.0"):
        publish(replaced, 3)
    assert replaced.live() == []
    publish(present, 3)
    assert replaced.live() == [3]


async def test_a_fence_that_cannot_be_raised_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(operation: Operation) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fence_module, "FULL_TIMEOUT_S", -1.0)
    for error in (errno.ENOSPC, errno.EIO):
        with observed(refuse), pytest.raises(RunFailed, match=rf"epoch: cannot be written \({os.strerror(error)}\)$"):
            await raise_fence_patiently(tmp_path / "epoch", epoch=1)


def test_what_dead_ranks_were_writing_is_deleted_but_not_what_others_write(store: VersionStore) -> None:
    dead, fetched = store.stage(3), store.stage_copy(Manifest(4, {"f": "0"}, 1))
    assert fetched is not None
    store.unstage()
    assert (dead.exists(), fetched.exists()) == (False, True)


def test_a_copy_that_does_not_match_its_checksums_is_deleted_and_named(store: VersionStore) -> None:
    publish(store, 3)
    store.copy_durable(3)
    assert store.damaged(3) == []
    path = store.folder(3) / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    assert store.damaged(3) == [str(path)]
    assert (store.live(), store.durable()) == ([], [3])


def test_a_version_published_twice_keeps_its_first_bytes(store: VersionStore, tmp_path: Path) -> None:
    publish(store, 1)
    first = store.manifest(1)
    again = store.seal(1, fill(store.stage(1), {"model.safetensors": b"replayed, and different"}))
    assert again == first
    assert (store.folder(1) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert visible(tmp_path / "memory") == ["v000001"]


def test_a_version_that_is_only_durable_keeps_its_first_bytes_too(store: VersionStore) -> None:
    publish(store, 1)
    first = store.manifest(1)
    store.copy_durable(1)
    store.release(1)
    assert store.seal(1, fill(store.stage(1), {"model.safetensors": b"other"})) == first
    assert store.live() == []


def test_equal_bytes_have_equal_checksums_and_different_bytes_different_ones(store: VersionStore) -> None:
    publish(store, 1)
    publish(store, 2)
    publish(store, 3, {**FILES, "config.json": b"{ }"})
    assert len({checksum_of_files(store.manifest(v).files) for v in (1, 2)}) == 1
    assert checksum_of_files(store.manifest(1).files) != checksum_of_files(store.manifest(3).files)


def test_the_durable_copy_serves_once_the_live_one_is_released(store: VersionStore, tmp_path: Path) -> None:
    publish(store, 0)
    store.copy_durable(0)
    store.copy_durable(0)
    assert store.folder(0) == tmp_path / "memory" / "v000000"
    store.release(0)
    store.release(0)
    assert (store.live(), store.durable()) == ([], [0])
    assert store.folder(0) == tmp_path / "durable" / "v000000"
    assert (store.folder(0) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    store.release_durable(0)
    store.release_durable(0)
    with pytest.raises(StoreError):
        store.manifest(0)
    assert visible(tmp_path / "memory") == visible(tmp_path / "durable") == []


def test_a_live_version_whose_bytes_changed_is_never_copied(store: VersionStore, tmp_path: Path) -> None:
    publish(store, 5)
    weights = store.folder(5) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[::-1])
    with pytest.raises(StoreError, match="version 5 is damaged"):
        store.copy_durable(5)
    assert visible(tmp_path / "durable") == []


@pytest.mark.parametrize("damage", ["truncated", "no manifest", "half a manifest", "file missing"])
def test_a_torn_folder_is_not_a_version_and_is_replaced_by_a_complete_one(
    store: VersionStore, tmp_path: Path, damage: str
) -> None:
    publish(store, 2)
    folder = store.folder(2)
    manifest = store.manifest(2)
    match damage:
        case "truncated":
            os.truncate(folder / "model.safetensors", 100)
        case "no manifest":
            (folder / MANIFEST).unlink()
        case "half a manifest":
            os.truncate(folder / MANIFEST, 40)
        case "file missing":
            (folder / "config.json").unlink()
    assert store.live() == []
    with pytest.raises(StoreError):
        store.folder(2)
    publish(store, 2)
    assert store.manifest(2) == manifest
    assert visible(tmp_path / "memory") == ["v000002"]


def test_sweep_removes_leftovers_and_torn_versions_and_nothing_else(store: VersionStore, tmp_path: Path) -> None:
    publish(store, 1)
    publish(store, 2)
    store.copy_durable(1)
    fill(store.stage(7))
    (store.folder(2) / MANIFEST).unlink()
    (tmp_path / "durable" / ".copy-v000002-x").mkdir()
    (tmp_path / "durable" / "notes").mkdir()
    (tmp_path / "memory" / ".owner").touch()
    store.sweep()
    assert visible(tmp_path / "memory") == [".owner", "v000001"]
    assert visible(tmp_path / "durable") == ["notes", "v000001"]


def test_copies_of_one_version_at_the_same_time_leave_one_complete_version(store: VersionStore, tmp_path: Path) -> None:
    publish(store, 1)
    with ThreadPoolExecutor(8) as threads:
        for copied in [threads.submit(store.copy_durable, 1) for _ in range(8)]:
            copied.result()
    assert store.durable() == [1]
    assert visible(tmp_path / "durable") == ["v000001"]


def test_a_copy_that_became_complete_at_the_last_moment_is_kept(
    store: VersionStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process makes it visible just after this one has looked, or just before it renames its own."""
    publish(store, 1)
    target, look = tmp_path / "durable" / "v000001", weights_store._read_manifest
    looks, inodes = 0, list[int]()

    def copy_once() -> None:
        if not inodes:
            inodes.append(0)
            store.copy_durable(1)
            inodes[0] = target.stat().st_ino

    def looked_at(path: Path) -> weights_store.Manifest | None:
        nonlocal looks
        found = look(path)
        looks += path == target and not inodes
        if looks == 2:  # the first look is whether there is anything to do
            copy_once()
        return found

    monkeypatch.setattr(weights_store, "_read_manifest", looked_at)
    with observed(lambda operation: copy_once() if operation.kind == "rename" else None):
        store.copy_durable(1)
    assert [target.stat().st_ino] == inodes
    assert visible(tmp_path / "durable") == ["v000001"]


def test_without_memory_the_live_copy_is_the_durable_one(tmp_path: Path) -> None:
    store = VersionStore(memory_root=tmp_path / "versions", durable_root=tmp_path / "versions")
    publish(store, 4)
    store.copy_durable(4)
    store.release(4)
    store.close()
    assert store.live() == store.durable() == [4]
    store.release_durable(4)
    assert store.live() == store.durable() == []


def test_a_full_disk_is_one_clear_line_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """A file-size limit stands in for the full disk: the copy of a 16 KiB file breaks off in the middle."""
    program = f"""
import errno, resource, signal
from pathlib import Path
from dora.weights.store import StoreError, VersionStore
store = VersionStore(memory_root=Path({str(tmp_path)!r}) / "memory", durable_root=Path({str(tmp_path)!r}) / "durable")
staged = store.stage(1)
(staged / "model.safetensors").write_bytes(bytes(16384))
store.seal(1, staged)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    store.copy_durable(1)
except StoreError as err:
    print(err)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(f"cannot copy version 1 to {tmp_path / 'durable'}: ")
    assert done.stdout.count("\n") == 1
    assert visible(tmp_path / "durable") == []
    assert visible(tmp_path / "memory") == ["v000001"]


def test_a_store_that_cannot_be_created_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot create the version store at .*file/memory"):
        VersionStore(memory_root=tmp_path / "file" / "memory", durable_root=tmp_path)


def test_the_memory_root_is_private_to_the_user_and_deleted_at_the_end(tmp_path: Path) -> None:
    root = choose_memory_root(tmp_path, run_id="r1", needed_bytes=1, fallback=tmp_path / "disk")
    assert root == tmp_path / "dora-r1"
    assert root.stat().st_mode & 0o777 == 0o700
    store = VersionStore(memory_root=root, durable_root=tmp_path / "disk")
    publish(store, 0)
    assert store.folder(0).stat().st_mode & 0o777 == 0o700
    assert (store.folder(0) / MANIFEST).stat().st_mode & 0o777 == 0o600
    store.close()
    assert visible(tmp_path) == ["disk"]


def test_with_a_group_its_members_read_live_and_durable_versions(tmp_path: Path) -> None:
    group = another_group()
    (tmp_path / "disk").mkdir()
    restrict(tmp_path / "disk", group=group)
    root = choose_memory_root(tmp_path, run_id="r1", needed_bytes=1, fallback=tmp_path / "disk", group=group)
    store = VersionStore(memory_root=root, durable_root=tmp_path / "disk")
    publish(store, 0)
    store.copy_durable(0)
    for folder in (store.folder(0), tmp_path / "disk" / "v000000"):
        for path in (folder, *folder.rglob("*")):
            assert (path.group(), path.stat().st_mode & 0o777) == (group, 0o750 if path.is_dir() else 0o640)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_a_version_is_as_readable_as_its_root_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    tmp_path.chmod(0o750)
    program = f"""
import os
from pathlib import Path
from dora.weights.store import VersionStore
os.umask({mask})
store = VersionStore(memory_root=Path({str(tmp_path)!r}), durable_root=Path({str(tmp_path)!r}))
staged = store.stage(1)
(staged / "model.safetensors").touch()
store.seal(1, staged)
"""
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)
    version = tmp_path / "v000001"
    assert [path.stat().st_mode & 0o777 for path in (version, version / MANIFEST)] == [0o750, 0o640]


@pytest.mark.parametrize("folder", ["", "absent"])
def test_without_space_the_fallback_is_used_and_nothing_is_left(tmp_path: Path, folder: str) -> None:
    disk = tmp_path / "disk"
    needed_bytes = 2**62 if folder == "" else 1
    assert choose_memory_root(tmp_path / folder, run_id="r1", needed_bytes=needed_bytes, fallback=disk) == disk
    assert visible(tmp_path) == []


def test_a_resumed_run_finds_its_memory_root_again(tmp_path: Path) -> None:
    root = choose_memory_root(tmp_path, run_id="r1", needed_bytes=1, fallback=tmp_path / "disk")
    publish(VersionStore(memory_root=root, durable_root=tmp_path / "disk"), 6)
    assert choose_memory_root(tmp_path, run_id="r1", needed_bytes=1, fallback=tmp_path / "disk") == root
    assert VersionStore(memory_root=root, durable_root=tmp_path / "disk").live() == [6]


def test_a_resumed_run_takes_up_what_is_only_in_memory_even_if_others_have_filled_that(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    root = choose_memory_root(tmp_path, run_id="r1", needed_bytes=1, fallback=disk)
    store = VersionStore(memory_root=root, durable_root=disk)
    publish(store, 6)
    assert choose_memory_root(tmp_path, run_id="r1", needed_bytes=2**62, fallback=disk) == root
    store.copy_durable(VersionId(6))
    assert choose_memory_root(tmp_path, run_id="r1", needed_bytes=2**62, fallback=disk) == disk


def test_memory_held_by_the_same_run_counts_as_free(tmp_path: Path) -> None:
    root = choose_memory_root(tmp_path, run_id="r1", needed_bytes=1, fallback=tmp_path / "disk")
    with (root / "sparse").open("wb") as held:
        held.truncate(2**40)
    needed_bytes = shutil.disk_usage(tmp_path).free + 2**39
    assert choose_memory_root(tmp_path, run_id="r1", needed_bytes=needed_bytes, fallback=tmp_path / "disk") == root


CLAIM_AND_WAIT = """
import sys
from pathlib import Path
from dora.weights.store import claim
lock = claim(Path(sys.argv[1]))
print("claimed", flush=True)
sys.stdin.read()
"""


def test_only_a_folder_whose_run_is_dead_is_swept(tmp_path: Path) -> None:
    for name in ("dora-alive", "dora-dead", "dora-unclaimed", "other"):
        (tmp_path / name).mkdir()
    processes = {}
    for name in ("dora-alive", "dora-dead"):
        command = [sys.executable, "-c", CLAIM_AND_WAIT, str(tmp_path / name)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
        processes[name] = process
    with pytest.raises(StoreError, match="dora-dead belongs to a run that is still alive"):
        claim(tmp_path / "dora-dead")
    processes["dora-dead"].kill()
    processes["dora-dead"].wait()
    assert sweep_orphans(tmp_path, run_id="mine") == [tmp_path / "dora-dead"]
    assert visible(tmp_path) == ["dora-alive", "dora-unclaimed", "other"]
    processes["dora-alive"].communicate("")
    with processes["dora-dead"]:
        assert sweep_orphans(tmp_path, run_id="mine") == [tmp_path / "dora-alive"]


def _link_to_zeros(owner: Path) -> None:
    owner.symlink_to("/dev/zero")


def _sparse_giant(owner: Path) -> None:
    with owner.open("wb") as file:
        file.truncate(1 << 40)


def _link_to_a_file(owner: Path) -> None:
    owner.symlink_to(owner.parent.parent / "other")


@pytest.mark.parametrize("make", [_link_to_zeros, _sparse_giant, os.mkfifo, _link_to_a_file, Path.mkdir])
def test_an_owner_file_that_is_none_is_not_read_and_its_folder_is_kept(tmp_path: Path, make) -> None:
    """Other users may put such files into shared memory: no start may hang, or take memory, because of them."""
    (tmp_path / "other").write_bytes(b"")
    (tmp_path / "dora-trap").mkdir()
    make(tmp_path / "dora-trap" / OWNER)
    assert sweep_orphans(tmp_path, run_id="mine") == []
    assert (tmp_path / "dora-trap").is_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a folder of another user")
@pytest.mark.parametrize("is_link", [False, True])
def test_a_folder_of_another_user_is_not_touched(tmp_path: Path, is_link: bool) -> None:
    folder = tmp_path / "theirs" if is_link else tmp_path / "dora-theirs"
    folder.mkdir()
    claim(folder).close()
    if is_link:
        (tmp_path / "dora-theirs").symlink_to(folder)
        os.chown(tmp_path / "dora-theirs", 4_321, -1, follow_symlinks=False)
    else:
        os.chown(folder, 4_321, -1)
    assert sweep_orphans(tmp_path, run_id="mine") == []
    fallback = tmp_path / "disk"
    assert choose_memory_root(tmp_path, run_id="theirs", needed_bytes=0, fallback=fallback) == fallback
    assert (folder / OWNER).is_file()


def test_a_version_is_complete_only_with_files_of_its_own(store: VersionStore, tmp_path: Path) -> None:
    """A link in place of a file, of the manifest or of the folder could lead to any file of the user."""
    for version in (1, 2, 3, 4):
        publish(store, version)
    outside = tmp_path / "outside"
    for number, name in ((1, "model.safetensors"), (2, MANIFEST)):
        inside = store.folder(number) / name
        inside.rename(outside.with_suffix(f".{number}"))
        inside.symlink_to(outside.with_suffix(f".{number}"))
    folder = store.folder(3)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert store.live() == [4]


def test_a_dead_run_can_be_claimed_again_by_its_resumption(tmp_path: Path) -> None:
    claim(tmp_path).close()
    with claim(tmp_path):
        assert visible(tmp_path) == [".owner"]


def test_the_manifest_on_disk_is_plain_json(store: VersionStore) -> None:
    publish(store, 9)
    on_disk = json.loads((store.folder(9) / MANIFEST).read_text())
    assert on_disk == {"version": 9, "files": store.manifest(9).files, "num_bytes": NUM_BYTES, "chain": ""}


def test_versions_that_did_not_fit_on_the_disk_outlive_the_run_and_every_sweep(tmp_path: Path) -> None:
    memory, disk = tmp_path / "dora-run", tmp_path / "disk"
    memory.mkdir()
    with claim(memory):
        store = VersionStore(memory_root=memory, durable_root=disk)
        for version in (3, 4):
            publish(store, version)
        store.copy_durable(3)
        assert store.stranded([3, 4, 5]) == [4]
        store.close(needed=[3, 4])
    assert sweep_orphans(tmp_path, run_id="mine") == []
    assert VersionStore(memory_root=memory, durable_root=disk).live() == [3, 4]


def test_a_version_that_disappears_while_it_is_copied_is_lost_and_not_merely_uncopied(
    store: VersionStore, tmp_path: Path
) -> None:
    publish(store, 3)
    memory = store.memory_root

    def delete(operation: Operation) -> None:
        if ".copy-" in str(operation) and memory.exists():
            memory.rename(tmp_path / "gone")

    with observed(delete), pytest.raises(VersionLost, match="version 3 is complete neither in"):
        store.copy_durable(3)
    assert not memory.exists()
    assert list((tmp_path / "durable").iterdir()) == []


def test_a_run_folder_that_is_deleted_while_a_version_is_copied_stays_deleted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    store = VersionStore(memory_root=tmp_path / "memory", durable_root=run / "versions")
    publish(store, 1)

    def delete(operation: Operation) -> None:
        if operation.kind == "wrote" and run.exists():  # the first file of the copy is there
            run.rename(tmp_path / "gone")

    with observed(delete), pytest.raises(StoreError, match="No such file or directory"):
        store.copy_durable(1)
    assert not run.exists()


def test_a_version_may_stay_in_memory_while_there_is_room_for_two_more(tmp_path: Path) -> None:
    store = VersionStore(memory_root=tmp_path / "memory", durable_root=tmp_path / "disk")
    publish(store, 3)
    assert store.has_room_beside(VersionId(3))
    folder = store.folder(VersionId(3))
    manifest = json.loads((folder / "manifest.json").read_text())
    largest = folder / next(iter(manifest["files"]))
    rest = manifest["num_bytes"] - largest.stat().st_size
    os.truncate(largest, shutil.disk_usage(tmp_path).free // 2 + 2**30)  # which takes no room
    manifest["num_bytes"] = rest + largest.stat().st_size
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert store.live() == [3]
    assert not store.has_room_beside(VersionId(3))
    assert not store.has_room_beside(VersionId(4)), "it is not there"


def test_a_version_that_a_killed_run_had_no_time_to_copy_waits_for_its_resume(tmp_path: Path) -> None:
    memory, disk = tmp_path / "dora-killed", tmp_path / "disk"
    memory.mkdir()
    with claim(memory, durable_root=disk):
        store = VersionStore(memory_root=memory, durable_root=disk)
        for version in (3, 4):
            publish(store, version)
        store.copy_durable(3)
    assert sweep_orphans(tmp_path, run_id="mine") == []
    store.copy_durable(4)
    assert sweep_orphans(tmp_path, run_id="mine") == [memory]


def test_an_uncopied_version_of_a_deleted_run_waits_for_nobody(tmp_path: Path) -> None:
    memory, disk = tmp_path / "dora-deleted", tmp_path / "disk"
    memory.mkdir()
    with claim(memory, durable_root=disk):
        publish(VersionStore(memory_root=memory, durable_root=disk), 3)
    disk.rmdir()
    assert sweep_orphans(tmp_path, run_id="mine") == [memory]


def test_an_orphan_that_is_still_written_to_is_left_to_the_next_start(tmp_path: Path) -> None:
    """By a rank that outlives its controller for a moment: no reason for another run to fail."""

    def refuse(operation: Operation) -> None:
        if operation.kind == "remove":
            raise OSError(errno.ENOTEMPTY, "Directory not empty")

    (tmp_path / "dora-dead").mkdir()
    claim(tmp_path / "dora-dead").close()
    with observed(refuse):
        assert sweep_orphans(tmp_path, run_id="mine") == []
    assert sweep_orphans(tmp_path, run_id="mine") == [tmp_path / "dora-dead"]


def test_the_live_root_is_deleted_if_the_disk_has_every_needed_version(tmp_path: Path) -> None:
    store = VersionStore(memory_root=tmp_path / "memory", durable_root=tmp_path / "disk")
    for version in (3, 4):
        publish(store, version)
    store.copy_durable(4)
    store.close(needed=[4])
    assert not (tmp_path / "memory").exists()
