"""The page of a run as one file that opens offline: it contains its scripts, its styles and the data it shows.

`page/recorded.js` answers the page's requests from this data. Invariant: text of a run cannot end the element that it
is in, and the content policy admits only the page's own scripts, by their hashes, and no connection.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

INDEX: Final = "index.html"
#: The page of `dora compare`, which asks for `comparison`.
COMPARISON: Final = "compare.html"
RECORDED: Final = "recorded.js"
_FILE: Final = r'(?:src|href)="page/([\w.-]+)"'
_STYLE: Final = re.compile(rf'<link rel="stylesheet" {_FILE}>')
_ICON: Final = re.compile(rf'<link rel="icon" {_FILE}[^>]*>')
_MODULE: Final = re.compile(rf'<script type="module" {_FILE}></script>')
_IMPORT: Final = re.compile(r'((?:\bfrom|\bimport)\s*)"\./([\w.-]+)"')


def report(pages: Mapping[str, bytes], answers: Mapping[str, bytes], *, index: str = INDEX) -> bytes:
    """Return the page with the answers to its requests. `pages`: files of the page by name. `answers`: also by name.
    `index`: the file that is the page."""
    recorded = {name: msgspec.Raw(body) for name, body in answers.items()}
    data = _harmless(msgspec.json.encode(recorded).decode(errors="replace"))
    modules = [name for name in sorted(pages) if name.endswith(".js") and name != RECORDED]
    imports = {f"page/{name}": _module(pages[name].decode()) for name in modules}
    import_map = _harmless(msgspec.json.encode({"imports": imports}).decode())
    page = pages[index].decode()
    page = _STYLE.sub(lambda found: f"<style>{pages[found[1]].decode()}</style>", page)
    page = _ICON.sub("", page)
    page = _MODULE.sub(lambda found: f'<script type="module">import "page/{found[1]}";</script>', page)
    scripts = (
        f'<script type="application/json" id="recorded">{data}</script>'
        f"<script>{pages[RECORDED].decode()}</script>"
        f'<script type="importmap">{import_map}</script>'
    )
    head, rest = page.split("<meta", 1)
    page = head + _policy(scripts + page) + scripts + "\n<meta" + rest
    return page.encode()


def _module(source: str) -> str:
    """Return an address that contains a module. The import map resolves its imports, as the module is in no folder."""
    found = _IMPORT.sub(r'\1"page/\2"', source).encode()
    return f"data:text/javascript;base64,{base64.b64encode(found).decode()}"


def _harmless(json: str) -> str:
    """Return the same JSON without a character that HTML could take for markup."""
    return json.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(html: str) -> str:
    allowed = " ".join(f"'sha256-{digest}'" for digest in _digests(html))
    return (
        '<meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        f"img-src data:; script-src data: {allowed}; base-uri 'none'; form-action 'none'\">\n"
    )


def _digests(html: str) -> Iterator[str]:
    """Yield the hashes of the scripts that the page executes."""
    for kind, script in re.findall(r"<script([^>]*)>(.*?)</script>", html, flags=re.DOTALL):
        if "application/json" not in kind:
            yield base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
