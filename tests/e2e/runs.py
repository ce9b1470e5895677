"""The `dora` command as a user types it: real processes, watched from outside.

A run's state is read from what any user can see: its output, its status endpoint, its journal. Nothing here shares
memory with it, so waiting means polling.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import psutil

from dora.core.commands import Command
from dora.core.events import Event
from dora.journal.reader import Journal
from dora.journal.run_folder import RunFolder
from dora.seed.policy import path as seed_path

#: Generous: other work may share the machine.
START_S = 120.0
END_S = 240.0
POLL_S = 0.2

Found = TypeVar("Found")
E = TypeVar("E", bound=Event)
C = TypeVar("C", bound=Command)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "dora", *arguments]


def environment() -> dict[str, str]:
    """The environment without variables that the tester may have set for runs."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("DORA_")}
    return {**kept, "COLUMNS": "200"}


def settings(**changes: object) -> list[str]:
    """`--set` arguments; `a__b=1` is a.b=1."""
    pairs = [f"{key.replace('__', '.')}={_toml(value)}" for key, value in changes.items()]
    return [argument for pair in pairs for argument in ("--set", pair)]


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def small(folder: Path, **changes: object) -> list[str]:
    """A job of a few seconds; the smallest fleet that K allows."""
    values: dict[str, object] = {
        "run.folder": folder,
        "run.steps": 2,
        "rollout.groups_per_step": 4,
        "rollout.group_size": 4,
        "rollout.max_staleness": 0,
        "rollout.filter_zero_variance": False,
        "engine.instances": 1,
        "trainer.ranks": 1,
        "eval.sets": "[]",
        "status.port": 0,
    }
    values.update({key.replace("__", "."): value for key, value in changes.items()})
    return [argument for key, value in values.items() for argument in ("--set", f"{key}={_toml(value)}")]


def slow(folder: Path, model: Path, **changes: object) -> list[str]:
    """A job whose answers take long enough for something to happen to them; `model`: the fixture `slow_model`."""
    values: dict[str, object] = {
        "run__folder": folder,
        "model__path": model,
        "rollout__groups_per_step": 4,
        "rollout__group_size": 4,
        "rollout__filter_zero_variance": False,
        "eval__sets": "[]",
        "status__port": 0,
    }
    return settings(**{**values, **changes})


def make_slow_policy(folder: Path) -> Path:
    """The seed's tokenizer over a larger, random policy: its stop token is one of so many that answers reach the token
    budget, and a hundred tokens take a good part of a second."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(seed_path(), folder)
    config = AutoConfig.from_pretrained(
        folder, vocab_size=2048, hidden_size=192, intermediate_size=768, num_hidden_layers=8
    )
    config.layer_types = ["full_attention"] * 8
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def paced_workload(
    *, steps: int, devices: int, rollout_devices: int, slots: int, kv_tokens: int, tokens_s_per_device: float
) -> str:
    """A workload file of small steps for `dora pace`."""
    return f"""
[job]
max_staleness = 1
steps = {steps}
groups_per_step = 8
group_size = 4
[lengths]
regime = "A"
scale = 0.2
cap = 300
prompt_tokens = 50
[fleet]
devices = {devices}
rollout_devices = {rollout_devices}
push_fixed_s = 0.5
[fleet.server]
slots = {slots}
kv_tokens = {kv_tokens}
prefill_s_per_token = 7e-5
decode = {{ base_s = 0.02, per_request_s = 4e-5, per_token_s = 5e-8 }}
[train]
tokens_s_per_device = {tokens_s_per_device}
micro_batch_tokens = 2048
"""


def run_to_end(*arguments: str, cwd: Path | None = None, timeout_s: float = END_S) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself."""
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=environment(),
        cwd=cwd,
    )


def until(ask: Callable[[], Found | None], *, what: str, timeout_s: float = START_S) -> Found:
    """Polls another process until `ask` returns something that is true."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := ask():
            return found
        time.sleep(POLL_S)
    raise AssertionError(f"not within {timeout_s:g} s: {what}")


def get(url: str, **headers: str) -> tuple[int, str, str]:
    """Status, content type, body."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as answer:
        return answer.code, answer.headers["Content-Type"], answer.read().decode()


