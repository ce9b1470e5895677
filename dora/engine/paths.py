"""Paths of this host's folders on a server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath


def map_path(folder: Path, path_map: Mapping[str, str]) -> str:
    """Return `folder` as a server sees it, with the longest prefix (whole components) in `path_map` replaced."""
    path = PurePosixPath(folder)
    for prefix in sorted(path_map, key=lambda prefix: len(PurePosixPath(prefix).parts), reverse=True):
        if path.is_relative_to(prefix):
            return str(PurePosixPath(path_map[prefix]) / path.relative_to(prefix))
    return str(path)
