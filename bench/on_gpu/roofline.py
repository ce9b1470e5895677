"""What the device can do: square bfloat16 products of random numbers, copies, and a file written to the store.

A copy within the device counts the bytes that are read and written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from clients.steps import timed
from result import Row, number

from on_gpu.cases import Case, Place

PRODUCTS = "matrix products, bfloat16"
TO_HOST = "copy into pinned host memory"
TO_STORE = "a file written to the version store's folder"
#: Dense bfloat16 TFLOP/s and GB/s of the vendor's datasheets, by a part of the device's name; the first match counts.
DATASHEET = {
    "H200": (989.0, 4_800.0),
    "H100 PCIe": (756.0, 2_000.0),
    "H100 NVL": (835.0, 3_900.0),
    "H100": (989.0, 3_350.0),
    "A100": (312.0, 2_039.0),
    "B200": (2_250.0, 8_000.0),
}


def roofline(place: Place) -> Iterator[Row]:
    on_gpu = place.device == "cuda"
    sizes, copied = ((4_096, 8_192, 16_384), 4 << 30) if on_gpu else ((512,), 64 << 20)
    known = datasheet(torch.cuda.get_device_name()) if on_gpu else None
    source = torch.empty(copied, dtype=torch.uint8, device=place.device).random_()
    target = torch.empty_like(source)
    on_host = torch.empty(copied // 4, dtype=torch.uint8, pin_memory=on_gpu)
    yield beside_datasheet(PRODUCTS, max(products(size, place.device) for size in sizes), "TFLOP/s", known and known[0])
    copy_s = best(lambda: target.copy_(source))
    yield beside_datasheet("copy within the device", 2 * copied / copy_s / 1e9, "GB/s", known and known[1])
    to_host_s = best(lambda: on_host.copy_(source[: copied // 4]))
    yield Row(TO_HOST, copied / 4 / to_host_s / 1e9, "GB/s")
    to_store_s = best(lambda: (place.folder / "raw").write_bytes(on_host.numpy().data))
    yield Row(TO_STORE, copied / 4 / to_store_s / 1e9, "GB/s")


ROOFLINE = Case("the roofline", roofline)


def peak_tflops(place: Place) -> tuple[float, float, str]:
    """Return the measured peak, that of the datasheet or, where the device is not known, again the measured, and which
    it is."""
    row = place.find(PRODUCTS)
    if row is None or row.figure is None:
        raise SystemExit("the roofline was not measured")
    return (row.figure, row.figure / row.ratio, "datasheet") if row.ratio else (row.figure, row.figure, "measured")


def datasheet(name: str) -> tuple[float, float] | None:
    return next((peaks for part, peaks in DATASHEET.items() if part in name), None)


def beside_datasheet(what: str, figure: float, unit: str, known: float | None) -> Row:
    return (
        Row(what, figure, unit, f"datasheet, {number(known)} {unit}", figure / known)
        if known
        else Row(what, figure, unit)
    )


def products(size: int, device: str) -> float:
    """Return the TFLOP/s of products of two square matrices."""
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    times = 10

    def multiply() -> None:
        for _ in range(times):
            left @ right

    return 2.0 * size**3 * times / best(multiply) / 1e12


def best(act: Callable[[], object]) -> float:
    """Return the least seconds of five, after one that warms up."""
    return min(timed(act) for _ in range(6))
