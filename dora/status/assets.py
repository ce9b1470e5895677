"""The page for people: the files in dora/status/page, served as they are.

Invariant: a browser loads nothing from elsewhere and runs no script but these files; data is fetched by relative
addresses, so that the page works behind a path prefix. A server of the page also serves `data/*`.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Final

from aiohttp import web

#: Content types by the end of the name.
TYPES: Final = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
#: Scripts, styles, pictures and data come from here; the page may not be framed.
POLICY: Final = (
    "default-src 'none'; connect-src 'self'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(router: web.UrlDispatcher) -> None:
    """Serve the page at `/` and its files at `/page/<name>`."""
    router.add_get("/", _page)
    router.add_get("/page/{name}", _page)


@cache
def assets() -> dict[str, bytes]:
    """Return the files of the page by name."""
    return {file.name: file.read_bytes() for file in files("dora.status").joinpath("page").iterdir() if file.is_file()}


async def _page(request: web.Request) -> web.Response:
    name = request.match_info.get("name", "index.html")
    body = assets().get(name)
    if body is None:
        raise web.HTTPNotFound(text="there is no such file\n")
    return web.Response(body=body, content_type=TYPES[name[name.rindex(".") :]], charset="utf-8", headers=_HEADERS)
