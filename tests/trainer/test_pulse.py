"""The thread that tells how far a rank is: also while its main thread computes, waits or stands still."""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dora.errors import RemoteError
from dora.trainer import pulse as pulse_module
from dora.trainer.pulse import Pulse, beat_with, flight_record
from dora.trainer.spans import RankClock
from dora.transport.messages import FlightRecord, RankPulse, ToController

WAIT_S = 20.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse_module, "PULSE_S", 0.01)
    monkeypatch.setattr(pulse_module, "FLIGHT_S", 0.05)


def test_a_rank_is_heard_while_its_main_thread_is_busy() -> None:
    said: queue.SimpleQueue[ToController] = queue.SimpleQueue()
    clock = RankClock(3)
    pulse = Pulse(3, clock=clock, send=said.put)
    pulse.start()
    first = said.get(timeout=WAIT_S)
    assert isinstance(first, RankPulse)
    assert (first.rank, first.activity) == (3, "start")
    clock.switch("forward_backward")
    while (second := said.get(timeout=WAIT_S)).activity != "forward_backward":  # type: ignore[union-attr]
        pass
    assert isinstance(second, RankPulse)
    assert second.count > first.count
    pulse.stop()


def test_the_flight_record_is_sent_once_for_each_standstill_in_what_may_be_a_collective() -> None:
    said: queue.SimpleQueue[ToController] = queue.SimpleQueue()
    clock = RankClock(0)
    pulse = Pulse(0, clock=clock, send=said.put)
    pulse.start()

    def records(pulses: int) -> int:
        found = 0
        while pulses:
            message = said.get(timeout=WAIT_S)
            found += isinstance(message, FlightRecord)
            pulses -= isinstance(message, RankPulse)
        return found

    clock.switch("waiting")
    assert records(30) == 0
    clock.switch("slowest_rank")
    assert records(30) == 1
    clock.beat()
    assert records(30) == 1
    pulse.stop()


def test_a_link_that_has_failed_ends_the_thread_and_nothing_else() -> None:
    def fail(message: ToController) -> None:
        raise RemoteError("the controller is gone")

    pulse = Pulse(0, clock=RankClock(0), send=fail)
    pulse.start()
    deadline = time.monotonic() + WAIT_S
    while pulse._thread.is_alive():
        assert time.monotonic() < deadline
    pulse.stop()


def test_each_layer_of_a_pass_is_a_beat_forward_and_backward() -> None:
    layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(5)])
    clock = RankClock(0)
    beat_with(layers, clock)
    x = torch.zeros(1, 2)
    for layer in layers:
        x = layer(x)
    assert clock.beats == 5
    x.sum().backward()
    assert clock.beats == 10
    with torch.no_grad():
        layers[0](torch.zeros(1, 2))
    assert clock.beats == 11


def recorded(store: Path) -> str:
    """Return the flight record of a collective; in a process of its own, as the record has all that came before."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "10"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    dist.all_reduce(torch.zeros(1))
    record = flight_record()
    dist.destroy_process_group()
    return record


def test_the_flight_record_is_json_and_no_pickle(tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert isinstance(json.loads(pool.submit(recorded, tmp_path / "store").result(WAIT_S)), dict)
