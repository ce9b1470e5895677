"""The files of launch/ are valid where they are used, and say what DORA understands.

Schemas and linters of others check their form: those of compose, Kubernetes and JobSet, hadolint, shellcheck. That a
scheduler does with them what is meant is tested in tests/containers and tests/slurm, and not at all for Kubernetes and
SkyPilot.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import jsonschema
import kubernetes_validate
import pytest
import yaml
from click import Command
from typer.main import get_command

from dora.app.nodes import JOIN_TIMEOUT_S
from dora.cli.app import app
from dora.config.load import load
from dora.config.schema import Config

ROOT: Final = Path(__file__).parents[2]
LAUNCH: Final = ROOT / "launch"
COMPOSE: Final = (LAUNCH / "compose.yaml", LAUNCH / "compose-nodes.yaml")
JOBSET: Final = LAUNCH / "jobset.yaml"
SKYPILOT: Final = LAUNCH / "skypilot.yaml"
SCRIPTS: Final = (LAUNCH / "slurm.sbatch", LAUNCH / "ssh.sh")
MANIFESTS: Final = (*COMPOSE, JOBSET, SKYPILOT, *SCRIPTS)
MAX_LINES: Final = 80
#: Set by the person who starts a script, for the script.
OF_SCRIPTS: Final = {"DORA_CONTROLLER", "DORA_TOKEN", "DORA_TOKEN_FILE"}


def documents(path: Path) -> list[dict[str, Any]]:
    return [*yaml.safe_load_all(path.read_text())]


def passes(*command: str | Path) -> None:
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def tool(name: str) -> Path:
    """A program that a package of the `dev` extra has brought."""
    return Path(sysconfig.get_path("scripts")) / name


# -- form -------------------------------------------------------------------------------------------------------------


def test_the_image_passes_hadolint() -> None:
    passes(tool("hadolint"), "Dockerfile")


def test_the_scripts_pass_shellcheck() -> None:
    passes(tool("shellcheck"), *SCRIPTS, *(ROOT / "tests").glob("*/*.sh"))


def test_the_compose_files_follow_their_specification() -> None:
    passes(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", *COMPOSE)


def test_the_jobset_and_what_it_starts_are_known_to_kubernetes() -> None:
    claim, jobset = documents(JOBSET)
    release = kubernetes_validate.latest_version()
    kubernetes_validate.validate(claim, release, strict=True)
    jsonschema.validate(jobset, strict(json.loads((ROOT / "tests/static/jobset.schema.json").read_text())))
    for part in jobset["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": part["name"]}, **part["template"]}
        kubernetes_validate.validate(job, release, strict=True)


def strict(schema: Any) -> Any:
    """The schema, without unknown keys in objects whose keys it lists: as the API server refuses them."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else {}
    return {key: strict(value) for key, value in schema.items()} | closed


