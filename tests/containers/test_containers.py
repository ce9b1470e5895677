"""The image and the compose files in real containers: own processes, users, networks, /dev/shm.

Needs root, podman with runc, and a mirror of Debian or the base that an earlier run has kept.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil
import pytest
import yaml

from dora.config.schema import EnvironmentConfig
from dora.environments.api import Observation, Reset, Turn
from dora.environments.pool import EnvironmentPool
from dora.journal.run_folder import RunFolder
from tests.containers.podman import IMAGE, ROOT, Container, NoImage, Podman, missing
from tests.e2e.runs import assert_audit_clean, run_to_end, until, until_gone

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]

TOKEN: Final = "the token of the containers"
#: Of a run, seconds.
END_S: Final = 400.0


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    if lacking := missing():
        pytest.skip(f"containers need {lacking}")
    try:
        with Podman.ready() as ready:
            yield ready
    except NoImage as err:
        pytest.skip(str(err))


def run_folder(volume: Path) -> RunFolder:
    [found] = volume.glob("dora-*")
    return RunFolder(found)


def num_trained(volume: Path) -> int:
    """Steps in the metrics of the run, seen from outside of the container: the volume is a folder of this machine."""
    rows = [json.loads(line) for path in volume.glob("*/metrics.jsonl") for line in path.read_text().splitlines()]
    return sum(row["kind"] == "step" for row in rows)


def test_a_run_in_a_container_is_no_root_stops_with_its_container_and_goes_on_in_the_next(
    podman: Podman, tmp_path: Path
) -> None:
    volume = tmp_path / "runs"
    volume.mkdir()
    volume.chmod(0o777)
    tmp_path.chmod(0o755)
    options = ("--network=none", "--shm-size=64m", f"--env=DORA_TOKEN={TOKEN}", f"--volume={volume}:/work/runs")
    job = ["run", "--continue", "--set=run.steps=16"]
    health = podman.call("image", "inspect", "--format={{json .HealthCheck.Test}}", IMAGE).stdout
    kind, *check = json.loads(health)
    assert kind == "CMD"
    with podman.container("dora-one", job, *options) as container:
        assert container.execute("id", "-u").stdout.strip() == "10001"
        until(lambda: num_trained(volume) >= 1, what="a step is trained")
        container.execute(*check)
        podman.call("stop", "--time=60", container.name)
        assert "finished" not in container.told(), "the test must stop it in time"
    entry = ("--rm", "--no-healthcheck", "--network=none", f"--entrypoint={check[0]}")
    assert podman.call("run", *entry, IMAGE, *check[1:], is_checked=False).returncode == 1, "no controller is there"
    with podman.container("dora-two", job, *options) as container:
        assert container.wait(END_S) == 0, container.told()
    assert_audit_clean(run_folder(volume))


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_the_default_job_learns_over_containers_that_share_nothing_but_a_network(
    podman: Podman, tmp_path: Path, port: int
) -> None:
    steps = 24
    manifest = ROOT / "launch" / "compose-nodes.yaml"
    command = yaml.safe_load(manifest.read_text())["services"]["controller"]["command"]
    changed = tmp_path / "changed.yaml"
    changed.write_text(
        yaml.safe_dump({"services": {"controller": {"command": [*command, f"--set=run.steps={steps}"]}}})
    )
    compose = [
        "podman-compose",
        "--in-pod=false",
        "--project-name=dora-test",
        f"--file={manifest}",
        f"--file={changed}",
    ]
    variables = {"DORA_TOKEN": TOKEN, "NODES": "3", "SERVERS": "2", "PORT": str(port)}
    try:
        podman.run([*compose, "up", "--detach", "--no-build"], timeout_s=60, **variables)
        controller = Container(podman, "dora-test_controller_1")
        nodes = [Container(podman, f"dora-test_node_{i}") for i in (1, 2, 3)]
        assert controller.wait(END_S) == 0, "\n".join(each.told() for each in (controller, *nodes))
        for node in nodes:
            assert node.wait(60.0) == 0, node.told()
        volume = podman.call("volume", "inspect", "--format={{.Mountpoint}}", "dora-test_runs").stdout.strip()
        shutil.copytree(volume, tmp_path / "runs")
    finally:
        podman.run([*compose, "down", "--volumes"], timeout_s=60, is_checked=False, **variables)
    folder = run_folder(tmp_path / "runs")
    scores = {}
    for row in map(json.loads, folder.metrics.read_text().splitlines()):
        if row["kind"] == "evaluation":
            scores[row["version"]] = row["mean"]
    assert scores[0] < 0.35 < 0.5 < scores[steps], scores
    assert_audit_clean(folder)
    deep = run_to_end("audit", "--deep", str(folder.root))
    assert deep.returncode == 0, deep.stdout


WORLD: Final = """
import os
from pathlib import Path
from dora.environments.api import End, Environment, Observation, Reset

class Look(Environment):
    async def reset(self, row):
        return Reset([{"role": "user", "content": "look"}])

    async def step(self, turn):
        seen = [str(os.getuid()), " ".join(sorted(os.listdir("/sys/class/net"))), str(Path(turn.content).exists())]
        return Observation([{"role": "user", "content": "; ".join(seen)}])
"""


async def test_a_host_in_a_container_sees_no_files_and_no_network_and_ends_with_its_controller(
    podman: Podman, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = tmp_path / "world"
    world.mkdir()
    (world / "look.py").write_text(WORLD)
    for folder in (world, tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    secret = tmp_path / "secret"
    secret.touch()
    for name in podman.environ.keys() - os.environ.keys():
        monkeypatch.setenv(name, podman.environ[name])
    own = ("--network=none", "--read-only", "--cap-drop=all", "--security-opt=no-new-privileges", "--no-healthcheck")
    host = ("--entrypoint=python3", IMAGE, "-m", "dora.environments.host")
    command = ("podman", "run", "--interactive", "--rm", *own, f"--volume={world}:/work:ro", *host)
    settings = EnvironmentConfig(name="/work/look.py:Look", command=command, memory_mb=8_192)
    async with EnvironmentPool(settings) as pool:
        assert isinstance(await pool.start(0, {}, source="s", name="a"), Reset)
        answer = await pool.step(0, Turn(str(secret)))
        assert isinstance(answer, Observation)
        assert answer.messages[0]["content"] == "10001; lo; False"
        [container] = podman.call("ps", "--quiet").stdout.split()
        inside = psutil.Process(int(podman.call("inspect", "--format={{.State.Pid}}", container).stdout))
    until_gone([inside])
    podman.call("rm", "--force", container)  # its monitor was ended, too, so that podman knows nothing of the end
