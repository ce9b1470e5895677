"""docs/METRICS.md matches the tables that it is written from."""

from __future__ import annotations

from tests.static.metrics import PAGE, render


def test_the_page_is_written_from_the_present_tables() -> None:
    assert PAGE.read_text() == render(), "run python -m tests.static.metrics"
