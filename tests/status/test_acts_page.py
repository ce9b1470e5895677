"""The page acts, in a browser: with the token and after one confirmation; hostile clicks change nothing, or once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from dora.observe.requests import RequestRow
from dora.observe.snapshot import InstanceRow, Snapshot
from dora.status.server import StatusServer
from tests.escapes import HOSTILE
from tests.status.browser import Page, browser, needs_chromium
from tests.status.page_fixture import served
from tests.status.test_endpoint import TOKEN, Desk

pytestmark = [needs_chromium, pytest.mark.timeout(600)]


class SlowDesk(Desk):
    """Answers once it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = asyncio.Event()

    async def drain(self, which: str, request: object) -> str:
        said = await super().drain(which, request)  # type: ignore[arg-type]
        await self.released.wait()
        return said


@asynccontextmanager
async def run_with(shown: Snapshot, desk: Desk) -> AsyncIterator[StatusServer]:
    async with StatusServer(lambda: shown, host="127.0.0.1", port=0, requests=desk, token=TOKEN) as server:
        yield server


@pytest.fixture
def shown(middle: Snapshot) -> Snapshot:
    """Two servers, one of them drained, and what was asked, by somebody with a hostile name."""
    row = dict.fromkeys(("version", "pushing"), None) | dict.fromkeys(("residents", "kv_load", "kv_tokens"), 0)
    one = InstanceRow(instance=0, url="u0", phase="serving", slots=4, incarnation=1, asked="", **row)
    asked = RequestRow(
        at=3.0, by=f"<img src=x onerror='window.parsed = 1'>{HOSTILE}", verb="drain", target="1", refused=""
    )
    return replace(middle, instances=(one, replace(one, instance=1, url="u1", asked="drain")), requests=(asked,))


async def opened(page: Page, url: str) -> None:
    """Load the page, wait until nothing on it moves any more, and open the part with the requests."""
    await page.open(url)
    await page.until("document.getElementById('samples-note').textContent")
    assert not await page.run("document.getElementById('acts').hidden || document.getElementById('acts').open")
    await page.press("#acts summary")
    await page.until("document.getElementById('acts').open")


async def unlocked(page: Page, url: str) -> None:
    await opened(page, url)
    await page.fill("acts-token", TOKEN)
    await page.press("#acts-form button")
    await page.until("!document.getElementById('acts-panel').hidden")
    await page.fill("acts-by", "ada")


async def test_requests_are_asked_back_once_and_done_once(tmp_path: Path, shown: Snapshot) -> None:
    desk = SlowDesk()
    async with run_with(shown, desk) as server, browser(tmp_path) as page:
        await unlocked(page, server.url)
        await page.press("#acts-servers button")
        assert desk.asked == []
        assert await page.text("ask-title") == "Drain server 0?"
        await page.click("#ask-no")
        await page.until("!document.getElementById('ask').open")
        assert desk.asked == []

        await page.press("#acts-servers button")
        await page.click("#ask-yes", times=3)
        await page.run("document.getElementById('ask-yes').click()")
        desk.released.set()
        await page.until("document.getElementById('acts-said').textContent")
        assert desk.asked == [("drain", "0")]
        assert await page.text("acts-said") == "The run says: drain 0: done."
        assert desk.requests[0].by == "ada (127.0.0.1)"
        assert len(desk.requests[0].id) == 16

        for button, said in (("act-evaluate", "evaluate : done"), ("act-stop", "stop : done")):
            await page.press(f"#{button}")
            await page.click("#ask-yes")
            await page.until(f"document.getElementById('acts-said').textContent === 'The run says: {said}.'")
        await page.press("[aria-label='Take back server 1 …']")
        await page.click("#ask-yes")
        await page.until("document.getElementById('acts-said').textContent === 'The run says: add 1: done.'")
        assert len({request.id for request in desk.requests}) == len(desk.requests) == 4

        assert "granted" in await page.text("requests")
        assert not await page.run("window.parsed")
        assert page.errors == []
        assert all(request["url"].startswith(server.url) for request in page.requests)
        assert not any("open" in request["url"] or "sesame" in request["url"] for request in page.requests)
        with_token = {request["url"] for request in page.requests if "Authorization" in request["headers"]}
        paths = ("run/token", "run/evaluate", "run/stop", "instances/drain", "instances/add")
        assert with_token == {f"{server.url}/{path}" for path in paths}
        kept = "[localStorage, sessionStorage, document.cookie, document.getElementById('acts-token').value]"
        assert await page.run(f"{kept}.map((store) => store.length)") == [0, 0, 0, 0]
        await page.run("location.reload()")
        await page.until("document.readyState === 'complete' && document.getElementById('acts-panel')?.hidden")


