"""The image of the Dockerfile and containers of it, by podman with runc, as root.

What podman keeps, images included, is in a folder of its own in the user's cache, so that it neither sees nor changes
other containers of the machine, and the image is built again only where something of it has changed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
IMAGE: Final = "localhost/dora"
BASE: Final = "localhost/dora-base"
#: Programs, and the Debian packages that have them.
TOOLS: Final = {
    "podman": "podman",
    "runc": "runc",
    "debootstrap": "debootstrap",
    "iptables": "iptables",
    "/usr/lib/podman/netavark": "netavark",
    "/usr/lib/podman/aardvark-dns": "aardvark-dns",
}
BUILD_TIMEOUT_S: Final = 900.0
#: pip's settings of the machine, which the image is built with. Folders in them are there during the build.
PIP_SETTINGS: Final = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CERT")

#: There may be no systemd, and limits that cannot be raised.
_SETTINGS: Final = """
[engine]
cgroup_manager = "cgroupfs"
runtime = "runc"
events_logger = "file"
[network]
network_backend = "netavark"
[containers]
log_driver = "k8s-file"
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
"""
_STORAGE: Final = """
[storage]
driver = "{driver}"
graphroot = "{folder}/images"
runroot = "{folder}/run"
"""


class NoImage(Exception):
    """No image can be built here; the message says why."""


@cache
def missing() -> str:
    """What containers need and this machine lacks; empty if they can be run."""
    if lacking := [package for tool, package in TOOLS.items() if shutil.which(tool) is None]:
        return f"apt install {' '.join(lacking)}"
    return "" if os.geteuid() == 0 else "root"


@dataclass(frozen=True, slots=True)
class Podman:
    """Podman with its settings; `environ` has it find them, also when podman-compose calls it."""

    environ: dict[str, str]

    @classmethod
    @contextmanager
    def ready(cls) -> Iterator[Podman]:
        """Podman, with the image built from this tree. One process at a time; NoImage if it cannot be built."""
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dora" / "containers"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "containers.conf").write_text(_SETTINGS)
        settings = {
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        }
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            podman = cls({**os.environ, **settings})
            podman._choose_driver(folder)
            podman._build()
            yield podman

    def _choose_driver(self, folder: Path) -> None:
        """Overlays where the kernel has them; copies of whole images elsewhere."""
        for driver in ("overlay", "vfs"):
            (folder / "storage.conf").write_text(_STORAGE.format(driver=driver, folder=folder))
            done = self.call("info", is_checked=False)
            if done.returncode == 0:
                return
        raise NoImage(f"podman info: {done.stderr}")

    def _build(self) -> None:
        if self.call("image", "exists", BASE, is_checked=False).returncode:
            self._make_base()
        given = {name: os.environ[name] for name in PIP_SETTINGS if os.environ.get(name)}
        paths = {word for value in given.values() for word in value.split() if Path(word).is_absolute()}
        options = [f"--build-arg={name}={value}" for name, value in ({"BASE": BASE} | given).items()]
        options += [f"--volume={path}:{path}:ro" for path in sorted(paths) if Path(path).exists()]
        common = ("--isolation=chroot", "--format=docker", "--layers", f"--tag={IMAGE}")
        self.call("build", *common, *options, str(ROOT), timeout_s=BUILD_TIMEOUT_S)

    def _make_base(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            archive = f"{folder}/base.tar"
            done = self.run([f"{ROOT}/tests/containers/base.sh", archive], is_checked=False, timeout_s=BUILD_TIMEOUT_S)
            if done.returncode:
                raise NoImage(f"debootstrap: {done.stderr.strip().rpartition(os.linesep)[2]}")
            self.call("import", archive, BASE)

    def call(self, *words: str, is_checked: bool = True, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        return self.run(["podman", *words], is_checked=is_checked, timeout_s=timeout_s)

    def run(
        self, argv: Sequence[str], *, is_checked: bool = True, timeout_s: float, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            argv,
            env=self.environ | variables,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
        assert not (is_checked and done.returncode), f"{' '.join(argv)}: {done.stdout}{done.stderr}"
        return done

    @contextmanager
    def container(self, name: str, arguments: Sequence[str], *options: str) -> Iterator[Container]:
        """A container that runs `dora` with these arguments, in the background."""
        # Without systemd nothing would call the health check in the image; a test does.
        self.call("run", "--detach", f"--name={name}", "--no-healthcheck", *options, IMAGE, *arguments)
        try:
            yield Container(self, name)
        finally:
            self.call("rm", "--force", "--volumes", name)


@dataclass(frozen=True, slots=True)
class Container:
    podman: Podman
    name: str

    def told(self) -> str:
        done = self.podman.call("logs", self.name)
        return done.stdout + done.stderr

    def execute(self, *argv: str, is_checked: bool = True) -> subprocess.CompletedProcess[str]:
        return self.podman.call("exec", self.name, *argv, is_checked=is_checked)

    def wait(self, timeout_s: float) -> int:
        """Wait until it ends by itself; return its exit code."""
        return int(self.podman.call("wait", self.name, timeout_s=timeout_s).stdout)
