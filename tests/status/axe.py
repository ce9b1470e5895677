"""What axe-core finds in a page of the browser: `impact rule: element` for each place that somebody could not use."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from tests.status.browser import Page

#: Of the packages of pip this has the newest axe-core. Only the file is used, and not Playwright.
_AXE: Final = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
_FOUND: Final = """
axe.run().then((result) => result.violations.flatMap((rule) =>
  rule.nodes.map((node) => `${rule.impact} ${rule.id}: ${node.target.join(" ")} ${node.html.slice(0, 200)}`)))
"""


async def findings(page: Page) -> list[str]:
    """Return what is wrong with the page as it is now; the rules are those that axe-core has on by default."""
    await page.run(f"{_AXE}; 0")
    found = await page.run(_FOUND)
    assert isinstance(found, list)
    return found
