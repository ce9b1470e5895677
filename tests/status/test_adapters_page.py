"""The page of a run with adapters, in a browser: a lane and a table with several versions of a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.status.browser import browser, needs_chromium
from tests.status.page_fixture import made, served

pytestmark = [needs_chromium, pytest.mark.timeout(600)]

#: The colors in a column of the canvas.
COLORS = """(() => {
  const canvas = document.getElementById("lanes");
  const data = canvas.getContext("2d").getImageData(Math.round(0.6 * canvas.width), 0, 1, canvas.height).data;
  const hex = (byte) => byte.toString(16).padStart(2, "0");
  const rgb = (y) => [...data.slice(4 * y, 4 * y + 3)];
  const colors = Array.from({ length: canvas.height }, (_, y) => `#${rgb(y).map(hex).join("")}`);
  return [...new Set(colors)];
})()"""


async def test_a_lane_has_the_versions_that_share_the_server_and_the_table_their_requests(tmp_path: Path) -> None:
    async with served("adapters") as url, browser(tmp_path) as page:
        await page.open(url)
        await page.until("document.getElementById('example').textContent")
        await page.run("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
        await page.until("document.querySelector('#instances td')")
        cells = "[...document.querySelectorAll('#instances tr')[1].cells].map((cell) => cell.textContent)"
        newest = made("adapters")["status"].newest_version
        held = {-3: "unloading", -2: "8", -1: "5", 0: "2", 1: "loading"}
        assert (await page.run(cells))[3].split() == [
            part for version, what in held.items() for part in (f"v{newest + version}", what)
        ]
        await page.run("document.getElementById('whole').click()")
        colors = "import('./page/colors.js').then((colors) => colors.PALETTE)"
        bands = {*await page.run(COLORS)} & {*await page.run(colors)}
        assert len(bands) == 3, bands
        assert page.errors == []
