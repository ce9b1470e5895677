"""axe-core finds nothing in the page of a run, in light and dark: as it is loaded, with its details, and as it acts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from dora.observe.requests import RequestRow
from dora.observe.snapshot import Snapshot
from tests.status.axe import findings
from tests.status.browser import browser, needs_chromium
from tests.status.page_fixture import made, served
from tests.status.test_acts_page import run_with, unlocked
from tests.status.test_endpoint import Desk

pytestmark = [needs_chromium, pytest.mark.timeout(600), pytest.mark.parametrize("scheme", ["light", "dark"])]


@pytest.fixture
def acting() -> Snapshot:
    """A run of which a server is drained, with a request that was granted and one that was refused."""
    small: Snapshot = made("small")["status"]
    granted = RequestRow(at=3.0, by="ada (127.0.0.1)", verb="drain", target="1", refused="")
    refused = replace(granted, at=9.0, verb="stop", target="", refused="the run has ended: nothing was changed")
    first, second, *others = small.instances
    servers = (first, replace(second, asked="drain"), *others)
    return replace(small, instances=servers, requests=(granted, refused))


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """Where a small run with charts, groups and samples is served."""
    async with served("small") as url:
        yield url


async def test_nothing_is_found_in_a_run_and_its_details(tmp_path: Path, url: str, scheme: str) -> None:
    async with browser(tmp_path) as page:
        await page.open(url)
        await page.prefer(scheme)
        await page.until("document.getElementById('example').textContent")
        assert await findings(page) == []
        await page.run("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
        await page.until("document.querySelector('#instances td')")
        assert await findings(page) == []


async def test_nothing_is_found_in_the_controls_and_the_dialog(tmp_path: Path, acting: Snapshot, scheme: str) -> None:
    async with run_with(acting, Desk()) as server, browser(tmp_path) as page:
        await unlocked(page, server.url)
        await page.prefer(scheme)
        assert await findings(page) == []
        await page.press("#act-stop")
        await page.until("document.getElementById('ask').open")
        assert await findings(page) == []


async def test_what_is_wrong_is_found(tmp_path: Path, url: str, scheme: str) -> None:
    pale = {"light": "#ccc", "dark": "#444"}[scheme]
    async with browser(tmp_path) as page:
        await page.open(url)
        await page.prefer(scheme)
        await page.until("document.getElementById('example').textContent")
        await page.run(f"document.getElementById('example').style.color = '{pale}'")
        await page.run("document.querySelector('main').append(document.createElement('img'))")
        await page.run("document.getElementById('newer').textContent = ''")
        rules = {finding.split(":")[0] for finding in await findings(page)}
        assert rules == {"serious color-contrast", "critical image-alt", "critical button-name"}
