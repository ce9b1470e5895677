"""`python -m tests.clients [NAME...]`: each client plays EPISODES episodes against a model of random weights.

An episode ends by itself, or at a limit; then its turns in the token store are as many as the replies that its client
got, and the audit is clean. Then a task set of verifiers learns, is killed, and is that of the guide (task_sets.py),
servers of OpenEnv are played (openenv_servers.py), and MCP servers called by a host (mcp_servers.py). What cannot be
installed is skipped by name. Exit code 1 if one fails.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dora.core import events as ev
from dora.journal.reader import Journal
from dora.journal.run_folder import RunFolder
from dora.journal.tokens import StoredAnswer, read_tokens
from tests.clients import mcp_servers
from tests.clients.mcp_servers import TIME
from tests.clients.model import CONTEXT, make_model
from tests.clients.openenv_servers import OPENENV, outlives_kills, serves_text, serves_tools
from tests.clients.task_sets import guide, kills, learns
from tests.e2e.runs import settings

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dora" / "clients"
#: Steps, groups of each and siblings: 24 episodes.
STEPS, GROUPS, SIBLINGS = 3, 4, 2
INSTALL_TIMEOUT_S: Final = 1_200.0
RUN_TIMEOUT_S: Final = 1_800.0


VERIFIERS: Final = "verifiers==0.4.0 uv msgspec"


@dataclass(frozen=True)
class Client:
    """What is installed, and the program that uses it; for verifiers, the task set."""

    name: str
    requirement: str
    program: str
    model: str = ""  # "": one of random weights, which calls no tool

    @property
    def has_tasks(self) -> bool:
        """Whether the program is a task set of verifiers; its reward is then also a checksum of tokens."""
        return self.requirement == VERIFIERS


CLIENTS: Final = (
    Client("openai-2", "openai==2.54.0", "openai_agent.py"),
    Client("openai-3", "openai>=3.50,<4", "openai_agent.py"),
    Client("anthropic", "anthropic==2.14.0", "anthropic_agent.py"),
    Client("openai-agents", "openai-agents==0.24.0", "agents_agent.py"),
    Client("smolagents", "smolagents[openai]==1.26.0", "smolagents_agent.py"),
    Client("mini-swe-agent", "mini-swe-agent==2.4.6", "mini_agent.py"),
    Client("verifiers", VERIFIERS, "sum_tasks.py"),
    Client("verifiers-tools", VERIFIERS, "tool_tasks.py", model="seed-tools"),
)


#: Checks of runs, with what is installed for each.
CHECKS: Final = {
    "verifiers-guide": (VERIFIERS, guide),
    "verifiers-kills": (VERIFIERS, kills),
    "verifiers-learns": (VERIFIERS, learns),
    "openenv-text": (OPENENV, serves_text),
    "openenv-tools": (OPENENV, serves_tools),
    "openenv-kills": (OPENENV, outlives_kills),
}


def installed(name: str, requirement: str) -> Path | str:
    """Return the Python that has a client or server; the reason if it cannot be installed."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} {requirement}".encode()).hexdigest()[:12]
    folder = CACHE / f"{name}-{digest}"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *requirement.split()]
        try:
            done = subprocess.run(pip, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            return f"not installed within {INSTALL_TIMEOUT_S:.0f} s"
        if done.returncode:
            return done.stderr.strip().splitlines()[-1]
        (folder / "complete").touch()
    return folder / "bin" / "python"


def play(client: Client, python: Path, *, model: Path, folder: Path) -> str:
    """Let a client play; return what went wrong, or ""."""
    context = CONTEXT if not client.model else 512
    values: dict[str, Any] = {
        **{
            "run__folder": folder,
            "run__steps": STEPS,
            "status__port": 0,
            "eval__sets": "[]",
            "model__path": client.model or model,
        },
        **{"rollout__groups_per_step": GROUPS, "rollout__group_size": SIBLINGS, "rollout__max_staleness": 1},
        **{"rollout__filter_zero_variance": False, "task__max_prompt_tokens": context // 2},
        **{"rollout__max_new_tokens": context // 2, "engine__instances": 2, "engine__kv_tokens": 4 * context},
        **{"environment__call_timeout_s": 300.0, "environment__episode_timeout_s": 900.0},
        **{"trainer__micro_batch_tokens": context, "trainer__learning_rate": 1e-5},
        **_environment_of(client, python),
    }
    command = [sys.executable, "-m", "dora", "run", "launch/configs/agent-cpu.toml", *settings(**values)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=RUN_TIMEOUT_S, check=False)
    if done.returncode:
        return f"the run ended with {done.returncode}:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    [root] = folder.iterdir()
    audit = subprocess.run(
        [sys.executable, "-m", "dora", "audit", str(root)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    return audit.stdout if audit.returncode else differences(RunFolder(root), has_checksum=client.has_tasks)


def _environment_of(client: Client, python: Path) -> dict[str, Any]:
    program = str(HERE / client.program)
    if not client.has_tasks:
        options = f"{{command = {json.dumps([str(python), program])}, warm = true}}"
        return {"environment__options": options}
    # The first time, uv installs what the program of a rollout needs.
    own = {"environment__name": program, "environment__python": python, "environment__start_timeout_s": 600.0}
    sources = "[{kind = 'verifiers'}]"
    return {**own, "environment__kind": "verifiers", "environment__options": "{}", "task__sources": sources}


def checksum(answer: StoredAnswer) -> float:
    """Return a number from 0 to 1 that depends on the sampled tokens."""
    return zlib.crc32(answer.tokens[answer.loss_mask == 1].astype("int32").tobytes()) % 1000 / 1000


def differences(folder: RunFolder, *, has_checksum: bool = False) -> str:
    """Compare the rewards, which are the numbers of replies, with the turns in the token store; and, with a checksum,
    their tokens, and say if an episode forked."""
    ended, failed = {}, []
    for event, _ in Journal(folder.journal):
        if isinstance(event, ev.CallFinished) and event.failed:
            failed.append(event.failed)
        elif isinstance(event, ev.CallFinished) and event.graded:
            ended[event.trajectory] = event.reward
    stored = read_tokens(folder.tokens, wanted=set(ended)).answers
    if forked := [t for t in ended if has_checksum and stored[t].forks]:
        return f"episodes forked: {forked}"
    wrong = [
        t
        for t, replies in ended.items()
        if abs(len(stored[t].observed) + has_checksum * checksum(stored[t]) - replies) > 1e-6
    ]  # the prompt is one of the observations
    sys.stdout.write(
        f"  {len(ended)} episodes ended by themselves, {len(failed)} failed, of {STEPS * GROUPS * SIBLINGS}\n"
    )
    if failed:
        return f"episodes failed: {failed[0]}"
    return f"other turns in the token store than replies: {wrong}" if wrong or not ended else ""


def main(names: list[str]) -> int:
    code = 0
    with tempfile.TemporaryDirectory(prefix="dora-clients-") as folder:
        model = make_model(Path(folder) / "model")
        for client in CLIENTS:
            if names and client.name not in names:
                continue
            sys.stdout.write(f"{client.name}: {client.requirement}\n")
            sys.stdout.flush()
            python = installed(client.name.removesuffix("-tools"), client.requirement)
            if isinstance(python, str):
                sys.stdout.write(f"  skipped, cannot be installed: {python}\n")
                continue
            if problem := play(client, python, model=model, folder=Path(folder) / client.name):
                sys.stdout.write(f"  FAILED: {problem}\n")
                code = 1
        for name, (requirement, check) in CHECKS.items():
            if names and name not in names:
                continue
            sys.stdout.write(f"{name}: {requirement}\n")
            sys.stdout.flush()
            python = installed(requirement.partition("=")[0], requirement)
            if isinstance(python, str):
                sys.stdout.write(f"  skipped, cannot be installed: {python}\n")
                continue
            own = Path(folder) / name
            own.mkdir()
            try:
                check(python, own)
            except AssertionError as err:
                sys.stdout.write(f"  FAILED: {err}\n")
                code = 1
    return code or serve(names)


def serve(names: list[str]) -> int:
    """Call the tools of MCP servers; return the exit code."""
    code = 0
    pythons = {name: installed(name, wanted) for name, wanted in TIME.items() if not names or name in names}
    host = installed(*next(iter(TIME.items()))) if pythons else ""
    for name, python in pythons.items():
        sys.stdout.write(f"{name}: {TIME[name]}\n")
        if isinstance(python, str) or isinstance(host, str):
            sys.stdout.write(f"  skipped, cannot be installed: {python if isinstance(python, str) else host}\n")
        elif problem := mcp_servers.play(python, host):
            sys.stdout.write(f"  FAILED: {problem}\n")
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
