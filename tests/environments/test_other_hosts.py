"""Hosts of another Python and of other languages, and those that break the protocol."""

from __future__ import annotations

import re
import shutil
import sys
import venv
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path

import pytest

from dora.config.schema import EnvironmentConfig
from dora.environments.api import End, Observation, Reset, ToolCall, Turn
from dora.environments.pool import EnvironmentPool
from dora.environments.replies import EnvironmentFailed
from dora.errors import ConfigError, RunFailed

FOREIGN = Path(__file__).parent / "foreign.py"
PAGE = Path(__file__).parents[2] / "docs" / "ENVIRONMENTS-PROTOCOL.md"


def foreign(fault: str, **settings) -> EnvironmentPool:
    command = (sys.executable, "-S", str(FOREIGN), fault)
    return EnvironmentPool(EnvironmentConfig(name="guess", command=command, **settings))


async def begin(pool: EnvironmentPool, episode: int) -> Reset | EnvironmentFailed:
    return await pool.start(episode, {"number": 7}, source="s", name=f"row {episode}")


# --- the protocol ---------------------------------------------------------------------------------------------------


async def test_a_host_without_dora_is_as_good():
    async with foreign("") as pool:
        assert await begin(pool, 1) == Reset([{"role": "user", "content": "hello"}])
        assert await pool.step(1, Turn("x")) == End(1.0)
        await begin(pool, 1)
        await pool.close(1)
        assert pool.free == 256


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("answers another", "host died: a reply to no request"),
        ("garbage", "host died: invalid reply: JSON is malformed"),
        ("endless frame", "host died: host announced a reply of 4294967295 bytes"),
        ("closes its pipe", "host died: stdout closed"),
    ],
)
async def test_a_host_that_breaks_the_protocol_is_replaced(fault: str, reason: str):
    async with foreign(fault) as pool:
        await begin(pool, 1)
        await begin(pool, 2)
        failed = await pool.step(1, Turn("x"))
        assert (failed.cause, failed.reason[: len(reason)]) == ("host", reason)
        assert (await pool.step(2, Turn("x"))).cause == "host"
        assert isinstance(await begin(pool, 3), Reset)


async def test_a_host_that_ends_an_episode_twice_has_ended_it_once_and_is_replaced():
    async with foreign("ends twice") as pool:
        await begin(pool, 1)
        await begin(pool, 2)
        assert await pool.step(1, Turn("x")) == End(1.0)
        assert await pool.step(2, Turn("x")) == EnvironmentFailed("host", "host died: a reply to no request")
        assert await pool.step(1, Turn("x")) == EnvironmentFailed("invalid", "the episode has ended, or never began")
        assert isinstance(await begin(pool, 3), Reset)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("wrong type", "invalid reply: the reply is 'reset', not observation or end"),
        ("unknown cause", "invalid reply: Invalid enum value 'mood' - at `$.cause`"),
        ("infinite", "invalid reply: Number out of range - at `$.reward`"),
    ],
)
async def test_a_reply_that_is_none_fails_its_episode_alone(fault: str, reason: str):
    async with foreign(fault) as pool:
        await begin(pool, 1)
        await begin(pool, 2)
        assert await pool.step(1, Turn("x")) == EnvironmentFailed("invalid", reason)
        assert (await pool.step(2, Turn("x"))).cause == "invalid"  # the same host


@pytest.mark.parametrize("fault", ["one loss", "losses"])
async def test_failures_by_one_loss_that_the_host_survived_count_as_one(fault: str):
    async def fail(pool: EnvironmentPool) -> None:
        for episode in range(60):  # more than half of the last hundred
            await begin(pool, episode)
            assert await pool.step(episode, Turn("x")) == EnvironmentFailed("host", "a server was lost")

    async with foreign(fault) as pool:
        if fault == "one loss":
            await fail(pool)
        else:
            with pytest.raises(RunFailed, match="51 of the last 51 episodes of source 's' failed"):
                await fail(pool)


async def test_a_reset_that_is_none_fails_its_episode():
    async with foreign("reset with a bad message") as pool:
        failed = await begin(pool, 1)
        assert failed == EnvironmentFailed(
            "invalid", "invalid reply: Expected `object`, got `str` - at `$.messages[0]`"
        )


