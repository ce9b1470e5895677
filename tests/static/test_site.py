"""The site of docs/ is built without a warning, has every document, and loads nothing from elsewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.status.axe import findings
from tests.status.browser import browser, needs_chromium

ROOT = Path(__file__).parents[2]
#: What a browser loads of its own accord, by tag.
LOADED = {"script": "src", "img": "src", "source": "src", "iframe": "src", "link": "href", "use": "href"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "zensical.toml", folder)
    build(folder)
    return folder / "site"


def build(folder: Path) -> None:
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=100)


def test_every_document_has_a_place_in_the_navigation() -> None:
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    placed = [
        page for section in nav for pages in section.values() for page in ([pages] if isinstance(pages, str) else pages)
    ]
    assert sorted(placed) == sorted(
        path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")
    )


def test_a_link_to_a_page_that_is_not_there_fails(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    page = "GONE"
    (tmp_path / "docs/README.md").write_text(f"[gone]({page}.md)\n")
    (tmp_path / "zensical.toml").write_text('[project]\nsite_name = "x"\n')
    with pytest.raises(subprocess.CalledProcessError):
        build(tmp_path)


def test_every_column_of_a_table_has_a_name(site: Path) -> None:
    nameless = re.compile(r"<th[^>]*>\s*</th>")
    pages = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    assert any("<th>" in text for text in pages.values())
    assert [page.name for page, text in pages.items() if nameless.search(text)] == []


class Loads(HTMLParser):
    """Collects what a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "link" and values.get("rel") in ("canonical", "next", "prev", "alternate"):
            return
        if tag in LOADED and (address := values.get(LOADED[tag])):
            self.found.append(address)


def loads(page: Path) -> Iterator[str]:
    parser = Loads()
    parser.feed(page.read_text(encoding="utf-8"))
    yield from parser.found


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    pages = [*site.rglob("*.html")]
    assert len(pages) > 30
    for page in pages:
        found = [*loads(page)]
        assert any(address.endswith(".js") for address in found), "the parser sees what is loaded"
        assert [address for address in found if "//" in address] == [], page
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert "url(http" not in styles
    assert "@import" not in styles


@pytest.mark.deep
@needs_chromium
async def test_a_browser_asks_nobody_else(site: Path, tmp_path: Path) -> None:
    with served(site) as own:
        async with browser(tmp_path) as page:
            for name in ("index.html", "STATES.html", "COMPARE.html", "explanation/idle-gpus.html"):
                await page.open(own + name)
            asked = [request["url"] for request in page.requests]
            assert any(url.endswith(".svg") for url in asked)
            assert [url for url in asked if not url.startswith((own, "data:", "blob:"))] == []
            assert page.errors == []


#: What axe-core finds in the theme and neither a setting nor a style can mend, as the elements are made by its script:
#: - the part of a block of code that has the button to copy it is a `nav` without a name;
#: - what a wide table is scrolled in cannot be focused; browsers let the keys scroll such a part by themselves.
OF_THE_THEME = (
    re.compile(r"moderate landmark-unique: #__code_\d+ > \.md-code__nav "),
    re.compile(r"serious scrollable-region-focusable: \.md-typeset__scrollwrap\S* <"),
)
PAGES = ("index", "tutorials/first-run", "lessons/cost", "explanation/idle-gpus", "OBJECTIVES", "SIMULATION", "404")


@pytest.mark.deep
@needs_chromium
async def test_axe_finds_nothing_in_pages_of_each_kind(site: Path, tmp_path: Path) -> None:
    with served(site) as own:
        async with browser(tmp_path) as page:
            for name in PAGES:
                await page.open(f"{own}{name}.html")
                of_ours = [it for it in await findings(page) if not any(part.match(it) for part in OF_THE_THEME)]
                assert of_ours == [], name


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serve the site; yield its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""
