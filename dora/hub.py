"""The one place that speaks to the Hugging Face hub, through huggingface_hub: its cache, HF_TOKEN, HF_ENDPOINT and
HF_HUB_OFFLINE apply.

Invariant: a branch or tag is resolved to a commit once. What is at a commit never changes, so what the cache has of it
is used without asking, if the list of its files is there too. The first question ends within ANSWER_S, whatever the
network does.
"""

from __future__ import annotations

import glob
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from threading import Thread
from typing import Any, Final, Literal, TypeVar

from dora.errors import ConfigError, RunFailed

T = TypeVar("T")

#: Time in which the hub must answer the first question, unless HF_HUB_ETAG_TIMEOUT allows more.
ANSWER_S: Final = 0.8
#: Time between two reports of the progress of a download.
REPORT_S: Final = 0.5
_IDENTIFIER: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_FILE: Final = re.compile(r".*\.[A-Za-z]\w*")  # unlike "Qwen2.5-0.5B"
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
#: Usual folders: a path into one of them is meant as a path.
_LOCAL: Final = ("models", "data", "runs")
_WORDS: Final = {"model": "model", "dataset": "data set"}


@dataclass(frozen=True, slots=True)
class Repo:
    """A model or a data set of the hub."""

    id: str
    kind: Literal["model", "dataset"]
    revision: str  # branch, tag or commit; "": the default branch
    field: str  # key of the configuration that names it

    @property
    def is_pinned(self) -> bool:
        return _COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        return f"{self.id}@{self.revision[:12]}" if self.revision else self.id


#: Receives how far a download is: what is downloaded, the bytes that have arrived, and those of all its files.
Progress = Callable[[Repo, int, int], None]


@dataclass(frozen=True, slots=True)
class Checkout:
    """A repository at a commit."""

    repo: Repo
    folder: Path  # of its files, as far as they are here
    sizes: Mapping[str, int]  # of all files, by their paths; where the hub was never asked, of those that are here

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return those of the files that are not here."""
        return [name for name in names if not (self.folder / name).is_file()]

    def num_bytes(self, names: Iterable[str]) -> int:
        return sum(self.sizes[name] for name in names)


def is_identifier(given: str, kind: Literal["model", "dataset"]) -> bool:
    """Return whether a text names a repository of the hub. A path that exists is always local."""
    owner, _, name = given.partition("/")
    if not _IDENTIFIER.fullmatch(given) or owner in _LOCAL or os.path.lexists(given):
        return False
    return kind == "model" or _FILE.fullmatch(name) is None


def in_daemon_thread(function: Callable[[], T]) -> Future[T]:
    """Call a function in a thread that does not keep the process from ending."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # a caller that is cancelled leaves it alone

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as err:  # noqa: BLE001 (the caller gets it)
            future.set_exception(err)

    Thread(target=call, daemon=True, name="hub").start()
    return future


def cached(repo: Repo) -> Checkout:
    """Return a repository from the cache, without asking; ConfigError if it is not there."""
    if (found := _kept(repo)) is None:
        raise ConfigError(f"{repo.field}: {repo} is not in the cache of the hub ({_cache()})")
    return found


