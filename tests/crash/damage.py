"""Damage that no crash causes: flipped bytes, and deleted or truncated files."""

from __future__ import annotations

import random

from tests.crash.disk import File, Folder, Tree

#: What to damage -> the part of the path that identifies it.
TARGETS = {
    "journal": "journal.msgpack",
    "tokens": "tokens.bin",
    "version": "/v0",
    "checkpoint": "/step-",
    "metrics": "metrics.jsonl",
    "fence": "/epoch",
}


def damage(tree: Tree, target: str, *, rng: random.Random) -> tuple[str, str]:
    """Damage one file; return a description and the name of the file's folder, or "" if there is none."""
    paths = [path for path, data in tree.files() if data and TARGETS[target] in f"/{path}"]
    if not paths:
        return "", ""
    path = rng.choice(sorted(paths))
    parent, file = tree.get(path.parts[:-1]), tree.get(path.parts)
    assert isinstance(parent, Folder)
    assert isinstance(file, File)
    kind = rng.choice(("flip", "delete", "cut", "empty"))
    if kind == "delete":
        del parent.entries[path.name]
    elif kind == "flip":
        at = rng.randrange(len(file.data))
        file.data = file.data[:at] + bytes([file.data[at] ^ 1 << rng.randrange(8)]) + file.data[at + 1 :]
    else:
        file.data = file.data[: rng.randrange(len(file.data)) if kind == "cut" else 0]
    tree.sync_all()
    return f"{kind} {path}", path.parent.name
