"""The long profile: `python -m tests.fuzz --inputs 1000000 [--parser NAME] [--seed N]`.

Input N is a function of N and the samples alone: `--seed N --inputs 1` repeats a failing one. To continue a run that
was stopped, set `--seed` to the number that it had reached.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tests.fuzz import test_adapters, test_files, test_inputs, test_messages, test_servers
from tests.fuzz.parsers import NUM_INPUTS, Parser, drive

PARSERS = {
    parser.name: parser
    for module in (test_servers, test_messages, test_files, test_inputs, test_adapters)
    for parser in module.PARSERS
}
#: Number of inputs between two checks of the time; a block that exceeds the limit counts as a hang.
_BLOCK = 1_000
_LIMIT_S = 300


class Hang(BaseException):
    """A block of inputs took too long."""


def main() -> int:
    """Exit code 1 if an input broke a parser."""
    arguments = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.partition("\n")[0])
    arguments.add_argument("--inputs", type=int, default=NUM_INPUTS, help="for each parser")
    arguments.add_argument("--parser", choices=sorted(PARSERS), action="append", help="only this one; repeatable")
    arguments.add_argument("--seed", type=int, default=0, help="number of the first input")
    options = arguments.parse_args()
    signal.signal(signal.SIGALRM, _hangs)
    failed = False
    for name in options.parser or PARSERS:
        with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as scratch:
            failed |= not _run(PARSERS[name], Path(scratch), inputs=options.inputs, first=options.seed)
    return int(failed)


def _run(parser: Parser, scratch: Path, *, inputs: int, first: int) -> bool:
    began, done, accepted = time.monotonic(), 0, 0
    try:
        while done < inputs:
            count = min(_BLOCK, inputs - done)
            signal.alarm(_LIMIT_S)
            accepted += drive(parser, scratch, inputs=count, first=first + done)
            done += count
    except (Exception, Hang):  # noqa: BLE001  whatever broke is told, and the next parser has its turn
        traceback.print_exc(limit=-12)
        sys.stdout.write(f"{parser.name}: FAILED after {done} inputs\n")
        return False
    finally:
        signal.alarm(0)
    elapsed_s = time.monotonic() - began
    sys.stdout.write(f"{parser.name}: {done} inputs from {first}, {done / elapsed_s:.0f}/s, {accepted} accepted\n")
    sys.stdout.flush()
    return True


def _hangs(_number: int, _frame: FrameType | None) -> NoReturn:
    raise Hang(f"{_BLOCK} inputs took more than {_LIMIT_S} s")


if __name__ == "__main__":
    sys.exit(main())