async def test_a_host_may_refuse_to_serve():
    with pytest.raises(ConfigError, match=r"^this host speaks protocol 0$"):
        async with foreign("old"):
            pass


async def test_a_host_that_greets_with_garbage_never_starts():
    with pytest.raises(RunFailed, match=r"no host started in 3 attempts \(invalid reply: Invalid enum value 'what'"):
        async with foreign("hello garbage"):
            pass


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
async def test_the_host_in_javascript_of_the_page_plays(tmp_path):
    (tmp_path / "guess.js").write_text(re.search(r"```javascript\n(.*?)```", PAGE.read_text(), re.DOTALL)[1])
    settings = EnvironmentConfig(name="guess", command=("node", str(tmp_path / "guess.js")))
    async with EnvironmentPool(settings) as pool:
        assert await begin(pool, 1) == Reset([{"role": "user", "content": "Guess a number."}])
        assert await pool.step(1, Turn("3")) == Observation([{"role": "user", "content": "higher"}])
        assert await pool.step(1, Turn("9")) == Observation([{"role": "user", "content": "lower"}])
        assert await pool.step(1, Turn("7")) == End(1.0)
        await begin(pool, 2)
        await pool.close(2)


# --- another Python -------------------------------------------------------------------------------------------------

ENVIRONMENT = """
import importlib.util
from dora.environments.api import End, Environment, Observation, Reset, ToolEnvironment

class Plain(Environment):
    def reset(self, row):
        return Reset([{"role": "user", "content": "hello"}])

    def step(self, turn):
        found = [name for name in turn.content.split() if importlib.util.find_spec(name)]
        return Observation([{"role": "user", "content": " ".join(found) or "none"}])

def double(number: int) -> int:
    "Double a number."
    return 2 * number

def tools():
    return ToolEnvironment([double])
"""


def venv_with(folder: Path, *packages: str) -> str:
    """Make a virtual environment that has these packages, those of this Python, and nothing else."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for package in packages:
        found = Path(find_spec(package).origin)
        path = found.parent if found.name == "__init__.py" else found
        (site / path.name).symlink_to(path)
    python = folder / "python-without-path"  # which would lead to DORA
    python.write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {folder}/bin/python "$@"\n')
    python.chmod(0o755)
    return str(python)


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.py").write_text(ENVIRONMENT)
    return tmp_path / "plain.py"


async def test_a_plain_environment_needs_no_package_and_sees_none_of_ours(tmp_path, file):
    python = venv_with(tmp_path / "venv")
    async with EnvironmentPool(EnvironmentConfig(name="plain:Plain", python=python)) as pool:
        await begin(pool, 1)
        observation = await pool.step(1, Turn("pydantic msgspec msgpack torch json"))
        assert observation.messages[0]["content"] == "json"


async def test_tools_need_pydantic_alone(tmp_path, file):
    needed = ("pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection")
    assert {re.split(r"[^\w-]", each)[0].replace("-", "_") for each in requires("pydantic") if "extra" not in each} == {
        *needed[1:]
    }
    settings = EnvironmentConfig(name=f"{file}:tools", python=venv_with(tmp_path / "venv", *needed))
    async with EnvironmentPool(settings) as pool:
        assert len((await pool.start(1, {"prompt": "p"}, source="s", name="r")).tools) == 1
        turn = Turn("", calls=(ToolCall("1", "double", {"number": 4}),))
        assert (await pool.step(1, turn)).messages[0]["content"] == "8"


async def test_a_package_that_is_missing_there_is_named(tmp_path, file):
    python = venv_with(tmp_path / "venv")
    with pytest.raises(ConfigError, match=r"tools cannot be created \(ModuleNotFoundError: No module named 'pydantic'"):
        async with EnvironmentPool(EnvironmentConfig(name=f"{file}:tools", python=python)):
            pass


async def test_servers_of_tools_need_their_package_there(tmp_path):
    needed = ("pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection")
    settings = EnvironmentConfig(mcp=({"command": ("true",)},), python=venv_with(tmp_path / "venv", *needed))
    with pytest.raises(ConfigError, match=r"^environment.mcp: mcp is not installed; run pip install 'dora-rl\[mcp\]'"):
        async with EnvironmentPool(settings):
            pass
