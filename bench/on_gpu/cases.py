"""A case of a part: measured in a process of its own, within a time limit, and resulting in rows.

A process that ends badly, or was stopped, still leaves the rows that it had found, and a row that says why it ended.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
import torch
from clients.steps import peak, reset_peak, synchronize
from result import Row, number

from dora.trainer.checkpointing import Mode
from on_gpu.parts import NOT_REACHED, PARTS, Part

ROOT = Path(__file__).parents[2]
GPU = ROOT / "bench" / "gpu.py"


class Place(NamedTuple):
    """Where a case is measured, and what is known by then."""

    device: str  # cuda, or cpu for tiny shapes
    folder: Path  # empty; in memory if there is room
    repeats: int = 3
    earlier: Sequence[Row] = ()  # of the cases before

    def find(self, beginning: str) -> Row | None:
        """Return the first earlier row with a figure that begins so."""
        return next((row for row in self.earlier if row.figure is not None and row.what.startswith(beginning)), None)

    def beside(self, what: str, figure: float, unit: str, beginning: str, *, called: str, bar: str = "") -> Row:
        """Return a row that is compared with the earlier one that begins so, if there is one."""
        other = self.find(beginning)
        if other is None or other.figure is None:
            return Row(what, figure, unit)
        return Row(what, figure, unit, f"{called}, {number(other.figure)} {unit}", figure / other.figure, bar)


class Case(NamedTuple):
    """What one process measures."""

    what: str
    measure: Callable[[Place], Iterable[Row]]
    limit_s: float = 150.0
    folder_bytes: int = 2 << 30  # room that it needs in its folder


class Accelerator(msgspec.Struct):
    """The first line of a case's process."""

    accelerator: str  # name and memory of the GPU, and the version of torch; empty on a CPU


def cases_of(part: Part, *, tiny: bool) -> list[Case]:
    """Return the cases of a part in the order in which they are measured."""
    module: Any = import_module(f"on_gpu.{part.module}")
    cases: list[Case] = module.cases(part.name, tiny=tiny)
    return cases


# --- in the process of the case


def measure_here(part: str, index: int, place: Place) -> None:
    """Measure a case, and print each row as soon as it is there."""
    torch.manual_seed(0)
    print(msgspec.json.encode(Accelerator(accelerator_of(place.device))).decode(), flush=True)
    for row in cases_of(PARTS[part], tiny=place.device == "cpu")[index].measure(place):
        print(msgspec.json.encode(row).decode(), flush=True)


def accelerator_of(device: str) -> str:
    if device == "cpu":
        return ""
    return f"{torch.cuda.get_device_name()}, {memory_of(device) / 2**30:.0f} GiB, torch {torch.__version__}"


def memory_of(device: str) -> int:
    """Return the bytes that the device has."""
    return torch.cuda.get_device_properties(0).total_memory if device == "cuda" else psutil.virtual_memory().total


def free() -> None:
    """Give the memory of what is no longer used back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def count_peak(device: str) -> None:
    """Count the peak of the memory from now on."""
    synchronize()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        reset_peak()


def peak_of(device: str) -> int:
    """Return the peak in bytes: of the GPU's allocator, or of the whole process on a CPU."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else peak()


def first_that_fits(modes: Iterable[Mode], measure: Callable[[Mode], Iterable[Row]], *, what: str) -> list[Row]:
    """Return the rows under the first of several modes of checkpointing with which memory suffices."""
    reason = ""
    for mode in modes:
        try:
            return list(measure(mode))
        except torch.OutOfMemoryError as err:
            reason = f"out of memory: {str(err).partition('. GPU')[0]}"
        free()
    return [Row(what, None, against=reason)]


# --- in the process that waits for it


def in_process(
    part: str, index: int, case: Case, *, profile: str, left_s: float, full: bool, earlier: Sequence[Row] = ()
) -> tuple[str, list[Row]]:
    """Return the accelerator and the rows of a case; the last row says so if it did not end well. `left_s`: of the
    part's time."""
    with tempfile.TemporaryDirectory(dir=_room_for(case.folder_bytes), prefix="dora-bench-") as folder:
        command = [sys.executable, str(GPU), "--case", part, str(index), folder, "--profile", profile]
        env = {
            "TRANSFORMERS_VERBOSITY": "error",
            "HF_HUB_OFFLINE": "1",
            "TQDM_DISABLE": "1",
            **os.environ,
            "PYTHONPATH": str(ROOT),
        }
        env.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        with subprocess.Popen(
            command + ["--full"] * full, text=True, env=env,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as child:  # fmt: skip
            try:
                given = msgspec.json.encode(list(earlier)).decode()
                out, err = child.communicate(given, timeout=min(case.limit_s, left_s))
                ending = ""
            except subprocess.TimeoutExpired:
                end(child)
                out, err = child.communicate()
                ending = f"stopped after {case.limit_s:.0f} s" if case.limit_s <= left_s else NOT_REACHED
            except BaseException:
                end(child)
                raise
    sys.stderr.write(err)
    lines = out.splitlines()
    rows = [msgspec.json.decode(line, type=Row) for line in lines if line.startswith('{"what"')]
    found = next((line for line in lines if line.startswith('{"accelerator"')), '{"accelerator":""}')
    if child.returncode < 0 and not ending:
        ending = f"ended by signal {-child.returncode}"
    elif child.returncode and not ending:
        ending = (err.split("\n\n")[-1].strip().splitlines() or ["failed"])[-1]
    rows += [Row(case.what, None, against=ending)] if ending else []
    return msgspec.json.decode(found, type=Accelerator).accelerator, rows


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process and all that it started: a run has servers and ranks."""
    with suppress(psutil.NoSuchProcess):
        for started in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                started.kill()
    process.kill()


def _room_for(num_bytes: int) -> str:
    """Return a folder in memory, as that of a run's versions, if there is enough of it; else one on the disk."""
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > num_bytes else tempfile.gettempdir()
