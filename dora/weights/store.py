"""The version store: every live policy version as one complete Hugging Face folder, and its durable copy.

Invariant: a folder `v<version>` under a root is complete (all files and the manifest were there before the rename that
made it visible) and never changes; a folder that is being written or deleted has a name that starts with a dot. A
published version keeps its bytes: sealing it again returns the first manifest. Versions are published in the live root
or, while that is full, in the durable one.

The ranks fill a staged folder, and rank 0 seals it; the controller copies, releases and pushes; `dora export` reads.
The core decides which versions are needed (`ReleaseVersion`). All calls block, so an event loop runs them in a thread.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Final

import msgspec
import xxhash

from dora import files, foreign
from dora.core.ids import VersionId
from dora.errors import DoraError
from dora.journal.access import adopt, restrict

MANIFEST = "manifest.json"
OWNER = ".owner"
#: Folder inside a version that has its adapter alone, if one is trained; the weights beside it include it.
ADAPTER = "adapter"
#: Maximum size of a manifest: 100 bytes for each file; the largest models have some hundred files.
MAX_MANIFEST_BYTES: Final = 1 << 20
_MAX_PATH_BYTES: Final = 4_096


class StoreError(DoraError):
    """A version is missing or damaged, or its folder cannot be written; the message names the folder."""


class VersionLost(StoreError):
    """A version is complete in no root, so anything that needs it can never continue."""


class StoreFull(StoreError):
    """The file system of a root is full; another root, or a later attempt, may have space."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a version; written last, so that it tells a complete folder from a torn one."""

    version: VersionId
    files: Mapping[str, str]  # name relative to the folder -> `checksum_of` it
    num_bytes: int  # of all files together, without the manifest
    chain: str = ""  # lineage of the weights

    def encode(self) -> bytes:
        """Return the contents of its file."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    @property
    def stays_inside(self) -> bool:
        """Whether the names, which may come from elsewhere, lead to no file outside of the folder."""
        return all(map(is_inside, self.files))


class VersionStore:
    """Live versions under `memory_root`, durable ones under `durable_root`.

    The two may be the same folder (if memory is short). Then the live copy is also the durable one: `copy_durable` and
    `release` do nothing.
    """

    def __init__(self, *, memory_root: Path, durable_root: Path, fence: Callable[[], None] = lambda: None) -> None:
        """`fence` is called before a version is made visible; it raises if this process may not do that."""
        self.fence = fence
        self._memory = memory_root
        self._durable = durable_root
        for root in (memory_root, durable_root):
            with clear_errors(f"cannot create the version store at {root}"):
                root.mkdir(parents=True, exist_ok=True)
        self._is_shared = memory_root.samefile(durable_root)

    @property
    def memory_root(self) -> Path:
        """The folder of live versions."""
        return self._memory

    @property
    def roots(self) -> tuple[Path, ...]:
        """The folders in which a version may be published, in order of preference."""
        return (self._memory,) if self._is_shared else (self._memory, self._durable)

    def stage(self, version: VersionId, *, root: Path | None = None) -> Path:
        """Create an empty folder in `root` (default: the live one), to be filled and passed to `seal`."""
        root = root or self._memory
        with clear_errors(f"cannot stage version {version} in {root}"):
            return _temporary(root, "stage", version)

    def stage_delta(self, version: VersionId) -> Path:
        """Create an empty folder for a delta of `version`, which is never sealed."""
        with clear_errors(f"cannot stage a delta of version {version} in {self._memory}"):
            return _temporary(self._memory, "delta", version)

    def stage_copy(self, manifest: Manifest) -> Path | None:
        """Create an empty folder for a version that another store has, in the first root with space for it.

        None if the version is here already; StoreError if it has other files here.
        """
        version, what = manifest.version, f"cannot stage version {manifest.version}"
        folder, existing = self._find(version) or (None, None)
        if existing == manifest:
            return None
        if existing is not None:
            raise StoreError(f"{what}: {folder} has other files; release it")
        if not manifest.stays_inside:
            raise StoreError(f"{what}: its manifest names a file outside of its folder")
        with clear_errors(what):
            for root in self.roots:
                if shutil.disk_usage(root).free >= manifest.num_bytes:
                    return _temporary(root, "fetch", version)
        told = " and ".join(map(str, self.roots))
        raise StoreFull(f"{what}: it has {manifest.num_bytes:,} bytes, for which {told} has no space; free some")

    def seal(
        self,
        version: VersionId,
        staged: Path,
        *,
        chain: str = "",
        checksums: Mapping[str, str] | None = None,
        verified: Manifest | None = None,
    ) -> Manifest:
        """Make a staged folder visible as `version`, in the root in which it was staged.

        If `version` was published before, delete `staged` and keep the old folder. Return the manifest of the folder
        that is kept; a caller that replays steps compares it with its own. On any error `staged` is deleted.

        `checksums`: those that the caller has computed. `verified`: what the files have to be; the caller has computed
        their checksums as it wrote them, so that only names and sizes are compared.
        """
        if (existing := self._find(version)) is not None:
            shutil.rmtree(staged, ignore_errors=True)
            return existing[1]
        known = (verified.files if verified is not None else checksums) or {}
        with clear_errors(f"cannot seal version {version} in {staged.parent}", remove=staged):
            names = sorted(path.relative_to(staged).as_posix() for path in staged.rglob("*") if path.is_file())
            for name in names:
                files.wrote(staged / name)
            manifest = Manifest(
                version=version,
                files={name: known.get(name) or checksum_of(staged / name) for name in names},
                num_bytes=sum((staged / name).stat().st_size for name in names),
                chain=chain,
            )
            if verified not in (None, manifest):
                raise StoreError(f"the files in {staged} are not those of version {version}: it is not made visible")
            files.write_new(staged / MANIFEST, manifest.encode())
            _expose(staged, _folder(staged.parent, version), fence=self.fence)
        return manifest

    def folder(self, version: VersionId) -> Path:
        """Return the folder to load `version` from: the live copy, else the durable one."""
        return self._require(version)[0]

    def manifest(self, version: VersionId) -> Manifest:
        return self._require(version)[1]

    def copy_durable(self, version: VersionId) -> None:
        """Copy `version` to the durable root, verify the copy against the manifest, then make it visible.

        VersionLost if another process deletes it before or during the copy.
        """
        if _read_manifest(_folder(self._durable, version)) is not None:
            return
        source, manifest = self._require(version)
        try:
            self._copy(source, manifest)
        except StoreError:
            self._require(version)
            raise

    def _copy(self, source: Path, manifest: Manifest) -> None:
        version = manifest.version
        with clear_errors(f"cannot copy version {version} to {self._durable}"):
            copy = _temporary(self._durable, "copy", version)
        with clear_errors(f"cannot copy version {version} to {self._durable}", remove=copy):
            for name in (*manifest.files, MANIFEST):
                files.make_parents(copy, name)
                shutil.copyfile(source / name, copy / name)
                files.wrote(copy / name)
            for name, checksum in manifest.files.items():
                if checksum_of(copy / name) != checksum:
                    raise StoreError(f"{source / name} does not match its checksum: version {version} is damaged")
            _expose(copy, _folder(self._durable, version), fence=self.fence)

    def has_room_beside(self, version: VersionId) -> bool:
        """Whether the live root has room for two more versions of the size of this one."""
        found = self._find(version)
        return found is not None and shutil.disk_usage(self._memory).free >= 2 * found[1].num_bytes

    def release(self, version: VersionId) -> None:
        """Delete the live copy, if there is one."""
        if not self._is_shared:
            _delete(_folder(self._memory, version))

    def discard(self, version: VersionId) -> None:
        """Delete every copy."""
        for root in {self._memory, self._durable}:
            _delete(_folder(root, version))

    def release_durable(self, version: VersionId) -> None:
        """Delete the durable copy, if there is one."""
        _delete(_folder(self._durable, version))

    def live(self) -> list[VersionId]:
        """Return all complete versions with a live copy, ascending."""
        return _complete_versions(self._memory)

    def durable(self) -> list[VersionId]:
        """Return all complete versions with a durable copy, ascending."""
        return _complete_versions(self._durable)

    def sweep(self) -> None:
        """Delete the remains of interrupted writes, and sync names that a killed process had not synced.

        Only at the start of a run, before anything is staged.
        """
        for root in self.roots:
            files.sync_folder(root)  # later steps rely on the names found here
            for path in root.iterdir():
                is_temporary = path.name.startswith((".stage-", ".delta-", ".fetch-", ".copy-", ".trash-"))
                if path.is_dir() and (is_temporary or (_version_of(path) is not None and not _read_manifest(path))):
                    files.remove(path)

    def unstage(self) -> None:
        """Delete what ranks that have ended were writing."""
        for root in self.roots:
            for path in root.glob(".stage-*"):
                shutil.rmtree(path, ignore_errors=True)

    def set_aside(self, known: Mapping[VersionId, tuple[Mapping[str, str], str]]) -> list[str]:
        """Rename all versions that are not in `known` (version -> files and chain): the journal has lost their history.

        Return a description of each, with its new path.
        """
        found = []
        for root in self.roots:
            for version in _complete_versions(root):
                path = _folder(root, version)
                manifest = _read_manifest(path)
                if manifest is not None and (manifest.files, manifest.chain) == known.get(version):
                    continue
                aside = root / f".aside-{path.name}-{secrets.token_hex(4)}"
                files.rename(path, aside)
                files.sync_folder(root)
                found.append(f"version {version} ({aside})")
        return found

    def damaged(self, version: VersionId) -> list[str]:
        """Verify the checksums of every copy of `version`. Delete damaged copies; return a damaged file of each."""
        found = []
        for root in self.roots:
            path = _folder(root, version)
            manifest = _read_manifest(path)
            if manifest is None:
                continue
            if wrong := _differing(path, manifest):
                _delete(path)
                found.append(wrong)
        return found

    def differing(self, version: VersionId) -> str:
        """Verify the checksums of `version`; return a damaged file, or ""."""
        return _differing(*self._require(version))

    def stranded(self, versions: Iterable[VersionId]) -> list[VersionId]:
        """Return those of `versions` that only the live root holds, because the disk was full. Roots may be absent."""
        return sorted(set(versions) & _held(self._memory) - _held(self._durable))

    def close(self, *, needed: Iterable[VersionId] = ()) -> None:
        """At the end of a run, delete the live root and its contents, unless it is also the durable one.

        If only the live root holds a `needed` version, keep it, without its owner file, so that no other run sweeps it.
        """
        if self.stranded(needed):
            files.remove(self._memory / OWNER)
        elif not self._is_shared:
            with suppress(OSError):
                files.remove(self._memory)

    def _find(self, version: VersionId) -> tuple[Path, Manifest] | None:
        for root in (self._memory, self._durable):
            path = _folder(root, version)
            if (manifest := _read_manifest(path)) is not None:
                return path, manifest
        return None

    def _require(self, version: VersionId) -> tuple[Path, Manifest]:
        if (found := self._find(version)) is None:
            raise VersionLost(f"version {version} is complete neither in {self._memory} nor in {self._durable}")
        return found


def _differing(folder: Path, manifest: Manifest) -> str:
    """Return a file that does not match its checksum, or ""."""
    wrong = (name for name, checksum in manifest.files.items() if checksum_of(folder / name) != checksum)
    return next((str(folder / name) for name in wrong), "")


def checksum_of_files(files: Mapping[str, str]) -> str:
    """Return the checksum of a whole version: XXH3 over the sorted lines `<checksum>  <name>`."""
    lines = "".join(f"{checksum}  {name}\n" for name, checksum in sorted(files.items()))
    return xxhash.xxh3_128_hexdigest(lines.encode())


def checksum_of(path: Path, *, follow_links: bool = False) -> str:
    """Return XXH3 (128 bits, hex) of a file. It detects damage, at five times the speed of SHA-256."""
    with foreign.open_regular(path, follow_links=follow_links) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def is_inside(name: str) -> bool:
    """Return whether a name in a manifest stays inside the folder."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def choose_memory_root(
    folder: Path, *, run_id: str, needed_bytes: int, fallback: Path, group: str | None = None
) -> Path:
    """Return `folder`/dora-<run_id> if it has space for `needed_bytes`, else `fallback`, the durable root.

    The folder is accessible to this user and `group` only. `needed_bytes` covers all versions that may be live at once
    (K + 4). The files of an earlier start of this run count as free space; if they include a version that `fallback`
    lacks, the folder is used in any case. Shared memory of containers is often 64 MB, too small for most models.
    """
    root = folder / f"dora-{run_id}"
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        foreign.require_folder(root, owners={os.geteuid()})
        held_bytes = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
        if shutil.disk_usage(root).free + held_bytes >= needed_bytes or _held(root) - _held(fallback):
            restrict(root, group=group)
            return root
        if held_bytes == 0:
            root.rmdir()
    except (OSError, foreign.ForeignFileError):  # absent, read-only or of another user: use the disk instead
        pass
    return fallback


