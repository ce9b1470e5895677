"""`dora check`, `--version` and `--help`: what can be asked without starting a run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from dora.app.trial_push import Held, push_once
from dora.config.load import load
from dora.engine.engines import open_engine
from dora.errors import ConfigError
from dora.seed.policy import model_folder
from dora.sim.workload import load as load_workload
from tests.e2e.runs import assert_one_clear_error, command, environment, get, run_to_end, settings, until

pytestmark = pytest.mark.deep


def files_below(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.timeout(200)
def test_check_prints_the_plan_and_changes_nothing(tmp_path: Path) -> None:
    before = {p.pid for p in psutil.process_iter() if _is_ours(p)}
    result = run_to_end("check", *settings(status__port=0, run__steps=7, run__folder=tmp_path / "runs"), cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    heads = [line[:11].strip() for line in result.stdout.splitlines()]
    for wanted in (
        "inputs",
        "server",
        "log-probs",
        "strategy",
        "task",
        "job",
        "rollout",
        "trainer",
        "weights",
        "status",
    ):
        assert wanted in heads, result.stdout
    assert "dora, K = 2 in force" in result.stdout
    assert "7 steps of " in result.stdout
    assert "server and trainer agree" in result.stdout
    says = r"\nsample       task.sources.0 \(arithmetic\): reward [01]; \d+ tokens, (stop|length) \(.*\)\n"
    assert re.search(rf"{says}  prompt     '\w+='\n  response   '\w*'\n  reference  '\d\d'\n", result.stdout), (
        result.stdout
    )
    assert result.stdout.endswith("all checks passed; nothing was changed\n")
    assert files_below(tmp_path) == set()
    assert {p.pid for p in psutil.process_iter() if _is_ours(p)} <= before


def _is_ours(process: psutil.Process) -> bool:
    try:
        return process.ppid() == psutil.Process().pid
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An external server that serves the run's model under the label 'theirs'."""
    log = tmp_path_factory.mktemp("server") / "log"
    words = ("serve", "--model", "seed", "--port", "0", "--weight-version", "theirs", "--incremental-streaming-output")
    with log.open("wb") as output:
        process = subprocess.Popen(command(*words), stdout=output, stderr=subprocess.STDOUT, env=environment())
    try:
        yield until(lambda: re.findall(r"^ready (\S+)$", log.read_text(), re.MULTILINE), what="a server")[0]
    finally:
        process.kill()
        process.wait()


def external(url: str, folder: Path, **changes: object) -> list[str]:
    memory = folder / "memory"
    memory.mkdir()
    fleet = {"engine__urls": f'["{url}"]', "rollout__strategy": "sync", "status__port": 0, "eval__sets": "[]"}
    return settings(**fleet, run__folder=folder / "new" / "runs", weights__memory_folder=memory, **changes)


def label_of(url: str) -> str:
    return str(json.loads(get(f"{url}/model_info")[2])["weight_version"])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transfer", ["disk", "distributed"])
def test_a_push_is_tried_and_taken_back(tmp_path: Path, server: str, transfer: str) -> None:
    result = run_to_end("check", "--push", *external(server, tmp_path, weights__transfer=transfer))
    assert (result.returncode, result.stderr) == (0, "")
    assert f"\npush         {server}: loaded the model from the version store; its label is restored" in result.stdout
    assert label_of(server) == "theirs"
    assert files_below(tmp_path) == {tmp_path / "memory"}


@pytest.mark.timeout(300)
def test_a_store_that_a_server_does_not_see_is_named_and_the_server_left_as_it_was(tmp_path: Path, server: str) -> None:
    elsewhere = settings(engine__path_map=f'{{"{tmp_path}" = "/not/mounted"}}')
    arguments = [*external(server, tmp_path), *elsewhere]
    assert run_to_end("check", *arguments).returncode == 0  # nothing else tells
    result = run_to_end("check", "--push", *arguments)
    says = (
        rf"engine.urls: {server}: weight push failed at 'update': .*; it must be able to read "
        r"/not/mounted/memory/dora-dora-check-\S+/v000000: mount the folder there"
    )
    assert_one_clear_error(result, code=2, says=says)
    assert "restart it" not in result.stderr
    assert label_of(server) == "theirs"
    assert files_below(tmp_path) == {tmp_path / "memory"}


