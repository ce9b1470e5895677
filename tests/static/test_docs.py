"""Files, commands and settings named in README and docs exist, links lead somewhere, and the example of a job loads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from dora.cli.app import app
from dora.config.load import load
from dora.config.schema import Config

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "bench" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
OWN_JOB = ROOT / "docs/how-to/own-job.md"
#: A path with a folder, or a page by its name; from the root, from dora/, or from where it is named.
NAMED_FILE = re.compile(r"(?<![\w./<>{}-])(?:[a-z_-]+/)+[\w.-]+\.(?:py|md|toml|html)\b|\b[A-Z-]{4,}\.md\b")
#: `dora COMMAND ...` in a line of text or of code, in its quotes, up to a comment.
COMMAND = re.compile(r"(?:`|^(?:    )?)dora ([a-z]+)((?:[^`\n#]|\n(?!\n))*?)(?=`|#|$)", re.MULTILINE)
#: The target of a link or picture, without its heading, and the heading.
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)")
#: A setting with its value, as in `trainer.updates = 2` or `--set run.steps=N`.
SETTING = re.compile(rf"\b((?:{'|'.join(Config.model_fields)})\.[a-z_.]+) ?= ?")
#: In an example they are the reader's own.
READERS_OWN = {"data", "models"}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.*)", text, re.MULTILINE)]
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def dangling_links(page: Path) -> list[str]:
    """The links of a page that lead to no file, or to no heading in it."""
    links = [(page.parent / target if target else page, heading) for target, heading in LINK.findall(page.read_text())]
    return [
        f"{target.name}#{heading}"
        for target, heading in links
        if not target.exists() or (heading and heading not in anchors(target))
    ]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_a_file_and_to_a_heading_in_it(page: Path) -> None:
    assert dangling_links(page) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[a](SCALE.md) [b](SCALE.md#two-words) [c](#here) ![d](SCALE.md) [e](https://example.org/x)", []),
        ("[a](gone.svg)", ["gone.svg#"]),
        ("[a](gone.svg#here)", ["gone.svg#here"]),
        ("[a](SCALE.md#three)", ["SCALE.md#three"]),
        ("[a](#two-words)", ["STATES.md#two-words"]),
        ("[over\ntwo lines](gone.svg)", ["gone.svg#"]),
        ("```\n# code\n```\n[a](#code)", ["STATES.md#code"]),
    ],
)
def test_a_dangling_link_is_found(text: str, found: list[str], tmp_path: Path) -> None:
    (tmp_path / "SCALE.md").write_text("# Other\n\n## Two [words](STATES.md)\n")
    (tmp_path / "STATES.md").write_text(f"# Here\n\n{text}\n")
    assert dangling_links(tmp_path / "STATES.md") == found


@pytest.mark.parametrize("text", ["`dora run x` or `dora see`", "    dora run # now", "```\ndora run --set a=1\n```"])
def test_commands_are_found_in_text_in_indented_lines_and_in_fences(text: str) -> None:
    assert COMMAND.findall(text)[0][0] == "run"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    named = {name for name in NAMED_FILE.findall(page.read_text()) if name.split("/")[0] not in READERS_OWN}
    homes = (ROOT, ROOT / "dora", ROOT / "docs", ROOT / "bench", page.parent)
    assert {name for name in named if not any((home / name).is_file() for home in homes)} == set()


def test_the_example_of_a_job_of_your_own_is_a_config(tmp_path: Path) -> None:
    [example] = re.findall(r"```toml\n(.*?)```", OWN_JOB.read_text(), re.DOTALL)
    path = tmp_path / "job.toml"
    path.write_text(example)
    config = load(path, environ={})
    assert config.model.path == "Qwen/Qwen3-0.6B"


def test_the_table_of_commands_has_every_command() -> None:
    listed = set(re.findall(r"^\| `dora (\w+)", (ROOT / "docs/COMMANDS.md").read_text(), re.MULTILINE))
    commands = get_command(app).commands.items()  # type: ignore[attr-defined]
    assert listed == {name for name, command in commands if not command.hidden}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_that_a_page_names_has_its_options(page: Path) -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    for name, rest in COMMAND.findall(page.read_text()):
        assert name in commands
        below = getattr(commands[name], "commands", {}).values()  # of a group
        known = {option for one in (commands[name], *below) for given in one.params for option in given.opts}
        own = rest.partition(" -- ")[0]  # what follows is a command of others
        assert set(re.findall(r"(?<!\S)--[a-z-]+", own)) <= known, f"dora {name}{rest}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_setting_with_a_value_that_a_page_names_is_there(page: Path) -> None:
    for key in SETTING.findall(page.read_text()):
        section, *names = key.split(".")
        model: Any = Config.model_fields[section].annotation
        if not (section == "objective" and names[0] == "loss"):
            assert names[0] in model.model_fields, key


def test_the_example_of_a_rule_in_contributing_is_a_test_that_passes() -> None:
    rule, looking = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(rule, names)
    [example] = [value for name, value in names.items() if name.startswith("test_")]
    example()
    assert len(rule.split("def ")[1].strip().splitlines()) <= 10
    exec("\n".join(line for line in looking.splitlines() if line.startswith("from ")), {})
