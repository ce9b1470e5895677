"""The page: how it is served, what it may not contain, and that it reads only fields that a run sends."""

from __future__ import annotations

import itertools
import re
from collections.abc import AsyncIterator, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Final

import aiohttp
import msgspec
import pytest

from dora.core.admission import Refusal
from dora.journal.deep import KeptPart, KeptTrajectory
from dora.journal.spans import TimelineRow
from dora.observe import activities, facts, observed, scores, snapshot
from dora.observe.drift import Alarm
from dora.observe.episodes import EnvironmentRow, EpisodeStats
from dora.observe.groups import GroupRow
from dora.observe.requests import RequestRow
from dora.observe.snapshot import Snapshot
from dora.status import data
from dora.status.data import Info
from dora.status.server import StatusServer
from dora.trainer.metrics import LAGGED, WHOLE
from tests.status.page_fixture import made
from tests.status.test_endpoint import TOKEN, Desk

PAGE: Final = Path(data.__file__).parent / "page"
#: Files of others, as they were published.
VENDORED: Final = {"uPlot.js", "uPlot.css", "uPlot-LICENSE.txt"}
OWN: Final = sorted(path for path in PAGE.iterdir() if path.name not in VENDORED)
SCRIPT: Final = "\n".join(path.read_text() for path in OWN if path.suffix == ".js")
TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
    ".svg": "image/svg+xml",
}


@pytest.fixture
async def url(middle: Snapshot) -> AsyncIterator[str]:
    """Where a run serves the page."""
    async with StatusServer(lambda: middle, host="127.0.0.1", port=0, requests=Desk(), token=TOKEN) as server:
        yield server.url


