#!/usr/bin/env python3
"""Builds the environment in which SGLang runs on a CPU, once per machine, and prints its folder.

The release is 0.5.20; $DORA_SGLANG_RELEASE selects another one, whose pins (`release-*.txt`) override the recipe's.

Invariant: a folder with a file `complete` was installed from exactly these pins and shims and could import SGLang's
server; any other is rebuilt. One builder at a time holds the lock beside the folder; the others wait and then use its
result. pip's own settings (PIP_*) apply, so that PyTorch's CPU build can be configured there.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RECIPE = Path(__file__).parent
RELEASE = "0.5.20"
#: The import of everything that a server needs; it also compiles the modules, so that a first start takes no longer.
PROOF = "import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler"
LIMIT_S = 1800.0  # of each step, and of waiting for another builder


def cache_folder() -> Path:
    """Return the folder of all environments: $DORA_SGLANG_CPU, else one in the user's cache."""
    if chosen := os.environ.get("DORA_SGLANG_CPU"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dora" / "sglang-cpu"


def release_pins(recipe: Path = RECIPE) -> list[Path]:
    """Return the pins of the selected release; none for the recipe's own."""
    release = os.environ.get("DORA_SGLANG_RELEASE", RELEASE)
    if release == RELEASE:
        return []
    pins = recipe / f"release-{release}.txt"
    if not pins.is_file():
        known = [RELEASE, *(file.stem.removeprefix("release-") for file in sorted(recipe.glob("release-*.txt")))]
        sys.exit(f"DORA_SGLANG_RELEASE: there are no pins for '{release}'; choose one of {', '.join(known)}")
    return [pins]


def environment_folder(recipe: Path = RECIPE) -> Path:
    """Return the folder for this recipe, release and interpreter, built or not."""
    digest = hashlib.sha256(f"{platform.python_version()} {platform.machine()}\n".encode())
    pins = [*sorted(recipe.glob("requirements*.txt")), *release_pins(recipe)]
    for path in [*pins, *sorted((recipe / "shims").glob("*.p*"))]:
        digest.update(f"{path.name}\n".encode() + path.read_bytes())
    return cache_folder() / digest.hexdigest()[:16]


def is_built(folder: Path) -> bool:
    return (folder / "complete").exists()


def build(recipe: Path = RECIPE, *, proof: str = PROOF) -> Path:
    """Build the environment unless it exists, and return its folder."""
    folder = environment_folder(recipe)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_suffix(".lock")):
        if not is_built(folder):
            _install(folder, recipe, proof=proof)
            (folder / "complete").touch()
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file, after waiting for another builder to finish or die."""
    deadline = time.monotonic() + LIMIT_S
    with path.open("wb") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    sys.exit(f"{path} has been held by another builder for {LIMIT_S:g} s; end that builder first")
                time.sleep(0.5)
        yield


def _install(folder: Path, recipe: Path, *, proof: str) -> None:
    _say(f"building {folder}, once; this takes a few minutes and about 3 GB")
    _run(sys.executable, "-m", "venv", "--clear", str(folder))
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-input"]
    _run(*pip, "-r", str(recipe / "requirements.txt"))
    for pins in (recipe / "requirements-nodeps.txt", *release_pins(recipe)):
        _run(*pip, "--no-deps", "-r", str(pins))
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", where], check=True, capture_output=True, text=True).stdout.strip()
    for shim in (recipe / "shims").glob("*.p*"):
        shutil.copy(shim, packages)
    _run(python, "-W", "ignore", "-c", proof)


def _run(*command: str) -> None:
    """Runs a step; its output goes to stderr, because stdout is for the folder alone."""
    try:
        done = subprocess.run(command, stdout=sys.stderr, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        sys.exit(f"{' '.join(command)}: not finished after {LIMIT_S:g} s")
    if done.returncode:
        sys.exit(f"{' '.join(command)}: failed with exit code {done.returncode}; see its output above")


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.stdout.write(f"{build()}\n")
