"""The report: one file of bounded size that has its scripts, its styles and its data inside, whatever a run says."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dora.app.demo import unpack_demo
from dora.app.viewing import MAX_REPORT_BYTES, make_report
from dora.journal.run_folder import RunFolder
from dora.journal.spans import encode_line
from dora.status.assets import assets
from dora.status.report import COMPARISON, report
from tests.status.test_page_data import sample, timeline

HOSTILE = "</script><script>alert(1)</script><!--<script>\u2028 & <img src=x onerror=alert(2)> ]]>"


class Scripts(HTMLParser):
    """Collects what a browser would take for scripts, styles and addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.policy = ""
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        self.addresses += [found[name] or "" for name in ("src", "href") if name in found]
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append((found, ""))
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"] or ""

    def handle_data(self, data: str) -> None:
        if self._inside:
            attributes, text = self.scripts[-1]
            self.scripts[-1] = attributes, text + data

    def handle_endtag(self, tag: str) -> None:
        self._inside = False


def parsed(html: bytes) -> Scripts:
    parser = Scripts()
    parser.feed(html.decode())
    return parser


def data_of(html: bytes) -> dict[str, Any]:
    [text] = [text for attributes, text in parsed(html).scripts if attributes.get("id") == "recorded"]
    return dict(json.loads(text))


@pytest.fixture
def recorded(tmp_path: Path) -> RunFolder:
    return RunFolder(unpack_demo(tmp_path))


async def test_a_report_has_everything_inside_and_connects_to_nothing(recorded: RunFolder) -> None:
    html = await make_report(recorded.root)
    page = parsed(html)
    assert not [name for name in page.addresses if name.startswith(("page/", "http", "/"))]
    assert not re.findall(r"@import|url\((?!data:)", html.decode())
    assert "default-src 'none'" in page.policy
    assert "connect-src" not in page.policy
    modules = json.loads(next(text for kind, text in page.scripts if kind.get("type") == "importmap"))["imports"]
    assert {name.removeprefix("page/") for name in modules} == {
        name for name in assets() if name.endswith(".js") and name != "recorded.js"
    }
    sources = [base64.b64decode(address.partition(",")[2]).decode() for address in modules.values()]
    named = {name for source in sources for name in re.findall(r'(?:from|import)\s*"([\w./-]+)"', source)}
    assert named <= set(modules)
    assert "page/source.js" in named


async def test_its_policy_admits_its_own_scripts_only(recorded: RunFolder) -> None:
    page = parsed(await make_report(recorded.root))
    admitted = set(re.findall(r"'sha256-([^']+)'", page.policy))
    run = [text for kind, text in page.scripts if kind.get("type") != "application/json"]
    assert {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in run} == admitted
    assert "unsafe-inline" not in page.policy.partition("script-src")[2]


async def test_text_of_a_run_stays_text(recorded: RunFolder) -> None:
    plain = parsed(await make_report(recorded.root)).tags
    recorded.trajectories.write_bytes(sample(1, prompt=HOSTILE, text=HOSTILE, answer=HOSTILE))
    recorded.metrics.write_text(
        json.dumps({"kind": "step", "step": 0, "waited_for": HOSTILE}, ensure_ascii=False) + "\n"
    )
    html = await make_report(recorded.root)
    assert parsed(html).tags == plain
    found = data_of(html)
    assert found["samples"]["rows"][0]["text"] == HOSTILE
    assert found["steps"]["rows"][0]["waited_for"] == HOSTILE


async def test_a_report_of_any_run_is_bounded(recorded: RunFolder) -> None:
    steps = ({"kind": "step", "step": i, "trainer": {f"m{j}": 1 / 3 for j in range(99)}} for i in range(5_000))
    recorded.metrics.write_text("".join(json.dumps(row) + "\n" for row in steps))
    recorded.timeline.write_bytes(b"".join(map(encode_line, timeline(rows=4_000, lanes=64, folded=False))))
    recorded.trajectories.write_bytes(b"".join(sample(i, prompt="<" * 9_000, text="&" * 9_000) for i in range(200)))
    html = await make_report(recorded.root)
    assert 1_000_000 < len(html) <= MAX_REPORT_BYTES
    found = data_of(html)
    assert found["samples"]["rows"][-1]["trajectory"] == 199
    assert found["steps"]["rows"][-1]["step"] == 4_999
    assert found["timeline"]["rows"]


def test_text_of_a_comparison_is_never_markup() -> None:
    plain, hostile = (
        report(assets(), {"info": b"{}", "comparison": json.dumps({"runs": [text]}).encode()}, index=COMPARISON)
        for text in ("a run", HOSTILE)
    )
    assert parsed(hostile).tags == parsed(plain).tags
    assert data_of(hostile)["comparison"]["runs"] == [HOSTILE]
    assert b'import "page/compare.js"' in plain


def test_a_report_answers_every_question_of_the_page() -> None:
    """What the page fetches is what a report has; `recorded.js` finds it by the last part of the address."""
    scripts = "\n".join(
        text.decode() for name, text in assets().items() if name.endswith(".js") and name != "compare.js"
    )
    asked = set(re.findall(r'"data/(\w+)"', scripts))
    found = data_of(report(assets(), dict.fromkeys(asked, b'{"live":true}')))
    assert {"status", "info", "groups", "steps", "timeline", "samples"} == asked == set(found)