def claim(root: Path, *, durable_root: Path | None = None) -> IO[bytes]:
    """Lock `root` for this run. The lock lasts until the returned file is closed or the process ends.

    `.owner` is linked into place only after it is locked, so a folder whose `.owner` can be locked has no owner. It
    contains the path of `durable_root`, so that others can tell which versions only `root` holds.
    """
    held = _lock(root)
    held.truncate(0)
    held.write(os.fsencode(durable_root.resolve()) if durable_root is not None else b"")
    held.flush()
    return held


def _lock(root: Path) -> IO[bytes]:
    owner = root / OWNER
    with clear_errors(f"cannot claim {root}"):
        if not owner.exists():
            fresh = root / f"{OWNER}-{os.getpid()}"
            lock = fresh.open("wb")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.link(fresh, owner)
            fresh.unlink()
            return lock
        existing = owner.open("rb+")
    try:
        fcntl.flock(existing, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        existing.close()
        raise StoreError(f"{root} belongs to a run that is still alive; end that run first") from None
    return existing


def sweep_orphans(folder: Path, *, run_id: str) -> list[Path]:
    """Delete the `dora-*` folders in `folder` whose run was killed before it could close its store.

    Folders without an owner file, those of other users, and that of `run_id`, which is being resumed, are kept. So is a
    folder with a version that was not copied to the disk yet: on GPUs a resume may not recompute the same bytes.
    """
    orphans = []
    for root in sorted(set(folder.glob("dora-*")) - {folder / f"dora-{run_id}"}):
        try:
            foreign.require_folder(root, owners={os.geteuid()})
            with foreign.open_regular(root / OWNER) as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                durable_root = Path(os.fsdecode(foreign.read_open(owner, root / OWNER, max_bytes=_MAX_PATH_BYTES)))
                if durable_root.is_absolute() and durable_root.is_dir() and _held(root) - _held(durable_root):
                    continue
                files.remove(root)
        except (OSError, DoraError):  # locked, of another user, or still being written to: left for a later start
            continue
        orphans.append(root)
    return orphans


def _folder(root: Path, version: VersionId) -> Path:
    return root / f"v{version:06d}"


def _version_of(path: Path) -> VersionId | None:
    digits = path.name[1:]
    return VersionId(int(digits)) if path.name.startswith("v") and digits.isdecimal() else None


def _temporary(root: Path, purpose: str, version: VersionId) -> Path:
    return Path(tempfile.mkdtemp(prefix=f".{purpose}-v{version:06d}-", dir=root))


def _complete_versions(root: Path) -> list[VersionId]:
    with clear_errors(f"cannot list the versions in {root}"):
        return sorted(
            version
            for path in root.iterdir()
            if (version := _version_of(path)) is not None and _read_manifest(path) is not None
        )


def _held(root: Path) -> set[VersionId]:
    return set(_complete_versions(root)) if root.is_dir() else set()


def _read_manifest(path: Path) -> Manifest | None:
    """Return the manifest of a complete folder; None if it is absent or torn. Only sizes are checked, not bytes."""
    try:
        if path.is_symlink():
            return None
        manifest = msgspec.json.decode(foreign.read(path / MANIFEST, max_bytes=MAX_MANIFEST_BYTES), type=Manifest)
        num_bytes = sum(foreign.size_of(path / name) for name in manifest.files)
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError, foreign.ForeignFileError):
        return None
    is_complete = num_bytes == manifest.num_bytes and manifest.version == _version_of(path)
    return manifest if is_complete and manifest.stays_inside else None


