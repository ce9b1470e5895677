"""Whose configuration a resume executes: this user's, or one that the user trusts, and no other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dora.app.job import run_job
from dora.app.trust import executed, require_trust, write_config
from dora.cli.terminal import Terminal
from dora.config.load import load, state_folder
from dora.config.schema import Config
from dora.errors import ConfigError, DoraError
from dora.journal.codec import FORMAT, Header
from dora.journal.run_folder import RunFolder
from dora.journal.signature import is_signed, sign, user_key
from dora.journal.writer import JournalWriter
from tests.core.world import settings
from tests.e2e.runs import assert_one_clear_error, command, environment

#: What everything in a hostile folder leaves behind when it is executed.
EVIL = "from pathlib import Path\nPath(__file__).with_name('executed').touch()\ndef rows(**_): return iter(())\n"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state folders of a user who has never run DORA."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "dora"


def started(parent: Path, *overrides: str, token: str = "") -> RunFolder:
    """A run folder as a start leaves it, and a crash right after it."""
    folder = RunFolder.create(parent, name="job")
    write_config(folder, configured(*overrides, token=token), run_id=folder.run_id)
    with JournalWriter(folder.journal) as journal:
        journal.append(Header(FORMAT, folder.run_id, "2026-01-01T00:00:00+00:00", "0.1.0", settings()))
    return folder


def configured(*overrides: str, token: str = "") -> Config:
    return load(None, overrides, environ={"DORA_TOKEN": token})


def is_trusted(folder: RunFolder, *, token: str = "") -> bool:
    config = load(folder.config, environ={"DORA_TOKEN": token})
    try:
        require_trust(folder, config, named=(), to="a resume")
    except ConfigError:
        return False
    return True


# -- whose signature --------------------------------------------------------------------------------------------------


def test_what_a_start_wrote_is_trusted_wherever_its_user_moves_it(tmp_path: Path) -> None:
    folder = started(tmp_path / "runs")
    assert is_trusted(folder)
    moved = shutil.move(folder.root, tmp_path / "a better name")
    assert is_trusted(RunFolder.open(Path(moved)))


def from_another_run(folder: RunFolder) -> None:
    folder.config.write_bytes(started(folder.root.parent, "run.steps=5").config.read_bytes())


def changed(folder: RunFolder) -> None:
    folder.config.write_bytes(folder.config.read_bytes().replace(b"steps = 5", b"steps = 6"))


def unsigned(folder: RunFolder) -> None:
    folder.config.write_bytes(folder.config.read_bytes().partition(b"\n")[2])


def signed_by_nobody(folder: RunFolder) -> None:
    folder.config.write_bytes(sign(folder.config.read_bytes().partition(b"\n")[2], run_id=folder.run_id, keys=()))


def signed_by_a_stranger(folder: RunFolder) -> None:
    content = folder.config.read_bytes().partition(b"\n")[2]
    folder.config.write_bytes(sign(content, run_id=folder.run_id, keys=[b"x" * 32, b""]))


@pytest.mark.parametrize("forge", [from_another_run, changed, unsigned, signed_by_nobody, signed_by_a_stranger])
def test_no_other_configuration_is(tmp_path: Path, forge: Callable[[RunFolder], None]) -> None:
    folder = started(tmp_path / "runs", "run.steps=5")
    assert is_trusted(folder)
    forge(folder)
    assert not is_trusted(folder)


def test_on_another_machine_the_token_of_the_start_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without, with_token = started(tmp_path), started(tmp_path, token="sesame")
    assert is_trusted(with_token)  # here it is not needed
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    assert not is_trusted(with_token)
    assert not is_trusted(with_token, token="another")
    assert is_trusted(with_token, token="sesame")
    assert not is_trusted(without, token="sesame")
    started(tmp_path)  # which draws a key there
    assert not is_trusted(without)


# -- the key ----------------------------------------------------------------------------------------------------------


def test_the_key_is_for_its_user_alone_and_is_drawn_once(tmp_path: Path, home: Path) -> None:
    draw = "import sys; from pathlib import Path; from dora.journal.signature import draw_user_key\n"
    draw += "sys.stdin.read(); draw_user_key(Path(sys.argv[1]))"
    with subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE) as start:  # its end starts all of them
        drawing = [subprocess.Popen([sys.executable, "-c", draw, home], stdin=start.stdout) for _ in range(4)]
        start.kill()
        assert [process.wait(60) for process in drawing] == [0] * 4
    key = user_key(home)
    assert key is not None
    assert len(key) == 32
    assert [path.name for path in home.iterdir()] == ["key"]
    assert (home.stat().st_mode & 0o777, (home / "key").stat().st_mode & 0o777) == (0o700, 0o600)
    started(tmp_path)
    assert user_key(home) == key


def readable_by_others(key: Path) -> None:
    key.chmod(0o640)


def short(key: Path) -> None:
    key.write_bytes(b"")


def a_link(key: Path) -> None:
    key.rename(key.with_name("elsewhere"))
    key.symlink_to("elsewhere")


@pytest.mark.parametrize("damage", [readable_by_others, short, a_link])
def test_a_key_that_others_may_know_or_have_placed_is_refused(
    tmp_path: Path, home: Path, damage: Callable[[Path], None]
) -> None:
    folder = started(tmp_path)
    damage(home / "key")
    with pytest.raises(DoraError, match="/key: "):
        require_trust(folder, Config(), named=(), to="a resume")


def test_without_a_place_for_a_key_a_run_starts_unsigned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert not is_trusted(started(tmp_path / "runs"))
    assert is_trusted(started(tmp_path / "runs", token="sesame"), token="sesame")


def test_the_state_folder_is_absolute_whatever_the_environment_says() -> None:
    assert state_folder({"XDG_STATE_HOME": "/s", "HOME": "/h"}) == Path("/s/dora")
    assert state_folder({"XDG_STATE_HOME": "s", "HOME": "/h"}) == Path("/h/.local/state/dora")
    assert state_folder({}).is_absolute()


# -- what would be executed -------------------------------------------------------------------------------------------

#: All that a configuration can have executed.
NAMED = {
    "engine.command": '["sh", "-c", "id"]',
    "engine.args": '["--trust-remote-code"]',
    "engine.environment.LD_PRELOAD": '"/tmp/evil.so"',
    "trainer.command": '["sh", "-c", "id"]',
    "objective.loss.kind": '"evil:loss"',
    "task.sources.0.name": '"evil:rows"',
    "task.rewards.0.name": '"an evil/rewards.py:grade"',
    "eval.sets.0.source.name": '"evil:rows"',
    "eval.sets.0.rewards.0.name": '"evil:grade"',
    "environment.name": '"../evil.py:Made"',
    "environment.command": '["sh", "-c", "id"]',
    "environment.mcp.0.command": '["sh", "-c", "id"]',
    "environment.python": '"/tmp/python"',
    "environment.renderer.import_path": '"evil"',
    "tracking.trackers.0": '"evil:Tracker"',
}
#: What they need beside them.
WITH = {
    "task.sources.0.name": [
        *('task.sources.0.kind="function"', "task.sources.0.options={}", "eval.sets=[]"),
        'task.rewards=[{kind="math"}]',
    ],
    "task.rewards.0.name": ['task.rewards.0.kind="function"', 'task.rewards.0.pattern=""'],
    "eval.sets.0.source.name": ['eval.sets.0.source.kind="function"'],
    "eval.sets.0.rewards.0.name": ['eval.sets.0.rewards=[{kind="function"}]'],
    "environment.command": ['environment.name="task:Made"'],
    "environment.mcp.0.command": ['environment.mcp=[{command=["true"]}]'],
    "environment.python": ['environment.name="task:Made"'],
    "environment.renderer.import_path": ['environment.name="task:Made"', 'environment.renderer={name="custom"}'],
}


@pytest.mark.parametrize("key", NAMED)
def test_whatever_a_configuration_has_executed_is_named(key: str) -> None:
    found = [*executed(configured(*WITH.get(key, []), f"{key}={NAMED[key]}"))]
    assert {key} <= {one.partition(" = ")[0] for one in found} <= {key, "environment.name"}


@pytest.mark.parametrize(
    ("key", "value", "others"),
    [
        ("environment.name", "evil.py", ['environment.kind="verifiers"', "environment.episode_timeout_s=60.0"]),
        ("environment.name", "http://10.6.6.6", ['environment.kind="openenv"']),
        ("environment.mcp.0.url", "http://10.6.6.6", ['environment.mcp=[{url="http://127.0.0.1"}]']),
        (
            "task.rewards.0.url",
            "http://10.6.6.6/v1",
            ['task.rewards.0.kind="judge"', 'task.rewards.0.name="m"', 'task.rewards.0.pattern=""'],
        ),
    ],
    ids=["task set", "OpenEnv", "MCP", "judge"],
)
def test_the_task_set_and_the_addresses_of_a_configuration_are_named(key: str, value: str, others: list[str]) -> None:
    assert f"{key} = {value}" in [*executed(configured(*others, f'{key}="{value}"'))]


def test_no_key_that_has_something_executed_is_forgotten() -> None:
    """Their descriptions say so in one of these words."""
    told = []
    for section, outer in Config.model_fields.items():
        for name, field in outer.annotation.model_fields.items():  # type: ignore[union-attr]
            words = ("module:", "Command that", "interpreter", "import_path", "Further arguments, ", "variables of man")
            if any(word in (field.description or "") for word in words):
                told.append(f"{section}.{name}")
    assert len(told) >= 7
    assert [key for key in told if not any(named.startswith(key) for named in NAMED)] == []
    assert [*executed(Config())] == []


def test_a_long_list_is_cut_and_counted_and_shows_no_escapes(tmp_path: Path) -> None:
    folder = started(tmp_path)
    unsigned(folder)
    with pytest.raises(ConfigError) as refused:
        require_trust(folder, Config(), named=["\x1b[2J" + "x" * 10_000] * 100, to="a resume")
    text = str(refused.value)
    assert text.isprintable()
    assert text.endswith("... and 92 more")


# -- the commands -----------------------------------------------------------------------------------------------------


@pytest.fixture
def received(tmp_path: Path) -> RunFolder:
    """A folder whose sender signed it, beside a module that it names everywhere."""
    (tmp_path / "evil.py").write_text(EVIL)
    folder = started(
        tmp_path,
        "engine.command=['touch', 'executed']",
        *WITH["task.sources.0.name"],
        "task.sources.0.name='evil:rows'",
        "tracking.trackers=['evil:rows']",
    )
    shutil.rmtree(tmp_path / "state")  # of the sender
    return folder


def dora(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**environment(), "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=120, check=False, env=env, cwd=cwd
    )


def test_a_resume_of_a_received_folder_executes_nothing_until_it_is_trusted(
    tmp_path: Path, received: RunFolder
) -> None:
    line = ("run", "--resume", str(received.root))
    says = (
        r"config\.toml: is not signed with a key of yours; --trust-folder allows a resume, which would "
        r"execute engine\.command = touch executed, task\.sources\.0\.name = evil:rows, "
        r"tracking\.trackers\.0 = evil:rows$"
    )
    assert_one_clear_error(dora(tmp_path, *line), code=2, says=says)
    assert not (tmp_path / "executed").exists()
    assert dora(tmp_path, *line, "--trust-folder").returncode != 0  # its source has no rows
    assert (tmp_path / "executed").exists()


def test_a_tracker_that_a_received_folder_names_is_executed_only_if_it_is_trusted(
    tmp_path: Path, received: RunFolder
) -> None:
    says = r"--trust-folder allows this, which would execute tracking\.trackers = evil:rows$"
    assert_one_clear_error(dora(tmp_path, "track", str(received.root)), code=2, says=says)
    assert not (tmp_path / "executed").exists()
    assert "evil:rows" in dora(tmp_path, "track", str(received.root), "--trust-folder").stderr
    assert (tmp_path / "executed").exists()


async def test_the_library_has_the_same_rule(tmp_path: Path, received: RunFolder) -> None:
    config = load(received.config, environ=os.environ)
    with pytest.raises(ConfigError, match="is not signed with a key of yours"):
        await run_job(config, Terminal(), earlier=received)
    assert not (tmp_path / "executed").exists()


def test_the_flag_alone_means_nothing(tmp_path: Path) -> None:
    assert_one_clear_error(dora(tmp_path, "run", "--trust-folder"), code=2, says="only valid with --resume")


def test_a_signature_binds_all_bytes_to_one_run() -> None:
    signed = sign(b"a:b = 1\n", run_id="r", keys=[b"k"])
    line, _, content = signed.partition(b"\n")
    assert is_signed(signed, run_id="r", keys=[b"j", b"k"])
    assert not is_signed(signed, run_id="r", keys=[])
    assert not is_signed(line + b"\nb = 1\n", run_id="r:a", keys=[b"k"])
    assert not is_signed(b"# signature: 0 0 " + line.split()[-1] + b"\n" + content, run_id="r", keys=[b"k"])
