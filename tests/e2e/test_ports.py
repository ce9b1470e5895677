"""What other users of a run's machine can reach: ports that demand a key, and folders that are closed."""

from __future__ import annotations

import contextlib
import grp
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from dora.app.managed import ManagedServer
from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.engine import SglangEngine
from dora.journal.run_folder import RunFolder
from dora.node.plan import SERVE_KEY, ProcessPlan
from dora.node.supervise import Node
from dora.seed.policy import path as seed_path
from tests.e2e.runs import (
    Run,
    assert_audit_clean,
    assert_one_clear_error,
    command,
    environment,
    run_to_end,
    small,
)

pytestmark = pytest.mark.deep

#: What would change answers, weights or order of a run.
HOSTILE: dict[str, dict[str, object]] = {
    "/update_weights_from_disk": {"model_path": str(seed_path()), "weight_version": "theirs"},
    "/update_weight_version": {"new_version": "theirs"},
    "/abort_request": {"rid": "", "abort_all": True},
    "/pause_generation": {"mode": "in_place"},
    "/flush_cache": {},
    "/generate": {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}},
}


def post(url: str, body: object, **headers: str) -> int:
    """The status of the answer."""
    given = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(url, json.dumps(body).encode(), given)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as answer:
        answer.close()
        return answer.code


def url_of(engine: psutil.Process) -> str:
    [listening] = [c for c in engine.net_connections("tcp4") if c.status == psutil.CONN_LISTEN]
    return f"http://127.0.0.1:{listening.laddr.port}"


def open_to_others(root: Path, *, bits: int = 0o077) -> list[Path]:
    """Paths that others may open; a run deletes versions meanwhile, so what is gone is passed over."""
    exposed = []
    for folder, _, files in os.walk(root):
        for path in (Path(folder), *(Path(folder, name) for name in files)):
            with contextlib.suppress(FileNotFoundError):
                if path.lstat().st_mode & bits:
                    exposed.append(path)
    return exposed


@dataclass
class Story:
    """A run that was attacked while it trained."""

    answers: dict[str, int] = field(default_factory=dict)  #: to a caller without the key, by path
    keys: list[str] = field(default_factory=list)  #: as the engines have them
    commands: list[str] = field(default_factory=list)  #: of all its processes
    exposed_in_memory: list[Path] = field(default_factory=list)
    folder: RunFolder = field(default_factory=lambda: RunFolder(Path()))
    code: int = -1


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("memory")


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory, memory: Path) -> Iterator[tuple[Story, Run]]:
    story = Story()
    changes = {"engine__instances": 2, "run__steps": 4, "rollout__max_staleness": 1, "weights__memory_folder": memory}
    with Run(
        *small(tmp_path_factory.mktemp("runs"), **changes), prefix=["sh", "-c", 'umask 0; exec "$@"', "sh"]
    ) as run:
        run.until_trained(1)
        for index in range(2):
            engine = run.engine(index)
            for path, body in HOSTILE.items():
                story.answers[f"{index}{path}"] = post(url_of(engine) + path, body)
            story.keys.append(engine.environ()[SERVE_KEY])
        story.commands = [" ".join(process.cmdline()) for process in [*run.children(), psutil.Process(run.process.pid)]]
        [root] = memory.glob("dora-*")
        story.folder = run.folder
        story.exposed_in_memory = open_to_others(root)
        story.code = run.end()
        yield story, run


def test_a_caller_without_the_key_is_refused_whatever_it_asks(attacked: tuple[Story, Run]) -> None:
    story, _ = attacked
    assert story.answers == {f"{index}{path}": 401 for index in range(2) for path in HOSTILE}


def test_the_run_ends_as_if_nobody_had_asked(attacked: tuple[Story, Run]) -> None:
    story, run = attacked
    assert story.code == 0, run.told()
    assert_audit_clean(story.folder)
    deep = run_to_end("audit", "--deep", str(story.folder.root))
    assert deep.returncode == 0, deep.stdout


