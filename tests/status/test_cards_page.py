"""The cards of the page, in a browser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.status.browser import browser, needs_chromium
from tests.status.page_fixture import served

pytestmark = [needs_chromium, pytest.mark.timeout(600)]

#: Shows rows in new cards, and returns the text of the first card.
SHOW = """import('./page/curves.js').then(({ Cards }) => {
  new Cards().add(%s);
  return document.querySelector('#cards .value').textContent;
})"""


async def test_a_set_of_which_nothing_was_graded_does_not_hide_the_scores_of_another(tmp_path: Path) -> None:
    rows = [
        {"kind": "evaluation", "version": version, "name": name, "mean": mean, "is_accuracy": True}
        for version, (name, mean) in enumerate([("judged", None), ("sums", 0.25), ("sums", 0.5)])
    ]
    async with served("small") as url, browser(tmp_path) as page:
        await page.open(url)
        assert await page.run(SHOW % json.dumps(rows)) == "50 % right at v2, from 25 % at v1"