def test_an_unknown_key_of_a_jobset_is_found() -> None:
    _, jobset = documents(JOBSET)
    jobset["spec"]["failurePolicy"]["maxRestart"] = 1
    with pytest.raises(jsonschema.ValidationError, match="maxRestart"):
        jsonschema.validate(jobset, strict(json.loads((ROOT / "tests/static/jobset.schema.json").read_text())))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_is_at_most_a_screen_long(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


# -- what it says -----------------------------------------------------------------------------------------------------


def commands(path: Path) -> list[list[str]]:
    """The `dora` commands of a manifest, as lists of arguments. What a shell would fill in is left as it is."""
    if path in COMPOSE:
        return [service["command"] for service in documents(path)[0]["services"].values()]
    if path == JOBSET:
        return [container(part)["args"] for part in documents(path)[1]["spec"]["replicatedJobs"]]
    if path == SKYPILOT:
        texts = [task["run"] for task in documents(path)[1:]]
    else:
        lines = [line for line in path.read_text().splitlines() if not re.match(r"\s*(#|echo)", line)]
        texts = ["\n".join(lines).replace("\\\n", " ")]
    found = [command for text in texts for command in re.findall(r"\bdora ((?:run|node)\b.*)", text)]
    return [words_of(command) for command in found]


def words_of(command: str) -> list[str]:
    """Split what a shell reads, up to the end of the command or of the quotes that it is in."""
    command = command.partition(" || ")[0].replace('"$@"', "")
    if command.count('"') % 2:
        command = command.rpartition('"')[0]
    return shlex.split(command)


def container(part: dict[str, Any]) -> dict[str, Any]:
    [found] = part["template"]["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_every_command_of_a_manifest_is_one_of_dora(path: Path) -> None:
    known = get_command(app).commands  # type: ignore[attr-defined]
    found = commands(path)
    assert {words[0] for words in found} == ({"run"} if path.name == "compose.yaml" else {"run", "node"})
    for name, *arguments in found:
        command: Command = known[name]
        command.make_context(name, [*arguments])


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_every_setting_of_a_manifest_is_one_of_the_configuration(path: Path) -> None:
    for words in commands(path):
        bare = [word.removeprefix("--set=") for word in words]
        settings = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in bare if re.match(r"\w+\.\w+=", word)]
        load(None, settings, environ={"DORA_TOKEN": "a token"})


def read_variables() -> set[str]:
    """The environment variables that DORA reads."""
    sources = "\n".join(path.read_text() for path in (ROOT / "dora").rglob("*.py"))
    found = set(re.findall(r"\bDORA_[A-Z_]+", sources))
    return found | {f"{name}_FILE" for name in ("DORA_TOKEN",)}


@pytest.mark.parametrize("path", [*MANIFESTS, ROOT / "Dockerfile"], ids=lambda path: path.name)
def test_every_variable_of_a_manifest_is_one_that_dora_reads(path: Path) -> None:
    assert set(re.findall(r"\bDORA_[A-Z_]+", path.read_text())) <= read_variables() & OF_SCRIPTS


def test_nodes_look_for_the_controller_where_it_listens() -> None:
    port = Config.model_validate({}).nodes.address.rpartition(":")[2]
    _, jobset = documents(JOBSET)
    controller, node = jobset["spec"]["replicatedJobs"]
    name = jobset["metadata"]["name"]
    assert variables(container(node))["DORA_CONTROLLER"] == f"{name}-{controller['name']}-0-0.{name}:{port}"
    group, first, *nodes = documents(SKYPILOT)
    assert {task["envs"]["DORA_CONTROLLER"] for task in nodes} == {f"{first['name']}-0.{group['name']}:{port}"}
    services = documents(COMPOSE[1])[0]["services"]
    assert f"DORA_CONTROLLER=controller:{port}" in services["node"]["environment"]
    for path in LAUNCH.glob("configs/nodes-*.toml"):
        config = load(path, environ={"DORA_TOKEN": "a token"})
        assert config.nodes.address == f"tcp://0.0.0.0:{port}"
        assert not config.trainer.address.startswith("tcp://127.")


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {variable["name"]: variable.get("value", "") for variable in container["env"]}


def test_kubernetes_restarts_one_node_at_a_time_and_none_waits_for_another() -> None:
    _, jobset = documents(JOBSET)
    assert {rule["action"] for rule in jobset["spec"]["failurePolicy"]["rules"]} == {"RestartJob"}
    for part in jobset["spec"]["replicatedJobs"]:
        job = part["template"]["spec"]
        assert "dependsOn" not in part
        assert job.get("parallelism", 1) == job.get("completions", 1) == 1
        assert job["backoffLimit"] == 0
    assert "startupPolicy" not in jobset["spec"]


def test_a_controller_on_kubernetes_may_wait_for_its_nodes() -> None:
    """It has no status endpoint before they are there and its trainer has started."""
    probe = container(documents(JOBSET)[1]["spec"]["replicatedJobs"][0])["startupProbe"]
    config = load(LAUNCH / "configs/nodes-2x8.toml", environ={"DORA_TOKEN": "a token"})
    assert probe["periodSeconds"] * probe["failureThreshold"] > JOIN_TIMEOUT_S + config.trainer.start_timeout_s


@pytest.mark.parametrize("name", ["startupProbe", "livenessProbe"])
def test_a_probe_on_kubernetes_may_take_as_long_as_the_start_of_python(name: str) -> None:
    """`dora status` takes 2 s beside other work."""
    probe = container(documents(JOBSET)[1]["spec"]["replicatedJobs"][0])[name]
    assert probe.get("timeoutSeconds", 1) >= 10  # 1 is what Kubernetes takes


def volumes(part: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What a pod mounts, and what it has."""
    pod = part["template"]["spec"]["template"]["spec"]
    yield from (("mounted", each["name"]) for each in container(part)["volumeMounts"])
    yield from (("there", each["name"]) for each in pod["volumes"])


def test_every_pod_has_the_volumes_that_it_mounts() -> None:
    _, jobset = documents(JOBSET)
    for part in jobset["spec"]["replicatedJobs"]:
        found = [*volumes(part)]
        assert {name for kind, name in found if kind == "mounted"} == {name for kind, name in found if kind == "there"}


def test_the_context_of_the_image_is_what_the_image_copies() -> None:
    copied = re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    allowed = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert sorted(allowed) == sorted(word for line in copied for word in line.split())


@pytest.mark.parametrize(("host", "is_here"), [("n1", True), ("n30000", True), ("n30001", False)])
def test_slurm_asks_whether_a_host_is_one_of_many_in_the_job(host: str, is_here: bool) -> None:
    """With more hosts than a pipe holds, a reader that ends early makes their list fail."""
    [function] = re.findall(r"^is_here\(\) .*?^}", SCRIPTS[0].read_text(), re.MULTILINE | re.DOTALL)
    lists = "scontrol() { seq --format=n%.0f 30000; }; squeue() { :; }; SLURM_JOB_ID=1"
    asks = ["bash", "-c", f"set -euo pipefail\n{lists}\n{function}\nis_here {host}"]
    assert (subprocess.run(asks, capture_output=True, check=False).returncode == 0) == is_here


def test_the_ssh_list_starts_a_node_on_each_host_and_the_controller_on_the_first_and_shows_no_token(
    tmp_path: Path,
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/bash\necho "$@" >>{tmp_path}/called\ncat >>{tmp_path}/read\n')
    ssh.chmod(0o755)
    hosts = tmp_path / "hosts"
    hosts.write_text("# two hosts\n10.0.0.1\n\n10.0.0.2\n")
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DORA_TOKEN": "secret"}
    subprocess.run([SCRIPTS[1], hosts, "job.toml"], env=environ, check=True, capture_output=True)
    called = (tmp_path / "called").read_text()
    assert "secret" not in called
    assert (tmp_path / "read").read_text() == "secret\n" * 3
    starts = [(line.split()[2], line.endswith("dora node"), line) for line in called.splitlines()]
    assert [start[:2] for start in starts] == [("10.0.0.1", True), ("10.0.0.2", True), ("10.0.0.1", False)]
    assert all("DORA_CONTROLLER=10.0.0.1:8423 " in line for _, is_node, line in starts if is_node)
    assert starts[2][2].endswith(" dora run job.toml --continue")