def heed_ctrl_c() -> None:
    """Tests that are started in the background of a shell ignore SIGINT, and their children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Run:
    """One `dora run` under way."""

    def __init__(
        self, *arguments: str, cwd: Path | None = None, prefix: Sequence[str] = (), patience_s: float = START_S
    ) -> None:
        """`prefix` is put before the command; it must exec it. `patience_s`: how long any wait for it may take."""
        self._patience_s = patience_s
        self.process = subprocess.Popen(
            [*prefix, *command("run", *arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            cwd=cwd,
            start_new_session=True,  # a signal is sent to this process alone
            preexec_fn=heed_ctrl_c,
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(stream, lines), daemon=True)
            for stream, lines in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()  # its children watch the lease
            self.process.wait()

    def _read(self, stream: Any, lines: list[str]) -> None:
        with stream:
            lines.extend(iter(stream.readline, ""))

    # -- what it says -------------------------------------------------------------------------------------------------

    def _said(self, pattern: str) -> str:
        def search() -> str | None:
            found = re.search(pattern, "".join(self.out), re.MULTILINE)
            assert found or self.process.poll() is None, self.told()
            return found[1] if found else None

        return until(search, what=f"a line {pattern}", timeout_s=self._patience_s)

    @property
    def folder(self) -> RunFolder:
        return RunFolder(Path(self._said(r"^run folder (.+)$")))

    @property
    def url(self) -> str:
        return self._said(r"^status +(http://\S+)$")

    def told(self) -> str:
        return f"stdout:\n{''.join(self.out)}\nstderr:\n{''.join(self.err)}"

    # -- how it stands ------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        return msgspec.json.decode(get(f"{self.url}/status")[2])

    def until_status(self, holds: Callable[[dict[str, Any]], bool], *, what: str) -> dict[str, Any]:
        def ask() -> dict[str, Any] | None:
            assert self.process.poll() is None, self.told()
            try:
                status = self.status()
            except OSError:  # it ends just now
                return None
            return status if holds(status) else None

        return until(ask, what=what, timeout_s=self._patience_s)

    def until_trained(self, steps: int) -> dict[str, Any]:
        return self.until_status(lambda s: s["steps_trained"] >= steps, what=f"{steps} steps trained")

    def children(self) -> list[psutil.Process]:
        """Everything it started, graders and ranks included."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def ranks(self) -> list[psutil.Process]:
        return [child for child in self.children() if child.cmdline()[-3:] == ["-m", "dora", "train"]
                and "torch.distributed.run" not in child.cmdline()]  # fmt: skip

    def engine(self, index: int) -> psutil.Process:
        """The process of one embedded engine, found by the port in its ready line."""
        port = int(
            re.findall(r"ready http://127.0.0.1:(\d+)", (self.folder.logs / f"engine-{index}.log").read_text())[-1]
        )
        for child in self.children():
            if "serve" in child.cmdline() and any(c.laddr.port == port for c in child.net_connections("tcp4")):
                return child
        raise AssertionError(f"nobody listens on {port}")

    # -- its end ------------------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """What Ctrl-C does, to this process alone."""
        self.process.send_signal(signal.SIGINT)

    def end(self, *, timeout_s: float = END_S) -> int:
        """Waits for its end; returns the exit code."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end within {timeout_s:g} s\n{self.told()}") from None
        for reader in self._readers:
            reader.join(timeout=30)
        return code


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that still run; psutil compares start times, so another process under the same id does not count."""
    return [p for p in processes if p.is_running() and _status(p) not in (None, psutil.STATUS_ZOMBIE)]


def _status(process: psutil.Process) -> str | None:
    """None: it has ended since it was looked at."""
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return None


def until_gone(processes: Sequence[psutil.Process], *, timeout_s: float = 10.0) -> None:
    until(lambda: not alive(processes), what=f"the end of {processes}", timeout_s=timeout_s)


# -- what it left ---------------------------------------------------------------------------------------------------


def events_of(folder: RunFolder, kind: type[E]) -> list[E]:
    return [event for event, _ in Journal(folder.journal) if isinstance(event, kind)]


def orders_of(folder: RunFolder, kind: type[C]) -> list[C]:
    return [order for _, orders in Journal(folder.journal) for order in orders if isinstance(order, kind)]


def assert_one_clear_error(result: subprocess.CompletedProcess[str], *, code: int, says: str) -> None:
    """One line on stderr that says what to do, no traceback."""
    lines = result.stderr.strip().splitlines()
    assert result.returncode == code, result
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("dora: ")
    assert re.search(says, lines[0]), lines[0]


def assert_audit_clean(folder: RunFolder) -> None:
    result = run_to_end("audit", str(folder.root))
    assert result.returncode == 0, result.stdout
    assert result.stdout.endswith("audit: C1, C2 and C3 hold\n")
