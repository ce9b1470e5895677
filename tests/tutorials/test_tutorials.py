"""Every tutorial does what it says: its commands and programs are executed in order, and say what the page shows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.runs import environment
from tests.tutorials.reader import ROOT, Fence, Reader, fences, is_due, is_in

PAGES = sorted((ROOT / "docs/tutorials").glob("*.md"))


def reader(folder: Path) -> Reader:
    return Reader(folder, environ={**environment(), "OMP_NUM_THREADS": "1"})


@pytest.mark.deep
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_reader_can_follow_the_page(page: Path, tmp_path: Path) -> None:
    following = reader(tmp_path)
    for fence in fences(page.read_text()):
        following.follow(fence)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_says_what_the_reader_will_have_and_how_long_it_takes(page: Path) -> None:
    beginning = page.read_text().split("\n## ")[0]
    assert "At the end" in beginning
    assert "minutes" in beginning
    assert any(fence.language == "sh" and not fence.title for fence in fences(page.read_text()))


@pytest.mark.parametrize(
    "fence",
    [
        pytest.param(Fence("sh", "", "false\ntrue\n"), id="a command that fails before others"),
        pytest.param(Fence("sh", "", "echo $no_such_variable\n"), id="a variable that is not there"),
        pytest.param(Fence("python", "", "assert False\n"), id="a program that fails"),
        pytest.param(Fence("sh", "press Ctrl-C when it says: b", "echo a\n"), id="words that are not said"),
        pytest.param(
            Fence("sh", "press Ctrl-C when it says: a", "trap 'exit 3' INT; echo a; sleep 9\n"), id="a bad end"
        ),
        pytest.param(Fence("sh", "on two hosts", "dora run job.toml\n"), id="a job elsewhere that nobody checked"),
        pytest.param(Fence("sh", "later", "true\n"), id="a title of no meaning"),
        pytest.param(Fence("output", "", "hello\n"), id="an output that nobody saw"),
        pytest.param(Fence("console", "", "$ true\n"), id="an unknown language"),
    ],
)
def test_what_does_not_work_is_noticed(fence: Fence, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        reader(tmp_path).follow(fence)


@pytest.mark.parametrize(
    "page",
    ["1. Indented\n   ```sh\n   true\n   ```\n", "```\ntrue\n```\n", "```sh linenums=1\ntrue\n```\n", "```sh\ntrue\n"],
    ids=["indented", "no language", "another option", "open"],
)
def test_no_fence_is_passed_over(page: str) -> None:
    with pytest.raises(AssertionError):
        fences(page)


def test_files_are_written_programs_run_and_ctrl_c_is_pressed(tmp_path: Path) -> None:
    page = """
```json title="data/rows.jsonl"
{"a": 1}
```

```sh
cat data/rows.jsonl launch/configs/jsonl.toml | head -1
```

```python
print(open("data/rows.jsonl").read().strip(), 17)
```

```sh title="press Ctrl-C when it says: ready"
python -c "import time; print('ready', flush=True); time.sleep(60)"
```

```output
{"a": 1} 99
KeyboardInterrupt
```
"""
    following = reader(tmp_path)
    for fence in fences(page):
        following.follow(fence)
    with pytest.raises(AssertionError):
        following.follow(Fence("output", "", "ready\n"))  # it was said before the last output


def test_ctrl_c_is_pressed_in_a_terminal_and_nothing_else_has_one(tmp_path: Path) -> None:
    following = reader(tmp_path)
    following.follow(Fence("sh", "", "! test -t 1\n"))
    following.follow(
        Fence("sh", "press Ctrl-C when it says: ready", "test -t 1\nprintf '\\033[2Krea\\033[1mdy'\nsleep 60\n")
    )
    following.follow(Fence("output", "", "ready\n"))


@pytest.mark.parametrize(
    ("words", "said", "due"),
    [
        ("ready", "already", True),
        ("ready", "read", False),
        ("6 of 16 steps", "5 of 16 steps", False),
        ("6 of 16 steps", "6 of 16 steps", True),
        ("6 of 16 steps", "5 of 16 steps, 8 of 16 steps", True),  # a view is redrawn once in a while
        ("6 of 16 steps", "26 of 32 steps", False),
        ("16 of 16 steps", "6 of 16 steps", False),
    ],
)
def test_ctrl_c_is_pressed_when_a_number_is_reached_and_not_at_another_that_ends_alike(
    words: str, said: str, due: bool
) -> None:
    assert is_due(words, said) == due


@pytest.mark.deep
def test_ports_are_free_ones(tmp_path: Path) -> None:
    """Two readers on one machine do not meet."""
    following = reader(tmp_path)
    plan = "dora check launch/configs/nodes-2x8.toml --gpus 16x80GB --model seed"
    following.follow(Fence("sh", "", f"{plan} --set status.port=99999\n"))
    following.follow(Fence("sh", "", "test 127.0.0.1:8423 != 127.0.0.1:84''23\n"))


def test_only_the_dora_of_this_interpreter_is_run(tmp_path: Path) -> None:
    following = reader(tmp_path)
    following.follow(Fence("sh", "", "command -v dora python\n"))
    following.follow(Fence("output", "", f"{tmp_path}/bin/dora\n{tmp_path}/bin/python\n"))
    assert os.environ["PATH"] != following._environ["PATH"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("step 3/8  reward 0.25", "step 5/8 reward 1.0"),
        ("  version 0: -0.1", "version 12: 0.3"),
        ("run folder runs/first-...", "run folder runs/first-2026-a0f3"),
        ("reward  ▁▂█  0.1", "reward     ▇▇▇▇▇ 0.9"),
        ("use --k 0,1 of 8x80GB", "use --k 0,2 of 2x24GB"),
        ("1,024 tokens (enough)", "7 tokens (enough)"),
        ("finished in 1 min 9 s, seed 0", "finished in 56 s, seed 3"),
        ("in 0.3 s: -1.5e-05", "in 1 h 2 min 3 s: 7"),
        ("B - A = +0.000, 95 % -0.1 to +0.2", "B - A = -0.031, 95 % -0.2 to -0.1"),
    ],
)
def test_numbers_and_curves_may_differ(line: str, said: str) -> None:
    assert is_in(line, said)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("audit of C1, C2, C3: clean", "audit of C1, C2, C3: 1 VIOLATIONS"),
        ("reward 0.5", "reward none"),
        ("a ... c", "a b\nc"),
        ("reward.", "rewards"),
        ("in 56 s", "in 56 steps"),
    ],
)
def test_words_may_not_differ(line: str, said: str) -> None:
    assert not is_in(line, said)
