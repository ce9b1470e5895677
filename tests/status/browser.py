"""A headless Chromium, driven over its DevTools protocol: one page, its requests, and what it logs."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

CHROMIUM: Final = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: chromium)")
_PATIENCE_S: Final = 60.0
_POLL_S: Final = 0.05


class Page:
    """A tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.requests: list[dict[str, Any]] = []  #: url, method, headers
        self.errors: list[str] = []  #: uncaught exceptions, and lines of the console that are errors
        self._socket = socket
        self._session: str | None = None
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def open(self, url: str) -> None:
        """Load a page in a new tab."""
        target = await self._call("Target.createTarget", url="about:blank")
        attached = await self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self._call(f"{domain}.enable")
        await self._call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def run(self, script: str) -> Any:
        """Evaluate an expression, or a promise, in the page."""
        found = await self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, (script, found["exceptionDetails"])
        return found["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until an expression is true; while a page is being loaded it is not."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while not await self._is_true(script):  # noqa: ASYNC110 - another process
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise AssertionError(f"not within {_PATIENCE_S:g} s: {script}; errors: {self.errors}") from None

    async def _is_true(self, script: str) -> bool:
        found = await self._call("Runtime.evaluate", expression=f"Boolean({script})", returnByValue=True)
        return bool(found.get("result", {}).get("value") is True)

    async def prefer(self, scheme: str) -> None:
        """Be the browser of somebody who prefers `light` or `dark`."""
        preference = {"name": "prefers-color-scheme", "value": scheme}
        await self._call("Emulation.setEmulatedMedia", features=[preference])

    async def fill(self, id: str, text: str) -> None:
        await self.run(f"document.getElementById({json.dumps(id)}).value = {json.dumps(text)}")

    async def press(self, selector: str) -> None:
        """Click an element wherever it is: what is loaded meanwhile may move it."""
        await self.run(f"document.querySelector({json.dumps(selector)}).click()")

    async def click(self, selector: str, *, times: int = 1) -> None:
        """Click with the mouse, as fast as it goes."""
        place = await self.run(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)});"
            " node.scrollIntoView({ block: 'center', behavior: 'instant' });"
            " const { x, y, width, height } = node.getBoundingClientRect();"
            " return [x + width / 2, y + height / 2]; })()"
        )
        for count in range(1, times + 1):
            for kind in ("mousePressed", "mouseReleased"):
                at = {"x": place[0], "y": place[1], "button": "left", "clickCount": count}
                await self._call("Input.dispatchMouseEvent", type=kind, **at)

    async def text(self, id: str) -> str:
        return str(await self.run(f"document.getElementById({json.dumps(id)}).textContent"))

    async def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        session = {"sessionId": self._session} if self._session else {}
        await self._socket.send_json({"id": number, "method": method, "params": parameters, **session})
        return await answer

    async def listen(self) -> None:
        async for message in self._socket:
            found = message.json()
            match found.get("method"):
                case None:
                    answer = self._answers.pop(found["id"])
                    if not answer.done():
                        answer.set_result(found.get("result") or {"error": found.get("error")})
                case "Network.requestWillBeSent":
                    self.requests.append(found["params"]["request"])
                case "Runtime.exceptionThrown":
                    self.errors.append(str(found["params"]["exceptionDetails"]))
                case "Log.entryAdded" if found["params"]["entry"]["level"] == "error":
                    self.errors.append(found["params"]["entry"]["text"])


@asynccontextmanager
async def browser(home: Path) -> AsyncIterator[Page]:
    """A tab of a new browser whose profile is in `home`."""
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run")
    mouse = "--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4"
    quiet = ("--disable-background-networking", "--disable-component-update", "--disable-sync")
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, *options, mouse, *quiet, f"--user-data-dir={home}", "about:blank", stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    listening = None
    try:
        async with asyncio.timeout(_PATIENCE_S):
            line = ""
            while not line.startswith("DevTools listening on "):
                line = (await process.stderr.readline()).decode()
                assert line, "Chromium ended"
        drained = asyncio.create_task(process.stderr.read())
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(line.split()[-1], max_msg_size=0) as socket,
        ):
            page = Page(socket)
            listening = asyncio.create_task(page.listen())
            yield page
    finally:
        process.kill()
        await process.wait()
        await asyncio.gather(drained, return_exceptions=True)
        if listening is not None:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
