"""`dora node`: input that cannot work is one line, and a signal has the node leave."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from dora.cli import node as command_module
from dora.cli.app import main
from dora.cli.node import node
from dora.errors import ConfigError
from dora.transport.node_messages import Over
from tests.e2e.runs import command, environment
from tests.node.peers import TOKEN, WAIT_S, Hub, config_of

CONTROLLER = "127.0.0.1:9"


def exit_of(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit code of the command line, in this process."""
    monkeypatch.setattr("sys.argv", ["dora", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DORA_CONTROLLER", "DORA_TOKEN", "DORA_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "arguments", "says"),
    [
        pytest.param({}, (), "DORA_CONTROLLER is not set: give the address of the controller as HOST:PORT", id="none"),
        *(
            pytest.param(
                {"DORA_CONTROLLER": address},
                (),
                f"DORA_CONTROLLER: {bad} is not an address; write it as HOST:PORT",
                id=address,
            )
            for address, bad in {
                "controller": "controller",
                "h:port": "h:port",
                "h:70000": "h:70000",
                "http://h:1": "http://h:1",
                "h:1,h": "h",
                "::1:8423": "::1:8423",
            }.items()
        ),
        pytest.param(
            {"DORA_CONTROLLER": CONTROLLER},
            (),
            "DORA_TOKEN is not set: a node needs the token of the run; set it, or DORA_TOKEN_FILE",
            id="no token",
        ),
        pytest.param(
            {"DORA_CONTROLLER": CONTROLLER, "DORA_TOKEN": "t"},
            ("--token-file", "/no/such/file"),
            "DORA_TOKEN_FILE: /no/such/file cannot be read (No such file or directory)",
            id="a token file that is not there",
        ),
        pytest.param(
            {"DORA_CONTROLLER": CONTROLLER, "DORA_TOKEN": "t"},
            ("--name", "a b"),
            "--name a b: letters, digits, '-', '_' and '.' are allowed",
            id="a bad name",
        ),
    ],
)
def test_input_that_cannot_work_is_one_line_and_exit_code_2(
    variables: dict[str, str],
    arguments: tuple[str, ...],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert exit_of("node", *arguments, monkeypatch=monkeypatch) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert len(told.err.splitlines()) == 1
    assert told.err.startswith(f"dora: {says}")


def test_an_address_that_is_given_twice_is_one_address() -> None:
    assert command_module._controllers("tcp://h:1, h:1,[::1]:2") == ("h:1", "[::1]:2")


def test_a_token_file_wins_over_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("\n")
    monkeypatch.setenv("DORA_TOKEN", "of the environment")
    with pytest.raises(ConfigError, match="DORA_TOKEN is not set"):
        node(CONTROLLER, token_file=tmp_path / "token", name=None, address=None, folder=tmp_path)


async def test_sigterm_has_a_node_say_that_it_leaves_and_it_ends_when_it_is_let_go(tmp_path: Path) -> None:
    given = environment() | {"DORA_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    with Hub() as there:
        words = command("node", "--controller", there.address, "--name", "n", "--folder", str(tmp_path))
        process = await asyncio.create_subprocess_exec(*words, env=given, stdout=PIPE, stderr=PIPE)
        try:
            assert (await there.welcome(config_of(f"weights.memory_folder={tmp_path}"))).is_leaving is False
            process.terminate()
            await there.report(lambda told: told.is_leaving)
            await there.send(Over(term=0, reason="the node has left the run"))
            async with asyncio.timeout(WAIT_S):
                out, err = await process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    assert (process.returncode, out) == (0, b"the node has left the run\n"), err
