"""launch/slurm.sbatch under a real Slurm: three nodes, one of which is set DOWN in mid-run and replaced by another job.

Needs root, and Slurm with munge. The nodes are processes of one machine, with names of their own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import pytest

from dora.journal.run_folder import RunFolder
from tests.e2e.runs import assert_audit_clean, environment, settings, until

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]

ROOT: Final = Path(__file__).parents[2]
TOOLS: Final = ("slurmctld", "slurmd", "munged", "unshare", "nsenter", "ip")
NODES: Final = 3
END_S: Final = 600.0
#: Enough for the other job to be scheduled, and for its node to join, before the run ends.
STEPS: Final = 120


@dataclass(frozen=True, slots=True)
class Slurm:
    folder: Path
    pid: int  #: of a process in the namespaces of the cluster

    def call(self, *argv: str) -> str:
        done = self._run(*argv)
        assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def _run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        variables = environment() | {
            "SLURM_CONF": f"{self.folder}/slurm.conf",
            "DORA_TOKEN_FILE": f"{self.folder}/token",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # the script calls `dora`
        }
        line = ["nsenter", "--all", f"--target={self.pid}", "env", f"--chdir={self.folder}", *argv]
        return subprocess.run(line, env=variables, capture_output=True, text=True, check=False)

    def submit(self, *words: str) -> int:
        return int(self.call("sbatch", "--parsable", *words))

    def states(self) -> list[str]:
        return self._run("sinfo", "--noheader", "-N", "--format=%T").stdout.split()

    def is_over(self, job: int) -> bool:
        return f"{job}" not in self.call("squeue", "--noheader", "--format=%A").split()

    def told(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    def until_told(self, name: str, pattern: str) -> list[str]:
        """Wait until a file has a line that matches; return what all such lines have in the group."""
        return until(
            lambda: re.findall(pattern, self.told(name), re.MULTILINE), what=f"{pattern} in {name}", timeout_s=END_S
        )


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    if lacking := [tool for tool in TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"needs {' and '.join(lacking)} (apt install slurm-wlm munge iproute2)")
    if os.geteuid() != 0:
        pytest.skip("needs root, for daemons of Slurm and namespaces")
    namespaces = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with (tmp_path / "cluster.log").open("w") as log:
        script = [f"{ROOT}/tests/slurm/cluster.sh", str(tmp_path), str(NODES)]
        outer = subprocess.Popen([*namespaces, *script], stdout=log, stderr=log)
    try:
        [inner] = until(psutil.Process(outer.pid).children, what="the cluster's first process")
        cluster = Slurm(tmp_path, inner.pid)
        (tmp_path / "token").write_text("the token of the run")
        until(lambda: cluster.states() == ["idle"] * NODES, what="idle nodes")
        yield cluster
    finally:
        outer.kill()  # the others follow
        outer.wait()


def test_a_run_outlives_a_node_that_is_set_down_and_takes_one_of_another_job_in_its_place(slurm: Slurm) -> None:
    job = settings(
        run__steps=STEPS,
        nodes__expected=NODES,
        nodes__lease_s=20,
        rollout__max_staleness=1,
        rollout__groups_per_step=4,
        trainer__ranks=1,
        eval__sets="[]",
    )
    number = slurm.submit(f"--nodes={NODES}", f"{ROOT}/launch/slurm.sbatch", *job)
    log = f"dora-{number}.log"
    slurm.until_told(log, r"^step 5/")
    [lost, *_] = [name for name in slurm.until_told(log, r"node (n\d) has joined with instances") if name != "n1"]
    slurm.call("scontrol", "update", f"nodename={lost}", "state=down", "reason=test")
    slurm.until_told(log, rf"(node {lost} is lost)")
    slurm.call("scontrol", "update", f"nodename={lost}", "state=resume")
    slurm.call("scontrol", "reconfigure")  # has all nodes register; the next look at each may be minutes away
    variables = f"--export=ALL,DORA_CONTROLLER=n1:8423,DORA_TOKEN_FILE={slurm.folder}/token"
    slurm.submit("--nodes=1", variables, "--output=new.log", "--wrap", "srun dora node --name new")
    slurm.until_told(log, r"(node new has joined with instances)")
    until(lambda: slurm.is_over(number), what="the end of the job", timeout_s=END_S)
    assert f"finished: all {STEPS} steps are trained" in slurm.told(log), slurm.told(log)
    assert "JobState=COMPLETED" in slurm.call("scontrol", "show", "job", f"{number}")
    until(lambda: slurm.is_over(number + 1), what="the end of the other job")
    assert f"all {STEPS} steps are trained" in slurm.told("new.log")
    [folder] = (slurm.folder / "runs").iterdir()
    assert_audit_clean(RunFolder(folder))
