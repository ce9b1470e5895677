"""The example of docs/AGENTS.md, as its reader types it, with a tiny model of the family that it names."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dora.config.load import load
from dora.core.events import CallFinished, StepTrained
from dora.environments.api import Observation, ToolCall, Turn
from dora.environments.renderer import open_renderer
from dora.journal.run_folder import RunFolder
from dora.tasks.tokenizer import load_tokenizer
from tests.e2e.runs import assert_audit_clean, events_of, run_to_end, settings
from tests.environments.test_renderer_choice import TEMPLATE
from tests.environments.tokenizers_of_families import make_folder, special_tokens
from tests.families import make_model

PAGE, _, REST = (Path(__file__).parents[2] / "docs" / "AGENTS.md").read_text().partition("## Without tools")
#: The tiny tokenizer needs more tokens for the prompt, and the random policy earns nothing.
SIZES: dict[str, object] = {
    **{"task__max_prompt_tokens": 1024, "rollout__max_new_tokens": 32, "rollout__filter_zero_variance": False},
    **{"rollout__groups_per_step": 2, "rollout__group_size": 2, "rollout__max_staleness": 0, "run__steps": 2},
    **{"engine__instances": 1, "trainer__ranks": 1, "status__port": 0},
}


def blocks(kind: str, text: str = PAGE) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == kind]


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A folder with everything that the page says, and the model."""
    [module], [job], [orders, heldout] = blocks("python"), blocks("toml"), blocks("json")
    for name, text in {"shop.py": module, "job.toml": job, "orders.jsonl": orders, "heldout.jsonl": heldout}.items():
        (tmp_path / name).write_text(text)
    special, eos = special_tokens("qwen3")
    model = make_folder(tmp_path / tomllib.loads(job)["model"]["path"], special, eos=eos, chat_template=TEMPLATE)
    make_model("qwen3", vocab_size=384, max_position_embeddings=2048).save_pretrained(model)
    return tmp_path


def test_a_function_and_a_job_take_twenty_lines() -> None:
    written = [*blocks("python"), *blocks("json"), *blocks("toml"), *blocks("")]
    assert sum(bool(line) and not line.startswith("#") for text in written for line in text.splitlines()) <= 20


def test_the_example_without_tools_answers_each_turn() -> None:
    names: dict[str, Any] = {}
    exec(blocks("python", REST)[0], names)
    guess = names["Guess"]()
    guess.reset({"number": 42})
    hints = [guess.step(Turn(text)).messages[0]["content"] for text in ("10", "50")]
    assert hints == ["higher", "lower"]
    assert [guess.step(Turn(text)).reward for text in ("42", "a lot")] == [1.0, 0.0]
    job = tomllib.loads(blocks("toml", REST)[0])
    assert load(job, ["task.sources.0.path=rows.jsonl"], environ={}).environment.name == "guess.py:Guess"


async def test_the_tool_of_the_example_answers_from_its_row() -> None:
    names: dict[str, Any] = {}
    exec(blocks("python")[0], names)
    shop = names["Shop"]()
    reset = shop.reset({"prompt": "What does a pen cost?", "prices": {"pen": 1.5}})
    assert [schema["function"]["name"] for schema in reset.tools] == ["price"]
    seen = await shop.step(Turn("", calls=(ToolCall("0", "price", {"item": "pen"}),)))
    assert isinstance(seen, Observation)
    assert [message["content"] for message in seen.messages] == ["1.5"]


def test_each_renderer_of_the_page_is_one(shop: Path) -> None:
    tokenizer = load_tokenizer(shop / "models" / "Qwen3-0.6B")
    [named] = re.findall(r"`environment\.renderer = (\{.*?\})`", REST)
    assert open_renderer(tokenizer, settings=tomllib.loads(f"x = {named}")["x"]).family == "qwen3"
    [custom] = re.findall(r"`(\{ name = \"custom\".*?\})`", REST)
    path = f"{Path(__file__).parent / 'relay.py'}:SumRenderer"
    own = custom.replace("file.py:Class", path)
    assert open_renderer(tokenizer, settings=tomllib.loads(f"x = {own}")["x"]).family == path


@pytest.mark.deep
@pytest.mark.timeout(1200)
def test_the_program_of_the_example_is_trained_by_itself(shop: Path) -> None:
    [environment] = [text for text in blocks("toml", REST) if "agent:Agent" in text]
    [program] = [text for text in blocks("python", REST) if "openai" in text]
    ends = program.replace("messages=messages)", "messages=messages, max_tokens=8)")  # the policy never does
    assert ends != program
    (shop / "agent.py").write_text(ends)
    (shop / "sums.jsonl").write_text('{"prompt": "3 + 4", "answer": "7"}\n{"prompt": "1 + 1", "answer": "2"}\n')
    source = '{ kind = "jsonl", path = "sums.jsonl", answer = "answer" }'
    task = f'model.path = "models/Qwen3-0.6B"\neval.sets = []\ntask.sources = [{source}]\n'
    (shop / "agent.toml").write_text(task + environment)
    for command in ("check", "run"):
        result = run_to_end(command, "agent.toml", *settings(**SIZES), cwd=shop, timeout_s=600)
        assert result.returncode == 0, result.stderr
    [root] = (shop / "runs").iterdir()
    finished = events_of(RunFolder(root), CallFinished)
    assert [event.failed for event in finished if event.failed] == []
    assert {event.reward for event in finished if event.ended} == {0.0}
    assert_audit_clean(RunFolder(root))


@pytest.mark.deep
@pytest.mark.timeout(1200)
def test_the_server_of_the_example_serves_a_run(shop: Path) -> None:
    [server] = [text for text in blocks("python", REST) if "MCPServer" in text]
    [job] = [text for text in blocks("toml", REST) if "environment.mcp = " in text]
    [commands] = [text for text in blocks("", REST) if "mcp.toml" in text]
    (shop / "prices.py").write_text(server)
    (shop / "mcp.toml").write_text(job.replace('"python"', f'"{sys.executable}"'))
    for line in commands.splitlines():
        name, *arguments = line.partition("#")[0].split()
        assert name == "dora"
        result = run_to_end(*arguments, *settings(**SIZES), cwd=shop, timeout_s=600)
        assert result.returncode == 0, result.stderr
        assert arguments[0] == "run" or re.search(r"^ *tools +price$", result.stdout, re.MULTILINE), result.stdout
    [root] = (shop / "runs").iterdir()
    assert len(events_of(RunFolder(root), StepTrained)) == 2
    assert_audit_clean(RunFolder(root))


@pytest.mark.deep
@pytest.mark.timeout(1200)
def test_the_commands_of_the_example_check_and_train_it(shop: Path) -> None:
    [commands] = blocks("")
    for line in commands.splitlines():
        name, *arguments = line.partition("#")[0].split()
        assert name == "dora"
        result = run_to_end(*arguments, *settings(**SIZES), cwd=shop, timeout_s=600)
        assert result.returncode == 0, result.stderr
        if arguments[0] == "check":
            assert "environment  shop.py:Shop gives a first prompt; renderer qwen3 continues" in result.stdout
    [root] = (shop / "runs").iterdir()
    folder = RunFolder(root)
    assert len(events_of(folder, StepTrained)) == 2
    assert all(not event.failed for event in events_of(folder, CallFinished))
    assert "  episodes of the last step: " in result.stdout
    assert_audit_clean(folder)