def _expose(written: Path, target: Path, *, fence: Callable[[], None]) -> None:
    """Sync everything under `written`, give it the permissions of the root, and rename it to `target` atomically.

    A torn `target` is replaced. A complete one is kept (the version was copied twice concurrently), and `written` is
    deleted. It is the rename that finds one: another process may make it visible at any moment before.
    """
    adopt(written, like=target.parent)
    for path in written.rglob("*"):
        files.sync_folder(path) if path.is_dir() else files.sync(path)
    files.sync_folder(written)
    fence()
    while written.exists():
        try:
            files.rename(written, target)
        except OSError as err:
            if err.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if _read_manifest(target) is not None:
                files.remove(written)
            else:
                _delete(target)
    files.sync_folder(target.parent)


def _delete(path: Path) -> None:
    """Delete a folder. It is renamed first, so that a half-deleted one is never read; `sweep` deletes any remains."""
    trash = path.with_name(f".trash-{path.name}-{secrets.token_hex(4)}")
    try:
        files.rename(path, trash)
    except FileNotFoundError:
        return
    with suppress(OSError):
        files.sync_folder(path.parent)  # else a power failure could restore the name but not all files
        files.remove(trash)


@contextmanager
def clear_errors(what: str, *, remove: Path | None = None) -> Iterator[None]:
    """Turn an OSError into a StoreError of one line; delete `remove` on any error."""
    try:
        yield
    except (OSError, StoreError) as err:
        if remove is not None:
            shutil.rmtree(remove, ignore_errors=True)
        if isinstance(err, StoreError):
            raise
        if files.is_full(err):
            raise StoreFull(f"{what}: the file system is full") from err
        raise StoreError(f"{what}: {err}") from err
