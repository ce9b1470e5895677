"""Words between the threads of ranks, which may not run collectives: those are for the main threads.

A word is a key in a torch.distributed store that all ranks can reach. Invariant: each rank says a word once, and any
rank may hear it; every wait ends after PEER_TIMEOUT_S, unless its caller gives it another limit, or as soon as the
fence no longer lets this rank pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from dora.errors import RemoteError
from dora.trainer.full_disk import FULL_TIMEOUT_S

_T = TypeVar("_T")
#: Longest wait of one rank for another, which may wait for space and then write its part.
PEER_TIMEOUT_S: Final = FULL_TIMEOUT_S + 260.0
#: Of one attempt to say or hear a word. A FileStore whose file was deleted waits for all of its timeout.
ATTEMPT_S: Final = 2.0


class Meeting:
    """Ranks 0 to `size` - 1, which say and hear the same words in the same order."""

    def __init__(self, words: Store, *, rank: int, size: int, fence: Callable[[], None]) -> None:
        """`words`: of these ranks, and of nothing else. `fence` raises if this rank's work is not needed any more."""
        self._words = words
        self._words.set_timeout(timedelta(seconds=ATTEMPT_S))
        self._fence = fence
        self._gathered = 0  # how many times
        self._said = ""  # the last word of `gather`
        self.rank, self.size = rank, size

    def say(self, what: str, value: str = "") -> None:
        """Say a word to all ranks. `what`: unique among those of this rank."""
        self._insist(lambda: self._words.set(f"{what}/{self.rank}", value), what, rank=self.rank)

    def hear(self, what: str, *, rank: int, timeout_s: float | None = None) -> str:
        """Wait for a word of a rank. RemoteError if it is not said in `timeout_s` (None: PEER_TIMEOUT_S)."""
        return self._insist(lambda: self._get(f"{what}/{rank}"), what, rank=rank, timeout_s=timeout_s).decode()

    def forget(self, what: str, *, rank: int) -> None:
        """Delete a word that all have heard who will."""
        self._words.delete_key(f"{what}/{rank}")

    def gather(self, own: str = "", *, what: str, timeout_s: float | None = None) -> list[str]:
        """Return the words of all ranks, in their order, once all have called this; by one thread of each rank.

        `timeout_s`: as for `hear`.
        """
        self._gathered += 1
        word = f"{self._gathered}: {what}"
        self.say(word, own)
        heard = [self.hear(word, rank=rank, timeout_s=timeout_s) for rank in range(self.size)]
        if self._said:
            self.forget(self._said, rank=self.rank)  # others may still hear the new one, but not the one before
        self._said = word
        return heard

    def _get(self, word: str) -> bytes:
        # `get` of a FileStore never returns if another file has its name, as in a folder that was made again.
        self._words.wait([word])
        return self._words.get(word)

    def _insist(self, attempt: Callable[[], _T], what: str, *, rank: int, timeout_s: float | None = None) -> _T:
        """Return the result of the first attempt that is not too slow."""
        limit_s = PEER_TIMEOUT_S if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while True:
            try:
                return attempt()
            except RuntimeError as err:  # of torch's stores
                self._fence()  # the run may be over, or its folder gone, and the file of words with it
                if isinstance(err, dist.DistNetworkError):
                    raise RemoteError(
                        "the store in which the ranks meet cannot be reached; has its host failed?"
                    ) from err
                if time.monotonic() > deadline:
                    late = f"rank {rank} has not reached {what!r} in {limit_s:g} s"
                    raise RemoteError(f"{late}; does it hang, or its disk?") from err
