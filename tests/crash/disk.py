"""The possible contents of a disk after a crash, from the recorded operations of a run.

A `Tree` has, for every file and folder, what processes see and what is certainly on the disk. `kill` keeps what
processes see, because the operating system survives. `power` keeps what was synced and a seeded choice of all else:
unsynced bytes are lost, cut anywhere or damaged, and each folder keeps any prefix of the changes to its names since it
was synced. Invariant: a tree after `kill` still knows what is not synced, so that a power failure may follow.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dora.files import Operation

Kind = Literal["kill", "power"]
MEMORY = "memory"  #: folder of the world that a power failure empties


@dataclass(slots=True)
class File:
    """`data` is what processes read, `synced` what is certainly on the disk."""

    data: bytes = b""
    synced: bytes = b""

    def copy(self) -> File:
        return File(self.data, self.synced)


@dataclass(slots=True)
class Folder:
    """`entries` is what processes see, `durable` what is certainly on the disk; `changes` lead from this to that."""

    entries: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)

    def change(self, change: Change) -> None:
        change.apply(self.entries)
        self.changes.append(change)

    def sync(self) -> None:
        self.durable = dict(self.entries)
        self.changes.clear()


Node = File | Folder


@dataclass(slots=True)
class Change:
    """An entry made, renamed or removed."""

    name: str
    node: Node | None = None  # made
    renamed_to: str = ""

    def apply(self, entries: dict[str, Node]) -> None:
        if self.node is not None:
            entries[self.name] = self.node
        elif self.renamed_to:
            entries[self.renamed_to] = entries.pop(self.name)
        else:
            entries.pop(self.name, None)


@dataclass(frozen=True, slots=True)
class Step:
    """An operation by path relative to the world, with the bytes that it writes."""

    kind: str
    path: tuple[str, ...]
    data: bytes = b""
    target: str = ""
    size: int = 0
    at: float = 0.0  # seconds of virtual time since the life began

    def __str__(self) -> str:
        return f"{self.kind} {'/'.join(self.path)} {len(self.data) or ''}"


class Tree:
    """All files of a world."""

    def __init__(self) -> None:
        self.root = Folder()

    def copy(self) -> Tree:
        """An independent copy; a node with several names keeps them."""
        made: dict[int, Node] = {}

        def copy(node: Node) -> Node:
            if id(node) in made:
                return made[id(node)]
            if isinstance(node, File):
                made[id(node)] = node.copy()
                return made[id(node)]
            folder = made[id(node)] = Folder()
            folder.entries = {name: copy(child) for name, child in node.entries.items()}
            folder.durable = {name: copy(child) for name, child in node.durable.items()}
            folder.changes = [
                Change(c.name, copy(c.node) if c.node is not None else None, c.renamed_to) for c in node.changes
            ]
            return folder

        tree = Tree()
        root = copy(self.root)
        assert isinstance(root, Folder)
        tree.root = root
        return tree

    # -- what processes do --------------------------------------------------------------------------------------------

    def apply(self, step: Step) -> None:
        """Carry out one operation."""
        match step.kind:
            case "append":
                file = self.file(step.path)
                file.data += step.data
            case "write" | "wrote":
                self.file(step.path).data = step.data
            case "sync":
                file = self.file(step.path)
                file.synced = file.data
            case "truncate":
                file = self.file(step.path)
                file.data = file.data[: step.size]
            case "make_folder":
                self.folder(step.path)
            case "sync_folder":
                self.folder(step.path).sync()
            case "rename":
                parent = self.folder(step.path[:-1])
                if step.path[-1] in parent.entries:
                    parent.change(Change(step.path[-1], renamed_to=step.target))
            case "remove":
                self._remove(step.path)

    def _remove(self, path: tuple[str, ...]) -> None:
        parent = self.folder(path[:-1])
        node = parent.entries.get(path[-1])
        if isinstance(node, Folder):
            for name in list(node.entries):
                self._remove((*path, name))
        if node is not None:
            parent.change(Change(path[-1]))

    def tear(self, step: Step, *, rng: random.Random) -> None:
        """Carry out a part of an operation, which the crash has interrupted."""
        if step.kind in ("append", "write", "wrote"):
            cut = rng.randrange(len(step.data) + 1)
            self.apply(Step(step.kind, step.path, step.data[:cut]))
        elif step.kind == "remove":
            node = self.get(step.path)
            if isinstance(node, Folder):
                names = list(node.entries)
                rng.shuffle(names)
                for name in names[: rng.randrange(len(names) + 1)]:
                    self._remove((*step.path, name))

    def get(self, path: tuple[str, ...]) -> Node | None:
        node: Node | None = self.root
        for name in path:
            if not isinstance(node, Folder):
                return None
            node = node.entries.get(name)
        return node

    def folder(self, path: tuple[str, ...]) -> Folder:
        """The folder at `path`, created if necessary."""
        folder = self.root
        for name in path:
            if not isinstance(folder.entries.get(name), Folder):
                folder.change(Change(name, Folder()))
            child = folder.entries[name]
            assert isinstance(child, Folder)
            folder = child
        return folder

    def file(self, path: tuple[str, ...]) -> File:
        """The file at `path`, created if necessary."""
        parent = self.folder(path[:-1])
        if not isinstance(parent.entries.get(path[-1]), File):
            parent.change(Change(path[-1], File()))
        file = parent.entries[path[-1]]
        assert isinstance(file, File)
        return file

    # -- crashes ------------------------------------------------------------------------------------------------------

    def lose_power(self, rng: random.Random) -> None:
        """Keep what was synced, and a random part of all else."""
        self.root.entries.pop(MEMORY, None)
        self.root.sync()
        seen: set[int] = set()

        def settle(folder: Folder) -> None:
            entries = dict(folder.durable)
            for change in folder.changes[: rng.randrange(len(folder.changes) + 1)]:
                change.apply(entries)
            folder.entries = entries
            folder.sync()
            for node in entries.values():
                if isinstance(node, Folder):
                    settle(node)
                elif id(node) not in seen:
                    seen.add(id(node))
                    node.data = node.synced = _survives(node, rng)

        settle(self.root)

    def sync_all(self) -> None:
        """Mark everything as synced, as it is before a recording."""

        def sync(folder: Folder) -> None:
            folder.sync()
            for node in folder.entries.values():
                if isinstance(node, Folder):
                    sync(node)
                else:
                    node.synced = node.data

        sync(self.root)

    # -- real files ---------------------------------------------------------------------------------------------------

    def files(self) -> Iterator[tuple[Path, bytes | None]]:
        """Every file with its bytes and every folder with None, parents first."""

        def walk(folder: Folder, path: Path) -> Iterator[tuple[Path, bytes | None]]:
            for name, node in folder.entries.items():
                if isinstance(node, File):
                    yield path / name, node.data
                else:
                    yield path / name, None
                    yield from walk(node, path / name)

        return walk(self.root, Path())

    def lay_out(self, world: Path) -> None:
        """Write these files, and no others, under `world`."""
        for name in ("runs", MEMORY):
            shutil.rmtree(world / name, ignore_errors=True)
            (world / name).mkdir()
        for path, data in self.files():
            if data is None:
                (world / path).mkdir(exist_ok=True)
            else:
                (world / path).write_bytes(data)
        for root in (world / MEMORY).iterdir():
            (root / ".owner").touch()  # of the dead process


def _survives(file: File, rng: random.Random) -> bytes:
    """Contents that a file may have after a power failure."""
    data, synced = file.data, file.synced
    if data == synced or rng.random() < 0.2:
        return data
    if not data.startswith(synced):
        return synced  # rewritten or truncated: either contents
    tail = data[len(synced) :]
    match rng.randrange(4):
        case 0:
            return synced
        case 1:
            return synced + tail[: rng.randrange(len(tail) + 1)]
        case 2:  # the length is on the disk, a part of the bytes is not
            start = rng.randrange(len(tail))
            end = rng.randrange(start, len(tail)) + 1
            return synced + tail[:start] + bytes(end - start) + tail[end:]
        case _:
            return synced + rng.randbytes(len(tail))


class Disk:
    """Records what a process does in a world."""

    def __init__(self, world: Path, start: Tree) -> None:
        self.world = world
        self.start = start  #: before the first step; not to be changed
        self.tree = start.copy()
        self.steps: list[Step] = []
        self._prefix = f"{world}/"
        self.clock: Callable[[], float] = lambda: 0.0
        self.before: Callable[[Step], None] = lambda step: None  #: called with each step, before it is carried out

    def observe(self, operation: Operation) -> None:
        """For `dora.files.observed`."""
        path = str(operation.path)
        if not path.startswith(self._prefix):
            return
        data = operation.path.read_bytes() if operation.kind == "wrote" else bytes(operation.data)
        step = Step(
            operation.kind,
            tuple(path[len(self._prefix) :].split("/")),
            data,
            operation.target.name if operation.target is not None else "",
            operation.size,
            self.clock(),
        )
        before, self.before = self.before, lambda step: None  # it may do steps of its own
        try:
            before(step)
        finally:
            self.before = before
        self.steps.append(step)
        self.tree.apply(step)

    def synced_bytes(self, path: Path) -> int:
        """The number of bytes of a file that are certainly on the disk."""
        node = self.tree.get(path.relative_to(self.world).parts)
        return len(node.synced) if isinstance(node, File) else 0


def crashed(disk: Disk, *, point: int, kind: Kind, rng: random.Random) -> Tree:
    """The world after a crash before step `point`, or in the middle of it."""
    tree = disk.start.copy()
    for step in disk.steps[:point]:
        tree.apply(step)
    if point < len(disk.steps) and rng.random() < 0.5:
        tree.tear(disk.steps[point], rng=rng)
    if kind == "power":
        tree.lose_power(rng)
    return tree
