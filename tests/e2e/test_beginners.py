"""What people get wrong in their first hour: each mistake is one line that says what to do, and nothing is started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dora.seed.policy import path as seed_path
from tests.e2e.runs import assert_one_clear_error, run_to_end

ROWS = [{"question": f"{n}+7=?", "answer": str(n + 7)} for n in range(8)]
DATA = ("--data", "rows.jsonl", "--prompt", "question")
JOB = (*DATA, "--reward", "math")
REWARDS = """
def score(response, answer):
    return float(response == answer)

def wants(response, colour):
    return 1.0

def text(response, answer):
    return "1.0"
"""


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder as a beginner may have it."""
    monkeypatch.chdir(tmp_path)
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    Path("rows.jsonl").write_text(lines)
    Path("list.json").write_text(json.dumps(ROWS))
    Path("pretty.json").write_text(json.dumps(ROWS[0], indent=2))
    Path("empty.jsonl").touch()
    Path("rows.csv").write_text("question,answer\n1+7=?,8\n")
    Path("chats.jsonl").write_text(json.dumps({"question": [{"role": "user", "content": "3+4=?"}], "answer": "7"}))
    Path("rewards.py").write_text(REWARDS)
    Path("broken.py").write_text("def score(response):\nreturn 1\n")
    Path("needs.py").write_text("import no_such_package\n")
    Path("job.yaml").write_text("run:\n  steps: 3\n")
    Path("unquoted.toml").write_text("[rollout]\nstrategy = dora\n")
    Path("secret.toml").write_text('[trainer]\ntoken = "sesame"\n')
    Path("several.toml").write_text('[[task.sources]]\nkind = "jsonl"\n[[task.sources]]\nkind = "parquet"\n')
    Path("job.toml").touch()
    Path("gguf").mkdir()
    Path("gguf/model.gguf").touch()
    shutil.copytree(seed_path(), "adapter")
    Path("adapter/adapter_config.json").write_text("{}")


