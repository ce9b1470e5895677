"""What a shell may complete, word by word."""

from __future__ import annotations

import pytest

from dora.completion.complete import candidates, main, words

BREAKS = " \t\n\"'@><=;|&(:"


def offered(*before: str, current: str = "") -> tuple[str, list[str]]:
    adds, found = candidates(before, current, words=words())
    return adds, [word for word, _ in found]


def in_bash(line: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    main(["bash", line, BREAKS])
    return [printed.partition("\t")[0] for printed in capsys.readouterr().out.splitlines()]


def test_the_first_word_is_a_command() -> None:
    assert offered(current="che") == ("words", ["check"])
    assert offered(current="--v") == ("words", ["--version"])
    assert offered("nothing") == ("words", [])


def test_an_option_is_offered_again_only_if_it_may_be_repeated() -> None:
    before = ("run", "--set", "run.steps=3", "--resume", "runs/x")
    assert "--set" in offered(*before, current="--")[1]
    assert "--resume" not in offered(*before, current="--")[1]


def test_a_key_is_completed_part_by_part_and_then_its_value() -> None:
    assert offered("run", "--set", current="ro") == ("words", ["rollout."])
    assert offered("run", "--set", current="rollout.max_s") == ("words", ["rollout.max_staleness="])
    assert offered("run", "--set", current="rollout.strategy=sy") == ("words", ["rollout.strategy=sync"])
    assert offered("run", current="--set=rollout.strategy=sy") == ("words", ["--set=rollout.strategy=sync"])
    assert offered("run", "--set", current="no.such.key=") == ("words", [])


def test_an_index_stands_for_any() -> None:
    assert offered("run", "--set", current="task.sources.7.ki") == ("words", ["task.sources.7.kind="])
    assert "eval.sets.2.source.kind=parquet" in offered("run", "--set", current="eval.sets.2.source.kind=p")[1]


def test_files_are_left_to_the_shell() -> None:
    assert offered("run") == ("files", [])
    assert offered("run", "--resume") == ("files", [])
    assert offered("run", "--model") == ("files", ["seed", "seed-tools"])
    assert offered("run", "--set", current="run.folder=") == ("files", [])


def test_bash_gets_what_follows_its_last_word_break(capsys: pytest.CaptureFixture[str]) -> None:
    assert in_bash("dora run --set rollout.strategy=sy", capsys) == ["words", "sync"]
    assert in_bash("dora run --set=rollout.strategy=sy", capsys) == ["words", "sync"]
    assert in_bash("dora run --set rollout.str", capsys) == ["words", "rollout.strategy="]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dora run 'my job.toml' --reward ma", ["files", "math"]),
        ("dora run 'my jo", ["files"]),
        ('dora run "my jo', ["files"]),
        ("dora run my\\ jo", ["files"]),
        ("dora ", ["words", *sorted(words()["commands"])]),
    ],
)
def test_quotes_of_bash_are_read_and_may_be_open(
    line: str, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert in_bash(line, capsys) == expected