class Hub:
    """Opens and downloads repositories."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._has_answered = False
        self._opened: dict[tuple[str, str, str], Checkout] = {}

    def open(self, repo: Repo) -> Checkout:
        """Return a repository at the commit that its revision has now; no file is downloaded."""
        key = (repo.kind, repo.id, repo.revision)
        if key not in self._opened:
            self._opened[key] = self._open(repo)
        found = self._opened[key]
        return replace(found, repo=replace(found.repo, field=repo.field))

    def _open(self, repo: Repo) -> Checkout:
        found = _kept(repo, is_listed=not _is_offline()) if repo.is_pinned or _is_offline() else None
        if found is not None:
            return found
        if _is_offline():
            raise ConfigError(
                f"{repo.field}: {repo} is not a path here, nor in the cache of the hub ({_cache()}), and with "
                "HF_HUB_OFFLINE nothing is downloaded; correct it, or unset HF_HUB_OFFLINE"
            )
        self._greet(repo)
        with _explained(repo):
            folder = Path(_snapshot_download(repo, []))  # keeps the list of files, and the commit of the revision
            folder.mkdir(parents=True, exist_ok=True)
        found = _kept(replace(repo, revision=folder.name))
        assert found is not None, "its folder has just been made"
        return found

    def _greet(self, repo: Repo) -> None:
        """Ask the hub for the repository, with a deadline for everything, name resolution included."""
        if self._has_answered:
            return
        limit_s = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or ANSWER_S)
        ask = partial(_huggingface_hub().HfApi().repo_info, repo.id, repo_type=repo.kind, timeout=limit_s)
        with _explained(repo, limit_s=limit_s):
            in_daemon_thread(partial(ask, revision=repo.revision or None)).result(timeout=limit_s)
        self._has_answered = True

    def download(self, snapshot: Checkout, names: Sequence[str]) -> None:
        """Download those of the files that are not here yet."""
        repo, missing = snapshot.repo, snapshot.missing(names)
        if not missing:
            return
        if _is_offline():
            raise ConfigError(
                f"{repo.field}: the cache ({_cache()}) lacks {missing[0]} of {repo}, and with HF_HUB_OFFLINE nothing "
                "is downloaded; unset it"
            )
        self._greet(repo)
        bars: list[Any] = []
        total = snapshot.num_bytes(missing)
        fetch = partial(_snapshot_download, repo, [*map(glob.escape, missing)], tqdm_class=_meter(bars))
        future = in_daemon_thread(fetch)
        with _explained(repo):
            while not wait([future], timeout=REPORT_S).done:
                self._progress(repo, min(total, max((bar.n for bar in bars if bar.unit == "B"), default=0)), total)
            future.result()
        self._progress(repo, total, total)


# -- huggingface_hub --------------------------------------------------------------------------------------------------


def _huggingface_hub() -> Any:
    """Import the package, which takes half a second, and have it print nothing but errors."""
    import huggingface_hub

    huggingface_hub.logging.set_verbosity_error()
    return huggingface_hub


def _is_offline() -> bool:
    return bool(_huggingface_hub().constants.HF_HUB_OFFLINE)


def _cache() -> str:
    return str(_huggingface_hub().constants.HF_HUB_CACHE)


def _snapshot_download(repo: Repo, patterns: Sequence[str], **options: Any) -> str:
    folder: str = _huggingface_hub().snapshot_download(
        repo.id,
        repo_type=repo.kind,
        revision=repo.revision or None,
        allow_patterns=list(patterns),
        **{"tqdm_class": _meter([]), **options},
    )
    return folder


def _kept(repo: Repo, *, is_listed: bool = False) -> Checkout | None:
    """Return a repository from the cache, without asking; None if nothing of this revision is there, or with
    `is_listed` no list of its files."""
    package = _huggingface_hub()
    try:
        folder = Path(_snapshot_download(repo, [], local_files_only=True))
        files = package.get_cached_repo_tree(repo.id, repo_type=repo.kind, revision=folder.name)
        sizes = {file.path: file.size for file in files}
    except package.errors.CachedRepoTreeNotFoundError:  # another program, or an older release, downloaded some of it
        if is_listed:
            return None
        paths = [path for path in folder.rglob("*") if path.is_file()]
        sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
    except (ValueError, OSError):
        return None
    for name in sizes:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name:
            raise ConfigError(f"{repo.field}: {repo} has a file {name!r}, which is no path in a folder")
    return Checkout(replace(repo, revision=folder.name), folder, sizes)


def _meter(bars: list[Any]) -> type:
    """Return a class of progress bars that show nothing; `bars` collects those that are made."""
    from huggingface_hub.utils import tqdm

    class Meter(tqdm):  # type: ignore[misc]
        monitor_interval = 0

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "file": io.StringIO(), "leave": False, "disable": False})
            bars.append(self)

        def display(self, *args: Any, **options: Any) -> None:
            pass

    return Meter


# -- errors -----------------------------------------------------------------------------------------------------------


@contextmanager
def _explained(repo: Repo, *, limit_s: float | None = None) -> Iterator[None]:
    """Turn what can go wrong with the hub into a ConfigError of one line that says what to do."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as err:  # errors of the hub, of HTTP libraries and of the disk share no base class
        raise _explain(err, repo, limit_s=limit_s) from err


def _explain(err: Exception, repo: Repo, *, limit_s: float | None) -> Exception:
    package = _huggingface_hub()
    errors, endpoint = package.errors, package.constants.ENDPOINT
    what, begin = _WORDS[repo.kind], f"{repo.field}: "
    page = f"{endpoint}/{'datasets/' if repo.kind == 'dataset' else ''}{repo.id}"
    if isinstance(err, errors.GatedRepoError):
        return ConfigError(
            f"{begin}{repo.id} is gated: accept its terms at {page}, then run hf auth login or set HF_TOKEN"
        )
    if isinstance(err, errors.RevisionNotFoundError):
        return ConfigError(f"{begin}{repo.id} has no revision '{repo.revision}'; give a branch, a tag or a commit")
    if isinstance(err, errors.RepositoryNotFoundError):
        return ConfigError(
            f"{begin}{repo.id} is neither a path here nor a {what} at {endpoint}; correct it or, if it is private, run "
            "hf auth login or set HF_TOKEN"
        )
    status = getattr(getattr(err, "response", None), "status_code", None)
    if status in (401, 403):
        return ConfigError(f"{begin}{endpoint} refuses the token ({status}) for {repo.id}; run hf auth login again")
    if isinstance(err, errors.HFValidationError):
        return ConfigError(f"{begin}{err}")
    if limit_s is not None:
        return ConfigError(
            f"{begin}{repo.id} is not a path here, and {endpoint} {_trouble(err, limit_s)}; {_what_to_do(repo)}"
        )
    if _of_disk(err):
        return RunFailed(f"{begin}cannot store {repo} in {_cache()} ({err}); free space, or set HF_HUB_CACHE")
    return RunFailed(
        f"{begin}the download of {repo} from {endpoint} broke off ({_root(err)}); start again: files that are complete "
        "are kept"
    )


def _trouble(err: Exception, limit_s: float) -> str:
    status = getattr(getattr(err, "response", None), "status_code", None)
    if status is not None:
        return f"answers with status {status}"
    if isinstance(err, TimeoutError):
        return f"did not answer within {limit_s:g} s"
    return f"cannot be reached ({_root(err)})"


def _root(err: Exception) -> str:
    """Return the text of the error that is the cause of the others."""
    causes = [err]
    while isinstance(cause := causes[-1].__cause__ or causes[-1].__context__, Exception):
        causes.append(cause)
    return next(filter(None, map(str, reversed(causes))), type(err).__name__)


def _what_to_do(repo: Repo) -> str:
    if _kept(repo) is not None:
        return "set HF_HUB_OFFLINE=1 to use what is in the cache, or correct the network or HF_ENDPOINT"
    return "correct the network or HF_ENDPOINT (HF_HUB_ETAG_TIMEOUT=10 waits longer); it is not in the cache either"


def _of_disk(err: Exception) -> bool:
    """Return whether the operating system refused to write; errors of HTTP libraries may be OSErrors too."""
    return type(err) in (OSError, PermissionError) and getattr(err, "errno", None) is not None
