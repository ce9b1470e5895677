"""The job with a tool, played by an agent that drives itself. It imports OpenAI's client, and nothing of DORA.

It samples what the environment of the same job samples, and goes on after kills.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.journal.deep import read_kept
from dora.journal.run_folder import RunFolder
from dora.journal.tokens import read_tokens
from tests.e2e.runs import Run, assert_audit_clean, events_of, orders_of, run_to_end, settings, until_gone
from tests.environments.token_agent import ASK

pytestmark = [pytest.mark.deep, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
SMALL: dict[str, object] = {
    **{"status__port": 0, "run__steps": 4, "rollout__groups_per_step": 4, "eval__sets": "[]"},
    **{"rollout__filter_zero_variance": False, "engine__instances": 2, "rollout__max_staleness": 1},
}
COMMAND = [sys.executable, str(ROOT / "launch" / "agents" / "lookup.py")]


def agent(folder: Path) -> list[str]:
    options = f"{{command = {json.dumps(COMMAND)}, warm = true, replays = true}}"
    values = settings(run__folder=folder, environment__options=options, **SMALL)
    return ["launch/configs/agent-cpu.toml", *values]


def test_a_program_may_render_its_conversations_by_itself(tmp_path: Path) -> None:
    """Its requests are token ids; a second one continues the tokens that were sampled."""
    command = [sys.executable, str(ROOT / "tests" / "environments" / "token_agent.py")]
    options = f"{{command = {json.dumps(command)}}}"
    values = {**SMALL, "run__folder": tmp_path, "environment__options": options, "run__steps": 2}
    result = run_to_end("run", "launch/configs/agent-cpu.toml", *settings(**values), cwd=ROOT)
    assert result.returncode == 0, result.stderr
    [root] = tmp_path.iterdir()
    folder = RunFolder(root)
    assert_audit_clean(folder)
    kept = [one for one in read_kept(folder.trajectories) if not one.truncated]
    assert kept
    assert all(len(one.observed) == 2 and not one.forks and one.reward in (0.0, 1.0) for one in kept)
    assert {one.tokens[: one.observed[0][1]] for one in kept} == {tuple(ASK)}
    deep = run_to_end("audit", str(folder.root), "--deep")
    assert deep.returncode == 0, deep.stdout


def test_each_sibling_may_begin_in_its_own_way(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tests" / "environments" / "moody_agent.py")]
    options = f"{{command = {json.dumps(command)}}}"
    values = {
        **SMALL,
        "run__folder": tmp_path,
        "environment__options": options,
        "run__steps": 2,
        "eval__sets": '[{name = "heldout", prompts = 8, source = {kind = "seeds"}}]',
    }
    result = run_to_end("run", "launch/configs/agent-cpu.toml", *settings(**values), cwd=ROOT)
    assert result.returncode == 0, result.stderr
    [root] = tmp_path.iterdir()
    folder = RunFolder(root)
    assert_audit_clean(folder)
    stored = read_tokens(folder.tokens, wanted=set(range(8 * 8)))
    assert not any(len(prompt.tokens) for prompt in stored.prompts.values())
    begun = [tuple(answer.tokens[: answer.observed[0][1]]) for answer in stored.answers.values() if answer.observed]
    assert len(set(begun)) > len(begun) / 2
    assert all(answer.loss_mask[answer.observed[0][1]] for answer in stored.answers.values() if answer.observed)
    limited = [answer for answer in stored.answers.values() if len(answer.observed) > 1]
    assert all(answer.observed[1][0] - answer.observed[0][1] <= 2 and not answer.forks for answer in limited)
    assert any(answer.loss_mask[answer.observed[1][0] - 1] for answer in limited)
    failed = [event.failed for event in events_of(folder, ev.CallFinished) if event.failed]
    assert {reason.partition(":")[0] for reason in failed} <= {"raised", "set_aside"}  # a row that fails too often
    assert any("exit code 1" in reason for reason in failed)
    assert [order.version for order in orders_of(folder, cmd.ReportEvaluation)] == [0, 2]
    played = [one for one in read_kept(folder.trajectories) if one.reward is not None and not one.truncated]
    assert {len(one.turn_rewards) for one in played} == {len(one.calls_s) for one in played} == {2}
    deep = run_to_end("audit", str(folder.root), "--deep")
    assert deep.returncode == 0, deep.stdout


def test_a_clean_stop_does_not_wait_for_agents(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "k1"}\n')
    command = [sys.executable, str(ROOT / "tests" / "environments" / "calling_agent.py"), "silent"]
    values = {
        **SMALL,
        "run__folder": tmp_path / "runs",
        "environment__options": f"{{command = {json.dumps(command)}}}",
        "environment__call_timeout_s": 350.0,
        "environment__episode_timeout_s": 350.0,
        "task__sources": f'[{{kind = "jsonl", path = "{tmp_path}/rows.jsonl", answer = ""}}]',
    }
    with Run("launch/configs/agent-cpu.toml", *settings(**values), cwd=ROOT) as run:
        run.until_status(lambda s: s["environment"]["calling"] > 0 < s["tokens"]["sampled"], what="silent agents")
        children = run.children()
        run.interrupt()
        assert run.end(timeout_s=120.0) == 130
    until_gone(children)
    assert orders_of(run.folder, cmd.CallEnvironment)


def answers_of_version_0(folder: RunFolder) -> dict[int, list[int]]:
    """The tokens of the first step's episodes, their prompts included."""
    store = read_tokens(folder.tokens, wanted=set(range(4 * 8)))
    answers = {id: answer.tokens.tolist() for id, answer in store.answers.items() if id < 4 * 8}
    return {id: [*store.prompts[id // 8].tokens, *tokens] for id, tokens in answers.items()}


def resumed_after_a_kill(*arguments: str) -> RunFolder:
    """Kill the controller of a job of four steps, with all that it started, and resume it: no episode fails, and the
    log-probs are those of its versions."""
    with Run(*arguments, cwd=ROOT) as run:
        folder = run.folder
        run.until_trained(2)
        children = run.children()
        run.process.kill()
        run.end()
        until_gone(children)
    with Run("--resume", str(folder.root), "--trust-folder", *settings(status__port=0), cwd=ROOT) as run:
        assert run.end() == 0, run.told()
    assert [order.reason for order in orders_of(folder, cmd.FinishRun)] == ["all 4 steps are trained"]
    assert_audit_clean(folder)
    assert not [event.failed for event in events_of(folder, ev.CallFinished) if event.failed]
    deep = run_to_end("audit", str(folder.root), "--deep")
    assert deep.returncode == 0, deep.stdout
    return folder


def test_it_samples_what_the_environment_of_the_same_job_does_and_outlives_its_controller(tmp_path: Path) -> None:
    folder = resumed_after_a_kill(*agent(tmp_path / "agent"))
    finished = events_of(folder, ev.CallFinished)
    assert all(event.ended == event.graded for event in finished if not event.truncated)
    assert not [one.forks for one in read_kept(folder.trajectories) if one.forks]

    values = settings(run__folder=tmp_path / "tools", **{**SMALL, "run__steps": 1})
    assert run_to_end("run", "launch/configs/tools-cpu.toml", *values, cwd=ROOT).returncode == 0
    [root] = (tmp_path / "tools").iterdir()
    expected, found = answers_of_version_0(RunFolder(root)), answers_of_version_0(folder)
    assert len(expected) == 4 * 8
    assert found == expected
