"""A stream of a GPU, in which a thread copies weights while the main thread trains; on a CPU it is nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """Copies beside training."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def mark(self) -> torch.cuda.Event | None:
        """Return a mark after what the main thread has queued up to now."""
        return torch.cuda.current_stream().record_event() if self._stream is not None else None

    @contextmanager
    def after(self, mark: torch.cuda.Event | None) -> Iterator[None]:
        """In this context, work of this thread waits for `mark`, and for nothing that was queued later."""
        if self._stream is None or mark is None:
            yield
            return
        self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            yield
