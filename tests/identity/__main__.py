"""`python -m tests.identity`: check that the core decides as it did when tests/identity/digests.json was recorded.

    python -m tests.identity                   compare every run with its digest, under two hash seeds
    python -m tests.identity --record          write new digests, for an intended change of behavior
    python -m tests.identity --run NAME --against COMMIT    the first event that differs, and an excerpt

A digest is over every event with its commands, and over a snapshot of the state after every 64 events (4,096 in a
workload).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from dora.core.commands import Command
from dora.core.events import Event
from dora.core.excerpt import describe, excerpt, subject_of
from dora.core.state import State
from dora.journal.codec import Handled
from tests.identity.runs import encoded, names, play
from tests.identity.snapshot import snapshot

DIGESTS: Final = Path(__file__).parent / "digests.json"
ROOT: Final = Path(__file__).parents[2]
#: A workload has up to a million trajectories, so snapshots are rarer.
SNAPSHOT_EVENTS: Final = {"workload": 4096}
DEFAULT_SNAPSHOT_EVENTS: Final = 64
HASH_SEEDS: Final = ("1", "4711")
#: Number of lines of the excerpt, up to the one that differs.
SHOWN: Final = 40


def digest(name: str) -> str:
    """Return the digest of one run."""
    found, count = xxhash.xxh3_128(), 0
    every = SNAPSHOT_EVENTS.get(name.partition(":")[0], DEFAULT_SNAPSHOT_EVENTS)

    def tell(event: Event, commands: Sequence[Command], state: State) -> None:
        nonlocal count
        count += 1
        found.update(encoded(event, commands))
        if count % every == 0:
            found.update(msgspec.json.encode(snapshot(state)))

    play(name, tell)
    return f"{count} {found.hexdigest()[:16]}"


def digests(chosen: Sequence[str], *, hash_seed: str) -> dict[str, str]:
    """Compute digests in a child process, whose sets have another order."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.identity", "--print", *chosen],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def recorded() -> dict[str, str]:
    """The results of the runs."""
    return json.loads(DIGESTS.read_text())  # type: ignore[no-any-return]


def main() -> int:
    """Return exit code 1 if a run differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.identity", description=__doc__.partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="write the digests")
    parser.add_argument("--run", metavar="NAME", help="compare one run event by event")
    parser.add_argument("--against", metavar="COMMIT", default="HEAD", help="with this commit (default: HEAD)")
    parser.add_argument("--print", nargs="*", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--lines", metavar="NAME", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.print is not None:
        sys.stdout.write(json.dumps({name: digest(name) for name in chosen.print or names()}))
        return 0
    if chosen.lines:
        _print_lines(chosen.lines)
        return 0
    if chosen.run:
        return _compare(chosen.run, commit=chosen.against)
    return _record() if chosen.record else _check()


def _record() -> int:
    first, *others = (digests([], hash_seed=seed) for seed in HASH_SEEDS)
    if any(other != first for other in others):
        sys.stdout.write("the runs depend on the hash seed\n")
        return 1
    DIGESTS.write_text(json.dumps(first, indent=0) + "\n")
    sys.stdout.write(f"{len(first)} runs recorded, {_num_events(first)} events\n")
    return 0


def _check() -> int:
    expected = recorded()
    for seed in HASH_SEEDS:
        found = digests([], hash_seed=seed)
        wrong = [name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)]
        if wrong:
            sys.stdout.write(f"{len(wrong)} of {len(expected)} runs differ, such as {min(wrong)}\n")
            return 1
    sys.stdout.write(f"{len(expected)} runs, {_num_events(expected)} events: identical under {len(HASH_SEEDS)} seeds\n")
    return 0


def _num_events(found: dict[str, str]) -> int:
    return sum(int(one.split()[0]) for one in found.values())


# -- where a run begins to differ -------------------------------------------------------------------------------------


def _print_lines(name: str) -> None:
    count = 0

    def tell(event: Event, commands: Sequence[Command], state: State) -> None:
        nonlocal count
        count += 1
        sys.stdout.buffer.write(encoded(event, commands) + b"\n")
        sys.stdout.buffer.write(msgspec.json.encode(snapshot(state)) + b"\n")

    play(name, tell)


def _lines(name: str, *, root: Path) -> Iterator[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.identity", "--lines", name],
        env={**os.environ, "PYTHONPATH": str(root)},
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # the comparison closes the pipe when it is done
    )
    assert process.stdout is not None
    with process:
        yield from process.stdout
    if process.returncode:
        raise SystemExit(f"cannot play {name} in {root}: see python -m tests.identity --print {name} there")


def _compare(name: str, *, commit: str) -> int:
    with tempfile.TemporaryDirectory(prefix="dora-identity-") as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], cwd=ROOT, check=True)
        try:
            return _tell_difference(_lines(name, root=tree), _lines(name, root=ROOT))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def _tell_difference(before: Iterator[bytes], after: Iterator[bytes]) -> int:
    entries: deque[tuple[Event, tuple[Command, ...]]] = deque(maxlen=20_000)
    number, group_size = 0, 1
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        if old != new:
            _tell(number, old, new, list(entries), group_size=group_size)
            return 1
        if number == 1:
            group_size = json.loads(new)["group_size"]
        if number % 2 == 0:
            handled = msgspec.json.decode(new, type=Handled)
            entries.append((handled.event, handled.commands))
    sys.stdout.write(f"identical: {(number + 1) // 2} events\n")
    return 0


def _tell(
    number: int, old: bytes, new: bytes, entries: list[tuple[Event, tuple[Command, ...]]], *, group_size: int
) -> None:
    if number % 2:
        there, here = json.loads(old), json.loads(new)
        event = entries[-1][0]
        sys.stdout.write(f"event {number // 2}, {describe(event)}: the state differs\n")
        for key in there:
            if there[key] != here.get(key):
                sys.stdout.write(f"  {key}\n    before {there[key]}\n    after  {here.get(key)}\n")
    else:
        event = msgspec.json.decode(new, type=Handled).event
        sys.stdout.write(f"event {number // 2} differs\n  before {old.decode()}  after  {new.decode()}")
    subject = subject_of(event)
    sys.stdout.write(f"the journal's lines about {subject}:\n")
    lines = excerpt(entries, subject, group_size=group_size) or [f"{e.at:10.3f} s  {describe(e)}" for e, _ in entries]
    for line in lines[-SHOWN:]:
        sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