@pytest.mark.timeout(400)
def test_measured_servers_are_a_workload_that_can_be_simulated(tmp_path: Path, server: str) -> None:
    """A managed server is measured beside an external one, which keeps its label."""
    file = tmp_path / "measured.toml"
    fleet = {"engine__instances": 1, "engine__slots": 4, "engine__kv_tokens": 4096, "rollout__max_staleness": 1}
    arguments = settings(
        engine__urls=f'["{server}"]', **fleet, run__folder=tmp_path / "runs", status__port=0, eval__sets="[]"
    )
    result = run_to_end("check", "--measure", str(file), "--sample", "3", *arguments)
    assert (result.returncode, result.stderr) == (0, "")
    assert re.search(r"\nmeasured     batch  context  tokens/s  by the fit\n {17}1 +\d+", result.stdout), result.stdout
    assert " decoding, 2 servers at the same time, beside a trainer at work: a step takes " in result.stdout
    assert result.stdout.endswith(f"all checks passed; wrote {file}; next: dora plan {file}\n")
    assert files_below(tmp_path) == {file}
    assert label_of(server) == "theirs"
    workload = load_workload(file)
    assert (workload.num_instances, workload.fleet.server.slots, workload.fleet.server.kv_tokens) == (2, 4, 4096)
    assert 1e-5 < workload.fleet.server.decode.step_s(num_requests=1, num_tokens=100) < 1
    assert [len(group) for group in workload.lengths.answers] == [workload.job.group_size] * 3
    simulated = run_to_end("simulate", str(file), "--steps", "8")
    assert (simulated.returncode, simulated.stderr) == (0, "")
    again = run_to_end("check", "--measure", str(file), *arguments)
    assert_one_clear_error(again, code=2, says="exists; name a new file")


async def test_a_server_with_other_weights_is_not_pushed_to(tmp_path: Path) -> None:
    config = load(None, [f"run.folder={tmp_path}", f"weights.memory_folder={tmp_path / 'none'}"], environ={})
    held = Held("http://127.0.0.1:1", "engine.urls", "run/7", is_model=False)
    async with open_engine(config, max_connections=1) as engine:
        with pytest.raises(ConfigError, match=r"engine.urls: \S+ holds other weights \('run/7'\) than model.path: no"):
            await push_once(config, model=model_folder("seed"), engine=engine, servers=[held])
    assert files_below(tmp_path) == set()


def test_a_plan_for_other_gpus_starts_nothing_and_needs_no_data(tmp_path: Path) -> None:
    config = Path(__file__).parents[2] / "launch" / "configs" / "gpu-8.toml"
    asked = ("check", str(config), *settings(model__path="seed", run__folder=tmp_path / "runs"))
    fits = run_to_end(*asked, "--gpus", "8x80GB", cwd=tmp_path)
    assert (fits.returncode, fits.stderr) == (0, "")
    assert fits.stdout.endswith("the run fits on 8 GPUs of 80 GB by this forecast; nothing was started or measured\n")
    too_large = run_to_end(*asked, "--gpus", "6x80GB", cwd=tmp_path)
    assert (too_large.returncode, too_large.stderr) == (1, "")
    assert too_large.stdout.endswith("the run DOES NOT FIT on 6 GPUs of 80 GB\n")
    assert files_below(tmp_path) == set()


@pytest.mark.timeout(200)
def test_a_reward_that_fails_on_what_the_model_answers_fails_the_check(tmp_path: Path) -> None:
    (tmp_path / "picky.py").write_text(
        "def score(response, answer):\n    return 1.0 if response == answer else undefined\n"
    )
    rows = "".join(json.dumps({"prompt": f"a1b{digit}=", "answer": "none of these"}) + "\n" for digit in range(4))
    (tmp_path / "rows.jsonl").write_text(rows)
    source = f'[{{kind="jsonl", path="{tmp_path}/rows.jsonl"}}]'
    reward = f'[{{kind="function", name="{tmp_path}/picky.py:score"}}]'
    overrides = settings(status__port=0, task__sources=source, task__rewards=reward, eval__sets="[]")
    result = run_to_end("check", *overrides, cwd=tmp_path)
    assert "reference answers score 1, 1, 1, 1" in result.stdout
    assert re.search(r"\nsample .*: NOT GRADED \(error: .*NameError.* \(picky.py:2\)\)", result.stdout), result.stdout
    assert_one_clear_error(result, code=2, says="task.rewards: a reward failed on the answer above")