def test_each_engine_has_a_key_of_its_own_and_no_command_line_or_file_shows_it(attacked: tuple[Story, Run]) -> None:
    story, _ = attacked
    assert len(set(story.keys)) == 2
    written = b"".join(path.read_bytes() for path in story.folder.root.rglob("*") if path.is_file())
    for key in story.keys:
        assert key not in "\n".join(story.commands)
        assert key.encode() not in written


def test_nothing_that_a_run_writes_is_open_to_others_whatever_the_umask(attacked: tuple[Story, Run]) -> None:
    story, _ = attacked
    assert story.exposed_in_memory == []
    assert open_to_others(story.folder.root) == []


def test_with_a_group_its_members_read_all_of_a_run_but_its_token_lock_and_checkpoints(tmp_path: Path) -> None:
    numbers = {entry.gr_gid for entry in grp.getgrall()} if os.geteuid() == 0 else set(os.getgroups())
    others = sorted(numbers - {os.getegid()})
    if not others:
        pytest.skip("this user has one group only")
    group = grp.getgrgid(others[0]).gr_name
    done = run_to_end("run", *small(tmp_path, run__steps=1, run__group=group, trainer__checkpoint_every=1))
    assert done.returncode == 0, done.stderr
    [root] = tmp_path.iterdir()
    assert {path.group() for path in (root, *root.rglob("*"))} == {group}
    assert open_to_others(root, bits=0o027) == []
    closed = {path.name for path in (root, *root.rglob("*")) if not path.stat().st_mode & 0o040}
    # Only the trainer needs its state, and whoever can open a lock file can hold the lock.
    assert closed == {"status-token", "lock", "rank-0.safetensors"}


def test_a_group_that_is_not_there_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    for verb in ("run", "check"):
        done = run_to_end(verb, *small(tmp_path, run__group="no-such-group"))
        assert_one_clear_error(done, code=2, says=r"run\.group: no group no-such-group on this host")
    assert list(tmp_path.iterdir()) == []


async def test_every_start_of_a_server_has_a_key_of_its_own(tmp_path: Path) -> None:
    said = f"os.environ[{SERVE_KEY!r}] + '\\nready http://127.0.0.1:7\\n'"
    code = f"import os, time; os.write(1, ({said}).encode()); time.sleep(600)"
    plan = ProcessPlan(
        name="engine-0",
        argv=(sys.executable, "-c", code),
        env=dict(os.environ),
        ready_timeout_s=30,
    )
    async with EngineClient(max_connections=1) as client, Node(logs=tmp_path, lease=tmp_path / "lease") as node:
        child = node.add(plan)
        engine = SglangEngine(client)
        server = ManagedServer(child, engine=engine, api_key=None)
        known = []
        for _ in range(2):
            known.append(client.keys[(await server.start()).url])
        assert [line for line in child.log.read_text().split("\n") if len(line) == 64] == known
        assert len(set(known)) == 2
        await ManagedServer(child, engine=engine, api_key="sesame").start()
        assert set(client.keys.values()) == {"sesame"}


def test_a_server_started_by_hand_says_that_it_has_no_key_and_is_not_offered_to_other_machines() -> None:
    def serve(host: str, **variables: str) -> subprocess.Popen[str]:
        words = command("serve", "--host", host, "--port", "0", "--skip-tokenizer-init")
        env = {**environment(), **variables}
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)

    hint = f"dora: {SERVE_KEY} is not set: every user of this machine can control this server\n"
    for variables, said in (({}, hint), ({SERVE_KEY: "sesame"}, "")):
        with serve("127.0.0.1", **variables) as process:
            assert process.stdout is not None
            url = process.stdout.readline().split()[1]
            assert post(f"{url}/continue_generation", {}) == (200 if said else 401)
            process.terminate()
            assert process.communicate(timeout=60)[1] == said
    with serve("0.0.0.0") as refused:
        _, said = refused.communicate(timeout=60)
    assert refused.returncode == 2
    assert said == f"dora: --host 0.0.0.0: other machines could control a server without a key; set {SERVE_KEY}\n"