async def test_every_file_is_served_with_its_type_and_policy(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        for path in PAGE.iterdir():
            async with session.get(f"{url}/page/{path.name}") as answer:
                assert answer.status == 200, path.name
                assert answer.headers["Content-Type"].split(";")[0] == TYPES[path.suffix].split(";")[0]
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                policy = dict(
                    part.strip().split(" ", 1) for part in answer.headers["Content-Security-Policy"].split(";")
                )
                assert {policy[f"{kind}-src"] for kind in ("script", "style", "connect")} == {"'self'"}
                assert {policy["default-src"], policy["frame-ancestors"], policy["base-uri"]} == {"'none'"}
                assert await answer.read() == path.read_bytes()
        async with session.get(url) as answer:
            assert answer.headers["Content-Type"] == TYPES[".html"]
            assert await answer.text() == (PAGE / "index.html").read_text()


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fserver.py", "%2e%2e%2fserver.py", "..", ".", "%00"])
async def test_nothing_else_is_served(url: str, name: str) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/page/{name}") as answer:
        assert answer.status in (400, 404) or await answer.text() == (PAGE / "index.html").read_text()


def test_the_page_names_only_its_own_files() -> None:
    for path in OWN:
        text = re.sub(r"http://(www\.w3\.org/2000/svg|report/)", "", path.read_text())  # names, not addresses
        assert not re.search(r"https?://|\burl\(|@import|//cdn", text), path.name
        found = re.findall(r"""(?:src|href)="([^"]+)"|from "([^"]+)\"""", text)
        for name in map("".join, found):
            if name.startswith("#"):
                assert f'id="{name[1:]}"' in text, "a link to a part of the page"
                continue
            home = PAGE if name.startswith("./") else PAGE.parent
            assert name in ("status", "metrics", "healthz") or (home / name).is_file(), (path.name, name)
            assert not name.startswith("/"), "an absolute address does not work behind a path prefix"


def test_data_is_never_parsed_as_markup_or_code() -> None:
    parsing = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|Fragment\(|\beval\b|new Function|srcdoc"
    )
    assert not re.findall(parsing, SCRIPT)
    vendored = (PAGE / "uPlot.js").read_text()
    assert not re.findall(parsing, vendored)
    for page in PAGE.glob("*.html"):
        html = page.read_text()
        assert not re.findall(r"<style|\bstyle=|\bon[a-z]+=|javascript:", html)
        assert re.findall(r"<script[^>]*>([^<]*)</script>", html) == [""]


def test_every_element_that_a_script_names_is_in_its_page() -> None:
    scripts = {path.name: path.read_text() for path in OWN if path.suffix == ".js"}
    compare = scripts.pop("compare.js")
    for page, script, least in (("index.html", "\n".join(scripts.values()), 20), ("compare.html", compare, 5)):
        ids = set(re.findall(r'\bid="([\w-]+)"', (PAGE / page).read_text()))
        named = set(re.findall(r'\b(?:byId|say|fill)\("([\w-]+)"', script))
        assert len(named) > least
        assert named <= ids


def read(letter: str) -> set[str]:
    """The fields that the page reads from the object that it calls by this letter."""
    found = set(re.findall(rf"(?<![\w.$]){letter}\??\.([a-z_]\w*)", SCRIPT))
    return {name for name in found if name.islower()} - {"map", "length"}  # methods have capitals


def names(kind: type) -> set[str]:
    return {
        field.name for field in (msgspec.structs.fields(kind) if issubclass(kind, msgspec.Struct) else fields(kind))
    }


#: Rows of metrics.jsonl, whose kind and trainer's metrics have no line in the tables.
STEP_FIELDS: Final = {*observed.row_figures(), "kind", "trainer", "version", "episodes"}
FIELDS: Final = {
    "s": names(Snapshot),
    "v": names(snapshot.VersionRow),
    "i": names(snapshot.InstanceRow),
    "a": names(Alarm),
    "r": names(EnvironmentRow),
    "p": names(EpisodeStats),
    "x": STEP_FIELDS,
    "e": {*scores.row_figures()} & names(scores.Score),
    "t": names(TimelineRow),
    "g": names(GroupRow),
    "k": {*names(KeptTrajectory), "num_tokens", "num_parts"},  # of all of them, as the reply has the first ones
    "u": names(KeptPart),
    "q": names(RequestRow),
}


@pytest.mark.parametrize("letter", FIELDS)
def test_the_page_reads_only_fields_that_exist(letter: str) -> None:
    found = read(letter)
    assert found
    assert found <= FIELDS[letter], found - FIELDS[letter]


def test_the_page_reads_only_nested_fields_that_exist() -> None:
    assert read("info") == {"live", "audit", "takes_requests"} <= names(Info)
    nested = {"trainer": snapshot.TrainerRow, "counts": snapshot.Counts, "tokens": facts.TokenAccount}
    for name, kind in nested.items():
        assert set(re.findall(rf"\bs\.{name}\.([a-z_]\w*)", SCRIPT)) <= names(kind), name
    found = re.search(r"const colors = .*?\{(.*?)\} = s\.tokens", SCRIPT)
    assert found is not None
    assert set(re.findall(r"(\w+)(?::|,| *$)", found[1])) - {"inFlight"} == names(facts.TokenAccount)
    counters = re.search(r"const CONSTRAINTS = \{(.*?)\n\};", SCRIPT, re.DOTALL)
    assert counters is not None
    assert set(re.findall(r'", "(\w+_\w+)", "', counters[1])) == {
        "version_conflicts",
        "scheduling_aborts",
        "staleness_violations",
    }


def test_every_metric_of_the_trainer_that_a_card_shows_exists() -> None:
    wanted = set(re.findall(r"[\"`](?:all|lag=\$\{staleness\})/(\w+)[\"`]", SCRIPT))
    assert {"entropy", "mismatch_k3", "truncated_frac"} <= wanted
    assert wanted <= {*LAGGED, *WHOLE}


def words(name: str) -> set[str]:
    found = re.search(rf"export const {name} = \{{(.*?)\n\}};", (PAGE / "words.js").read_text(), re.DOTALL)
    assert found is not None
    return set(re.findall(r'"?([\w:]+)"?: "', found[1]))


def test_there_are_words_for_every_activity_and_cause() -> None:
    whole: dict[str, Iterable[str]] = {
        "RANK": [name for name in activities.RANK if "<" not in name],
        "INSTANCE": [name for name in activities.INSTANCE if "<" not in name],
        "WAITING": activities.WAITING,
        "EMPTY": [*activities.EMPTY, *(refusal.name.lower() for refusal in Refusal)],
    }
    for name, wanted in whole.items():
        assert words(name) == set(wanted), name


def test_the_fixture_has_the_rows_of_a_run() -> None:
    small = made("small")
    steps = [row for row in small["steps"]["rows"] if row["kind"] == "step"]
    assert set(steps[0]) <= STEP_FIELDS
    assert set(small["groups"][0]) == names(GroupRow)
    assert made("large")["status"].steps_trained == 10_000
    assert max(len(made(name)["timeline"]["rows"]) for name in ("small", "large")) <= 4_000


# -- colors ----------------------------------------------------------------------------------------------------------

#: What the eye sees without one kind of cone (Machado, Oliveira and Fernandes 2009, severity 1), in linear RGB.
EYES: Final = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
#: CIE76 difference of a glance; 2.3 is just noticeable.
CLEAR: Final = 20.0


def lab(color: str, eye: str) -> tuple[float, float, float]:
    """CIELAB coordinates of a color as an eye sees it."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    r, g, b = (min(1.0, max(0.0, sum(m * c for m, c in zip(row, linear, strict=True)))) for row in EYES[eye])
    xyz = ((0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505, 0.2126 * r + 0.7152 * g + 0.0722 * b)
    z = (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (*xyz, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def test_any_two_colors_of_versions_differ_for_every_eye() -> None:
    found = re.search(r"PALETTE = \[(.*?)\]", SCRIPT)
    assert found is not None
    palette = re.findall(r"#[0-9a-f]{6}", found[1])
    assert len(palette) == 8
    for eye in EYES:
        for one, other in itertools.combinations(palette, 2):
            distance = sum((a - b) ** 2 for a, b in zip(lab(one, eye), lab(other, eye), strict=True)) ** 0.5
            assert distance >= CLEAR, (eye, one, other, distance)