@pytest.mark.parametrize("given", ["", "8xfooGB"])
def test_gpus_that_are_not_a_number_and_a_memory_are_refused(given: str) -> None:
    says = f"--gpus {given}: expected the number and the memory of the GPUs, such as 8x80GB"
    assert_one_clear_error(run_to_end("check", "--gpus", given), code=2, says=says)


def test_check_refuses_what_a_run_refuses(tmp_path: Path) -> None:
    result = run_to_end("check", "--set", "rollout.max_staleness=7", cwd=tmp_path)
    assert_one_clear_error(result, code=2, says="K = 7 keeps up to 8 versions alive")


@pytest.mark.parametrize("verb", ["check", "run"])
def test_a_model_whose_turns_nobody_can_continue_is_refused_before_anything_starts(tmp_path: Path, verb: str) -> None:
    environment = Path(__file__).parent / "relay.py"
    overrides = settings(environment__name=f"{environment}:Relay", run__folder=tmp_path / "runs", status__port=0)
    result = run_to_end(verb, *overrides, cwd=tmp_path)
    assert_one_clear_error(
        result, code=2, says="model.path: .* has no chat template, which episodes of several turns need"
    )
    assert files_below(tmp_path) == set()


def test_tools_without_anyone_who_grades_are_refused_before_anything_starts(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "k1"}\n' * 9)
    worlds = Path(__file__).parents[1] / "environments" / "worlds.py"
    overrides = {
        "environment__name": f"{worlds}:tools",
        "model__path": "seed-tools",
        "task__sources": f'[{{kind="jsonl", path="{rows}", answer=""}}]',
        "task__max_prompt_tokens": 2_000,
        "engine__kv_tokens": 4_000,
        "eval__sets": "[]",
    }
    result = run_to_end("check", *settings(**overrides), cwd=tmp_path)
    assert_one_clear_error(result, code=2, says="task.rewards: .*worlds.py:tools ends its episodes without a reward")
    result = run_to_end("check", *settings(**overrides, task__rewards='[{kind="length"}]'), cwd=tmp_path)
    assert "task.rewards: " not in result.stderr


@pytest.mark.skipif(find_spec("sglang") is not None, reason="SGLang is installed")
@pytest.mark.parametrize("asked", ["run", "check"])
def test_a_missing_sglang_is_refused_with_the_command_that_installs_it(tmp_path: Path, asked: str) -> None:
    result = run_to_end(asked, *settings(engine__kind="sglang", status__port=0, run__folder=tmp_path / "runs"))
    says = r"engine\.kind: sglang is not installed; run pip install 'dora-rl\[sglang\]'"
    assert_one_clear_error(result, code=2, says=says)
    assert not (tmp_path / "runs").exists()


def test_the_version_is_that_of_the_package() -> None:
    result = run_to_end("--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"dora {version('dora-rl')}\n", "")


def test_another_distribution_with_a_package_of_the_same_name_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dora_rs-0.3.0.dist-info").mkdir()
    (tmp_path / "dora_rs-0.3.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: dora-rs\nVersion: 0.3.0\n"
    )
    missing = str(tmp_path / "missing")
    assert "installed here too" not in run_to_end("audit", missing).stderr
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    first, last = run_to_end("audit", missing).stderr.splitlines()
    assert first.startswith(
        "dora: dora-rs is installed here too, in the same folder `dora`; install dora-rl in its own"
    )
    assert "missing" in last


def test_help_lists_the_commands_and_loads_no_torch() -> None:
    """What a user waits for before the first line: no heavy library may be imported for it."""
    code = (
        "import sys\n"
        "sys.argv = ['dora', '--help']\n"
        "from dora.cli.app import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'transformers', 'aiohttp', 'zmq', 'numpy', 'pydantic'} & sys.modules.keys()\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60, env=environment()
    )
    assert result.returncode == 0, result.stderr
    for name in ("run", "check", "status", "audit", "export", "serve"):
        assert f"\n  {name} " in result.stdout
    assert "\n  train " not in result.stdout
