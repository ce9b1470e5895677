"""The pulse of a rank: a thread tells the controller how far the main thread is, also while that computes or waits.

The controller judges (controller/vitals.py). If the main thread makes no progress in what may be a collective, this
thread sends torch's flight record once, because ranks that are killed leave none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import nn
from torch._C import _distributed_c10d

from dora.errors import RemoteError
from dora.trainer.spans import RankClock
from dora.transport.messages import OWN_LIMIT, PULSE_S, FlightRecord, RankPulse, ToController

#: Time without a beat after which the flight record is sent: before the controller may call the ranks wedged.
FLIGHT_S: Final = 45.0
#: Longest record that is sent, in characters: a message to the controller has at most 1 MiB.
MAX_RECORD: Final = 900_000


class Pulse:
    """The thread. `send` may drop a message: where the controller takes none, no pulse may wait in place of others."""

    def __init__(self, rank: int, *, clock: RankClock, send: Callable[[ToController], None]) -> None:
        self._rank = rank
        self._clock = clock
        self._send = send
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Send nothing more."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        known, still_s, has_sent = -1, 0.0, False
        while not self._ended.wait(PULSE_S):
            count, activity = self._clock.beats, self._clock.activity
            still_s = still_s + PULSE_S if count == known else 0.0
            has_sent = has_sent and count == known
            known = count
            try:
                self._send(RankPulse(rank=self._rank, count=count, activity=activity))
                if still_s >= FLIGHT_S and not has_sent and activity not in OWN_LIMIT:
                    has_sent = True
                    self._send(FlightRecord(rank=self._rank, record=flight_record()))
            except RemoteError:
                return  # the main thread gets this error too


def flight_record() -> str:
    """Return the last collectives of this process as JSON; TORCH_FR_BUFFER_SIZE is their number."""
    dump: Any = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    record = dump().decode() if dump is not None else ""
    return record if len(record) <= MAX_RECORD else ""


def beat_with(layers: Iterable[nn.Module], clock: RankClock) -> None:
    """Have the clock beat with each layer of each pass, forward and backward."""

    def on_gradient(gradient: torch.Tensor) -> None:
        clock.beat()

    def on_output(module: nn.Module, inputs: Any, output: Any) -> None:
        clock.beat()
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, torch.Tensor) and first.requires_grad:
            first.register_hook(on_gradient)

    for layer in layers:
        layer.register_forward_hook(on_output)