async def test_a_question_that_follows_another_at_once_is_asked(tmp_path: Path, shown: Snapshot) -> None:
    """The browser says that a dialog was closed in an event of its own, which may come after the next question."""
    desk = Desk()
    at_once = "document.getElementById('ask-no').click(); document.getElementById('act-stop').click()"
    async with run_with(shown, desk) as server, browser(tmp_path) as page:
        await unlocked(page, server.url)
        await page.press("#act-evaluate")
        closed = "new Promise((told) => document.getElementById('ask').addEventListener('close', () => told(1)))"
        assert await page.run(f"(() => {{ const closed = {closed}; {at_once}; return closed; }})()")
        await page.click("#ask-yes")
        await page.until("document.getElementById('acts-said').textContent === 'The run says: stop : done.'")
        assert desk.asked == [("stop", "")]


async def test_without_the_right_token_nothing_can_be_asked(tmp_path: Path, shown: Snapshot) -> None:
    desk = Desk()
    async with run_with(shown, desk) as server, browser(tmp_path) as page:
        await opened(page, server.url)
        for wrong in ("guess", "ä € 日", "x" * 5000):
            await page.run("document.getElementById('acts-said').textContent = ''")
            await page.fill("acts-token", wrong)
            await page.press("#acts-form button")
            await page.until("document.getElementById('acts-said').textContent")
            assert await page.run("document.getElementById('acts-panel').hidden")
        assert desk.asked == []


async def test_a_refusal_is_shown_in_the_words_of_the_run(tmp_path: Path, shown: Snapshot) -> None:
    thirteen = replace(shown, instances=(replace(shown.instances[0], instance=13),))
    async with run_with(thirteen, Desk()) as server, browser(tmp_path) as page:
        await unlocked(page, server.url)
        await page.press("#acts-servers button")
        await page.click("#ask-yes")
        await page.until("document.getElementById('acts-said').textContent === 'Refused: instance 13: no.'")


async def test_a_run_that_has_ended_takes_no_requests(tmp_path: Path, shown: Snapshot) -> None:
    over = replace(shown, phase="finished", reason="all steps are trained")
    async with run_with(over, Desk()) as server, browser(tmp_path) as page:
        await page.open(server.url)
        await page.until("document.getElementById('connection').textContent === 'finished'")
        assert await page.run("document.getElementById('acts').hidden")
        assert "granted" in await page.text("requests")


async def test_a_page_that_only_shows_explains_the_task_and_cannot_act(tmp_path: Path) -> None:
    async with served("small") as url, browser(tmp_path) as page:
        await page.open(url)
        await page.until("document.getElementById('example').textContent")
        assert await page.text("example") == "One of its prompts: “17+5-0=?”; the expected answer: “22”."
        assert await page.run("document.getElementById('acts').hidden")
        assert not await page.run("window.parsed")
        assert all(request["url"].startswith(url) for request in page.requests)


ATTACK = """
(async () => {
  const url = %r, body = JSON.stringify({}), headers = { Authorization: "Bearer %s" };
  const json = { ...headers, "Content-Type": "application/json" };
  const made = (tag, properties) => document.body.appendChild(Object.assign(document.createElement(tag), properties));
  made("iframe", { name: "frame" });
  const form = made("form", { method: "POST", action: url, enctype: "text/plain", target: "frame" });
  form.submit();
  const tried = await Promise.allSettled([
    fetch(url, { method: "POST", headers: json, body }),
    fetch(url, { method: "POST", headers, body }),
    fetch(url, { method: "POST", mode: "no-cors", body }),
    fetch(url, { method: "POST", mode: "no-cors", credentials: "include", body: new Blob([body]) }),
  ]);
  navigator.sendBeacon(url, body);
  return tried.map((one) => one.status === "fulfilled" ? one.value.status : "blocked");
})()
"""


async def test_a_page_of_another_origin_changes_nothing_even_with_the_token(tmp_path: Path, shown: Snapshot) -> None:
    async def evil(request: web.Request) -> web.Response:
        return web.Response(text="<!doctype html><body>", content_type="text/html")

    elsewhere = web.Application()
    elsewhere.router.add_get("/", evil)
    runner = web.AppRunner(elsewhere)
    await runner.setup()
    desk = Desk()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        async with run_with(shown, desk) as server, browser(tmp_path) as page:
            await page.open(f"http://127.0.0.1:{runner.addresses[0][1]}/")
            tried = await page.run(ATTACK % (f"{server.url}/run/stop", TOKEN))
            assert set(tried) <= {"blocked", 0}  # 0: an answer that the page cannot read
            assert desk.asked == []
    finally:
        await runner.cleanup()
