"""The default job on one GPU: four embedded engines and one rank; in float32 as it is, and in bfloat16.

What is measured is in bench/default_job.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from default_job import measure
from result import Row

from on_gpu.cases import Case, Place

BFLOAT16 = ("trainer.dtype=bfloat16", "trainer.publish_dtype=bfloat16")


def cases(part: str, *, tiny: bool) -> list[Case]:
    return [
        Case(f"dora run in {dtype}", partial(run, dtype, (*settings, *(("run.steps=2",) * tiny))), limit_s=200.0)
        for dtype, settings in (("float32", ()), ("bfloat16", BFLOAT16))
    ]


def run(dtype: str, settings: tuple[str, ...], place: Place) -> Iterable[Row]:
    devices = (f"engine.device={place.device}", f"trainer.device={place.device}", "trainer.ranks=1")
    return measure(f"{place.device}, {dtype}", home=place.folder, settings=(*devices, *settings))
