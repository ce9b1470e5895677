"""Task sets of verifiers, with a package in its place that speaks as it does (fake_verifiers)."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dora.app.task_sets import hosted, with_task_sets
from dora.config.load import load
from dora.config.schema import Config
from dora.environments import verifiers_peer
from dora.environments.api import End, Observation, Reset, Turn
from dora.environments.pool import EnvironmentPool
from dora.environments.replies import EnvironmentFailed
from dora.errors import ConfigError

FAKE = Path(__file__).with_name("fake_verifiers")
ROW = {"turns": 2, "reward": 0.75}
RIGHT = End(0.75, messages=[], terms={"right": 0.75}, metrics={"turns": 2.0})


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "uv").touch(mode=0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(FAKE), prepend=os.pathsep)


def job(*changes: str, name: str = "sums") -> Config:
    given = ["environment.kind=verifiers", f"environment.name={name}", "environment.episode_timeout_s=60"]
    return load(None, [*given, *changes], environ={})


def rows_of(config: Config) -> list[list[dict[str, Any]]]:
    """Return the rows of all sources, those of held-out sets last."""
    with ExitStack() as stack:
        made = with_task_sets(stack, config)
        sources = [*made.task.sources, *(one.source for one in made.eval.sets)]
        assert {source.kind for source in sources} == {"jsonl"}
        return [[json.loads(line) for line in Path(str(source.path)).read_text().splitlines()] for source in sources]


@pytest.mark.usefixtures("fake")
def test_its_own_tasks_are_the_rows_and_every_tenth_is_held_out():
    trained, held_out = rows_of(job())
    assert [row["number"] for row in held_out] == [0, 10]
    assert sorted([row["number"] for row in trained] + [0, 10]) == [*range(20)]
    changed = 'task.sources=[{kind="verifiers", split="all", options={largest=2.0}}]'
    [rows, _] = rows_of(job("environment.options.tasks=3", changed))
    assert rows == [{"turns": 1, "reward": 2.0, "number": number} for number in range(3)]


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("changes", "name", "says"),
    [
        (
            (),
            "no-such",
            r"environment.name: \S+ has no task set 'no-such'; install its package there, or name its file",
        ),
        ((), "gone.py", r"environment.name: gone.py: no such file"),
        ((), "duet", r"environment.name: task set 'duet' is played by 2 agents \(agent, other\)"),
        (("environment.options.taks=3",), "sums", r"environment.options.taks: task set 'sums' refuses it: .*has tasks"),
        (("environment.options.tasks=1",), "sums", r"task.sources.0: task set sums has no tasks in split 'train'"),
        (("environment.python=/no/python",), "sums", r"environment.python: /no/python cannot be started: No such file"),
        (("environment.python=/bin/false",), "sums", r"task.sources.0: .* cannot be read in /bin/false \(exit code 1"),
    ],
)
def test_what_is_wrong_with_it_is_one_line_before_anything_starts(changes: tuple[str, ...], name: str, says: str):
    with pytest.raises(ConfigError, match=f"^{says}") as raised:
        rows_of(job(*changes, name=name))
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("fake")
def test_a_file_that_would_be_taken_for_another_module_is_refused(tmp_path: Path):
    (tmp_path / "json.py").touch()
    with pytest.raises(ConfigError, match=r"json.py would be imported as json, which is .*; rename it"):
        rows_of(job(name=str(tmp_path / "json.py")))
    (tmp_path / "sums.py").touch()
    assert len(rows_of(job(name=str(tmp_path / "sums.py")))) == 2


@pytest.mark.usefixtures("fake")
def test_task_sets_in_containers_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BOXED", "1")
    with pytest.raises(ConfigError, match=r"^environment.name: task set 'sums' needs containers, which are not"):
        rows_of(job())


def test_a_python_without_it_is_named():
    with pytest.raises(
        ConfigError, match=r"^environment.python: \S+ has no package verifiers \(.*; install there: ver"
    ):
        rows_of(job())


def test_a_python_without_uv_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(FAKE)
    monkeypatch.setenv("PATH", os.environ["PATH"])  # which is changed
    monkeypatch.setattr(verifiers_peer.shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match=r"^environment.python: \S+ has no uv, which verifiers needs; install uv"):
        verifiers_peer._require_packages()


@pytest.fixture
async def pool(fake: None) -> AsyncIterator[EnvironmentPool]:
    settings = hosted(job("environment.call_timeout_s=20").environment, model=FAKE, renderer={"name": "qwen3"})
    async with EnvironmentPool(settings) as opened:
        yield opened


async def begin(pool: EnvironmentPool, episode: int, **row: Any) -> Reset | EnvironmentFailed:
    return await pool.start(episode, {**ROW, **row}, source="s", name=f"row {episode}")


def turn(*tokens: int) -> Turn:
    return Turn("x", token_ids=tokens, logprobs=(-0.5,) * len(tokens))


async def test_an_episode_is_a_rollout_whose_tokens_go_on_and_whose_rewards_are_its_terms(pool: EnvironmentPool):
    for episode in (1, 2):
        begun = await begin(pool, episode)
        assert isinstance(begun, Reset)
        assert begun.tokens == [1, 2]
    for episode in (1, 2):
        seen = await pool.step(episode, turn(7, episode))
        assert isinstance(seen, Observation)
        assert seen.tokens == [1, 2, 7, episode, 3]
    for episode in (1, 2):
        assert await pool.step(episode, turn(9)) == RIGHT


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("fails", "the rollout failed: TaskError: no such level"),
        ("refused", "verifiers refused the rollout: ValueError: bad task"),
    ],
)
async def test_a_rollout_that_fails_has_no_reward(pool: EnvironmentPool, how: str, reason: str):
    assert isinstance(await begin(pool, 1, turns=1, how=how), Reset)
    failed = await pool.step(1, turn(9))
    assert isinstance(failed, EnvironmentFailed)
    assert failed.cause == "raised"
    assert reason in failed.reason
    assert isinstance(await begin(pool, 2), Reset)


async def test_a_rollout_without_rewards_is_graded_by_the_task(pool: EnvironmentPool):
    await pool.start(1, {**ROW, "turns": 1, "how": "unscored"}, source="s", name="row 1", is_graded=True)
    assert await pool.step(1, turn(9)) == End(messages=[], metrics={"turns": 2.0})


@pytest.mark.parametrize("how", ["dies", "dies late"])
async def test_a_host_ends_with_its_server_and_another_one_takes_its_place(pool: EnvironmentPool, how: str):
    assert isinstance(await begin(pool, 1), Reset)
    died = await begin(pool, 2, how=how, turns=1)
    died = await pool.step(2, turn(9)) if isinstance(died, Reset) else died
    code = 3 if how == "dies" else 4
    lost = EnvironmentFailed("host", f"host died: exit code 1: the server of verifiers ended with exit code {code}")
    assert died == lost
    assert await pool.step(1, turn(9)) == lost
    assert isinstance(await begin(pool, 3, turns=1), Reset)
    assert await pool.step(3, turn(9)) == RIGHT


@pytest.mark.usefixtures("fake")
async def test_a_harness_that_cannot_be_installed_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("UNINSTALLED", "1")
    settings = hosted(job().environment, model=FAKE, renderer={"name": "qwen3"})
    with pytest.raises(ConfigError, match=r"^environment.name: .*failed to prepare uv script: no network") as raised:
        async with EnvironmentPool(settings):
            pass
    assert "\n" not in str(raised.value)