#: (command, what the one line says), in the order in which they happen.
MISTAKES = [
    # the command line
    ("rnu", r"No such command 'rnu'. Did you mean 'run'\?"),
    ("run --steps 3", r"No such option: --steps.*; a setting is given as --set run.steps=VALUE"),
    ("run --modle seed", r"No such option: --modle.*--model"),
    ("run --set", r"'--set' requires an argument"),
    ("run --set run.steps 3", r"--set run.steps: expected SECTION.NAME=VALUE"),
    ("run --set run.steps", r"--set run.steps: expected SECTION.NAME=VALUE"),
    ("run run.steps=3", r"run.steps=3: no such file; a setting is given as --set KEY=VALUE"),
    ("run --set trainer.lr=1e-4", r"unknown key trainer.lr; did you mean trainer.learning_rate\?"),
    ("run --set steps=3", r"unknown key steps; did you mean run.steps\?"),
    ("run one.toml two.toml", r"unexpected extra argument.*two.toml"),
    (
        "audit gguf rows.jsonl",
        r"extra argument\S* \(rows.jsonl\): give one path; did a pattern match several\?",
    ),
    ("view", r"dora view: give a run folder, or --demo"),
    ("audit", r"Missing argument 'DIR'"),
    ("check --gpus 8", r"--gpus 8: expected the number and the memory of the GPUs, such as 8x80GB"),
    ("run --resume .", r"is not a run folder: it has no config.toml"),
    # the configuration
    ("run jobs.toml", r"jobs.toml: no such file"),
    ("run gguf", r"gguf: is a folder, not a TOML file; dora run --resume continues the run in one"),
    ("run job.yaml", r"job.yaml:1:4: Expected '=' after a key.*; a configuration is TOML"),
    ("run rows.jsonl", r"rows.jsonl:1:1: .*; a configuration is TOML, and data is given as --data FILE"),
    ("run unquoted.toml", r"unquoted.toml:2:12: Invalid value"),
    ("run secret.toml", r"trainer.token: is a secret; set it only in the environment variable DORA_TOKEN"),
    ("run several.toml --data rows.jsonl", r"--data: the configuration has 2 sources, and --data is for one"),
    ("init", r"job.toml: exists; --force replaces it"),
    ("init new.toml", r"--model: is needed where no question can be asked"),
    # the model
    ("run --model models/missing", r"model.path: models/missing has no config.json; give a Hugging Face model folder"),
    ("eval --model runs/dora-2026", r"model.path: runs/dora-2026 has no config.json"),
    ("run --model gguf", r"model.path: gguf has no config.json; give a Hugging Face model folder"),
    ("run --model adapter", r"model.path: \S*adapter is an adapter of another model; merge it into that model first"),
    # the data
    ("run --data rows.csv --reward math", r"--data rows.csv: .*write .jsonl \(one JSON object per line\) or .parquet"),
    ("run --data missing.jsonl --reward math", r"task.sources.0.path: missing.jsonl is not a file"),
    ("run --data empty.jsonl --reward math", r"task.sources.0: empty.jsonl has no rows"),
    ("run --data list.json --reward math", r"list.json:1: not a JSON object .*; every line must be one"),
    ("run --data pretty.json --reward math", r"pretty.json:1: not a JSON object .*; every line must be one"),
    (
        "run --data rows.jsonl --prompt quesiton --reward math",
        r"rows.jsonl:1: no column 'quesiton' .*did you mean 'question'\?; present: answer, question",
    ),
    (
        " ".join(["run", *JOB, "--answer", "solution"]),
        r"rows.jsonl:1: no column 'solution' .*present: answer, question",
    ),
    ("run --data chats.jsonl --prompt question --reward math", r"chats.jsonl:1: .*task.chat_template = true a list"),
    (
        " ".join(["run", *JOB, "--set", "task.chat_template=true"]),
        r"has no chat template; add one, or set task.chat_te",
    ),
    (" ".join(["run", *JOB, "--set", "task.max_prompt_tokens=2"]), r"more than half|task.max_prompt_tokens"),
    # the reward
    (" ".join(["run", *DATA]), r"task.rewards: nothing scores the answers to task.sources.0; add a term"),
    (" ".join(["run", *DATA, "--reward", "maths"]), r"--reward maths: expected math, exact.*; did you mean math\?"),
    (
        " ".join(["run", *DATA, "--reward", "rewards.py"]),
        r"--reward rewards.py: expected math, exact, FILE.py:function",
    ),
    (" ".join(["run", *DATA, "--reward", "none.py:score"]), r"task.rewards.0.name: none.py: no such file"),
    (
        " ".join(["run", *DATA, "--reward", "rewards.py:scoer"]),
        r"task.rewards.0.name: \S*rewards.py has no function 'scoer'; did you mean 'score'\?",
    ),
    (" ".join(["run", *DATA, "--reward", "broken.py:score"]), r"IndentationError: .*\(broken.py:2\)"),
    (" ".join(["run", *DATA, "--reward", "needs.py:score"]), r"No module named 'no_such_package' \(needs.py:1\)"),
    (
        " ".join(["run", *DATA, "--reward", "rewards.py:wants"]),
        r"rewards.py:wants takes colour; a reward may only take prompt, response, answ",
    ),
    # what the run does with them
    (" ".join(["check", *DATA, "--reward", "rewards.py:text"]), r"returned '1.0' \(str\), expected a number"),
    ("run --set rollout.group_size=1", r"rollout.group_size: 1 answer .*; use at least 2"),
]


def test_there_are_thirty() -> None:
    assert len({command for command, _ in MISTAKES}) >= 30


@pytest.mark.parametrize(("command", "says"), MISTAKES, ids=[command for command, _ in MISTAKES])
def test_a_mistake_is_one_line(command: str, says: str) -> None:
    result = run_to_end(*command.split())
    assert_one_clear_error(result, code=2, says=says)
    assert not Path("runs").exists()


def test_without_a_command_all_of_them_are_shown() -> None:
    result = run_to_end()
    assert result.returncode == 2
    assert {"run", "init", "check"} <= {line.split()[0] for line in result.stderr.splitlines() if line.strip()}
