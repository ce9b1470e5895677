"""Identifiers of the Hugging Face hub, `owner/name`, given where a local path is expected."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Literal

_IDENTIFIER: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_FILE: Final = re.compile(r".*\.[A-Za-z]\w*")  # unlike "Qwen2.5-0.5B"
#: Local folders for downloads, by what is downloaded.
_FOLDERS: Final = {"model": "models", "dataset": "data"}


def instead(given: str, kind: Literal["model", "dataset"], *, field: str) -> str:
    """Return what to do about a path that does not exist, if it looks like an identifier of the hub; else "".

    A path whose first folder exists, or is one for downloads, is taken for a local one.
    """
    owner, _, name = given.partition("/")
    if not _IDENTIFIER.fullmatch(given) or Path(owner).exists() or owner in _FOLDERS.values():
        return ""
    if kind == "dataset" and _FILE.fullmatch(name):
        return ""
    folder = f"{_FOLDERS[kind]}/{name}"
    what, option, value = (
        ("model", "", folder) if kind == "model" else ("data set", "--repo-type dataset ", f"a file in {folder}")
    )
    return (
        f"correct the path or, if it is a {what} of the Hugging Face hub, run "
        f"hf download {option}{given} --local-dir {folder} and set {field} to {value}"
    )
