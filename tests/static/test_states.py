"""docs/STATES.md matches the transition tables."""

from __future__ import annotations

from tests.static.states import PAGE, render


def test_the_page_is_drawn_from_the_present_tables() -> None:
    assert PAGE.read_text() == render(), "run python -m tests.static.states"
