"""Results of jobs in other processes, as they end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, as_completed
from typing import TypeVar

R = TypeVar("R")


def finished(jobs: Mapping[Future[R], str]) -> Iterator[R]:
    """Yield the results of jobs; of one that fails, print its name and the error."""
    for job in as_completed(jobs):
        err = job.exception()
        if err is None:
            yield job.result()
        else:
            print(f"{jobs[job]}: {type(err).__name__}: {err}", flush=True)
