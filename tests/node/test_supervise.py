"""Children of a run: real processes, started, watched and ended."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import structlog

from dora.errors import ConfigError, RemoteError
from dora.node.lease import hold
from dora.node.plan import ProcessPlan
from dora.node.supervise import Child, Node

#: Longer than any test waits: a process that is still there was left behind.
FOREVER = "import threading; threading.Event().wait(300)"
READY = "print('loading'); print('ready http://127.0.0.1:7777', flush=True);"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"


def plan(code: str, *, ready_timeout_s: float | None = 20.0, name: str = "engine-0") -> ProcessPlan:
    return ProcessPlan(
        name=name,
        argv=(sys.executable, "-c", code),
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        ready_timeout_s=ready_timeout_s,
    )


#: Answers 200 at the port given, after a moment in which it listens to nothing.
SERVER = """
import http.server, sys, threading
class Well(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): print("asked", flush=True)
threading.Event().wait(0.3)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Well).serve_forever()
"""


async def is_well(url: str) -> bool:
    """Whether a server answers there."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    except OSError:
        return False
    writer.write(b"GET /health HTTP/1.0\r\n\r\n")
    answer = await reader.readline()
    writer.close()
    return b"200" in answer


def template(code: str, *words: str, ready_timeout_s: float = 20.0) -> ProcessPlan:
    """A server that prints no ready line and watches no lease."""
    argv = (sys.executable, "-c", code, *words)
    env = dict(os.environ)
    return ProcessPlan(name="engine-0", argv=argv, env=env, ready_timeout_s=ready_timeout_s, has_port=True)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with Node(logs=tmp_path, lease=tmp_path / "lease") as node:
        yield node


async def running(node: Node, code: str, *, name: str = "engine-0") -> tuple[Child, psutil.Process]:
    child = node.add(plan(code, name=name))
    await child.start()
    assert child.pid is not None
    return child, psutil.Process(child.pid)


async def test_a_child_is_up_when_it_prints_its_ready_line(node: Node):
    assert await node.add(plan(READY + FOREVER)).start() == "http://127.0.0.1:7777"


async def test_a_child_without_a_ready_line_is_up_at_once(node: Node):
    child = node.add(plan(FOREVER, ready_timeout_s=None))
    assert await child.start() == ""
    assert child.pid is not None


async def test_a_ready_line_may_arrive_in_pieces_and_amid_other_output(node: Node):
    code = "import sys; w = sys.stdout.write; w('not ready http://x\\nrea'); sys.stdout.flush(); w('dy http://h:1\\nmore');"
    assert await node.add(plan(code + "sys.stdout.flush();" + FOREVER)).start() == "http://h:1"


async def test_output_and_errors_of_every_start_are_in_the_childs_log(node: Node, tmp_path: Path):
    child = node.add(plan("import sys; print('ready http://h:1'); print('after'); sys.exit('to stderr')"))
    for _ in range(2):
        await child.start()
        await child.ended()
        await child.kill()
    assert (tmp_path / "engine-0.log").read_text().split().count("after") == 2
    assert "to stderr" in (tmp_path / "engine-0.log").read_text()


async def test_more_output_than_a_pipe_holds_does_not_block_a_child(node: Node, tmp_path: Path):
    child = node.add(plan(READY + "print('x' * 3_000_000); print('done')"))
    await child.start()
    assert "exit code 0" in await child.ended()
    await child.kill()
    assert (tmp_path / "engine-0.log").stat().st_size > 3_000_000


async def test_a_full_disk_drops_lines_of_a_childs_log_and_nothing_else(node: Node, tmp_path: Path):
    (tmp_path / "engine-0.log").symlink_to("/dev/full")  # every write fails with ENOSPC
    output = "import sys; sys.stdout.write('x' * 300_000); sys.stdout.flush();"  # more than a pipe holds
    child = node.add(plan(READY + output))
    assert await child.start() == "http://127.0.0.1:7777"
    assert "engine-0 ended with exit code 0" in await child.ended()
    await child.kill()


async def test_an_end_is_reported_with_its_cause_and_the_end_of_the_log(node: Node):
    child = node.add(plan(READY + "import sys; sys.exit('out of luck')"))
    await child.start()
    assert await child.ended() == f"engine-0 ended with exit code 1; its log ({child.log}) ends: " + (
        "loading | ready http://127.0.0.1:7777 | out of luck"
    )


TORCHRUN = """
import sys
print("dora trainer: model-1.safetensors: the file system is full")
print("dora trainer: rank 1: %s")
print("dora trainer: rank 0: a collective with another rank failed")
for line in ("exitcode: 1", "error_file: <N/A>", "traceback: To enable traceback see: https://pytorch.org", "=" * 60):
    print(line)
sys.exit(1)
"""


async def test_the_line_in_which_a_process_says_why_it_ends_is_shown_not_what_others_add(node: Node):
    """The first one of this start: what follows is a consequence, and an earlier start had another cause."""
    child = None
    for cause in ("the controller was unreachable", "a later cause"):
        trainer = plan(TORCHRUN % cause, ready_timeout_s=None, name="trainer")
        child = node.add(replace(trainer, cause="dora trainer: rank "))
        await child.start()
        said = f"dora trainer: rank 1: {cause}; its log: {child.log}"
        assert await child.ended() == f"trainer ended with exit code 1; {said}"
    assert child is not None
    quiet = node.add(
        replace(plan("print('killed')", ready_timeout_s=None, name="trainer"), cause="dora trainer: rank ")
    )
    await quiet.start()
    assert (await quiet.ended()).endswith(" | killed")


async def test_an_end_by_signal_names_the_signal(node: Node):
    child, process = await running(node, READY + FOREVER)
    process.send_signal(signal.SIGKILL)
    assert (await child.ended()).startswith("engine-0 ended with SIGKILL; ")


async def test_a_child_that_ends_before_it_is_ready_is_an_error_with_the_end_of_its_log(node: Node):
    with pytest.raises(RemoteError, match=r"engine-0: ended with exit code 1 before it was ready; .* no memory"):
        await node.add(plan("import sys; sys.exit('no memory')")).start()


async def test_a_child_with_an_invalid_configuration_is_a_config_error(node: Node):
    with pytest.raises(ConfigError, match=r"exit code 2 .* dora: no such model"):
        await node.add(plan("import sys; print('dora: no such model'); sys.exit(2)")).start()


async def test_a_program_that_does_not_exist_is_a_config_error(node: Node):
    argv, field = ("/nonexistent/python",), "engine.command"
    missing = ProcessPlan(name="engine-0", argv=argv, env={}, ready_timeout_s=None, field=field)
    with pytest.raises(
        ConfigError, match=r"^engine.command: engine-0: /nonexistent/python cannot be started \(No such file"
    ):
        await node.add(missing).start()


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE])
async def test_a_process_for_which_the_host_lacks_resources_may_be_started_again(
    node: Node, monkeypatch: pytest.MonkeyPatch, number: int
):
    async def fork(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    child = node.add(plan(READY + FOREVER))
    with monkeypatch.context() as full:
        full.setattr(asyncio, "create_subprocess_exec", fork)
        with pytest.raises(RemoteError, match=rf"engine-0: .* cannot be started \({os.strerror(number)}\)"):
            await child.start()
    assert await child.start() == "http://127.0.0.1:7777"


async def test_a_child_that_is_not_ready_in_time_is_killed(node: Node):
    child = node.add(plan(FOREVER, ready_timeout_s=0.2))
    with pytest.raises(RemoteError, match=r"engine-0: not ready after 0\.2 s; its log \(.*\) is empty"):
        await child.start()
    assert child.pid is None


async def test_a_child_can_be_started_again_after_its_end(node: Node):
    child, first = await running(node, READY + FOREVER)
    await child.kill()
    assert not first.is_running()
    assert await child.start() == "http://127.0.0.1:7777"
    assert child.pid not in (None, first.pid)


async def test_a_child_that_is_started_twice_runs_once(node: Node):
    child, first = await running(node, READY + FOREVER)
    await child.start()
    assert not first.is_running()


async def test_a_stop_lets_a_child_end_by_itself(node: Node, tmp_path: Path):
    code = "import signal, sys, threading; signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(0)));"
    child, process = await running(node, code + READY + "threading.Event().wait(300)")
    await child.stop(grace_s=20)
    assert not process.is_running()
    assert (tmp_path / "engine-0.log").read_text().endswith("saved\n")


async def test_a_child_that_ignores_sigterm_is_killed(node: Node):
    child, process = await running(node, STUBBORN + READY + FOREVER)
    await child.stop(grace_s=0.2)
    assert not process.is_running()


async def test_a_descendant_in_another_session_ends_with_the_child(node: Node):
    argv = f"[sys.executable, '-c', {FOREVER!r}]"
    quiet = "start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"
    code = f"import subprocess, sys; p = subprocess.Popen({argv}, {quiet});"
    child, process = await running(node, code + READY + "p.wait()")
    (grandchild,) = process.children()
    await child.stop()
    await_gone([process, grandchild])


async def test_a_child_has_its_own_session_so_that_ctrl_c_does_not_reach_it(node: Node):
    child, _ = await running(node, READY + FOREVER)
    assert child.pid is not None
    assert os.getsid(child.pid) == child.pid


async def test_leaving_the_node_leaves_no_process_behind(tmp_path: Path):
    async with Node(logs=tmp_path, lease=tmp_path / "lease") as node:
        _, first = await running(node, READY + FOREVER, name="engine-0")
        _, second = await running(node, READY + FOREVER, name="engine-1")
    await_gone([first, second])


async def test_a_child_that_does_not_end_fails_neither_the_end_of_the_node_nor_that_of_the_others(tmp_path: Path):
    reason = "engine-0: process 4711 does not end after SIGKILL"

    async def does_not_end(*, grace_s: float) -> None:
        raise RemoteError(reason)

    async with Node(logs=tmp_path, lease=tmp_path / "lease") as node:
        stuck, _ = await running(node, READY + FOREVER)
        stuck.stop = does_not_end  # type: ignore[method-assign]
        _, other = await running(node, READY + FOREVER, name="engine-1")
        with structlog.testing.capture_logs() as said:
            await node.stop()
    await_gone([other])
    assert [line["reason"] for line in said] == [reason]
    await stuck.kill()


async def test_an_error_inside_the_node_leaves_no_process_behind(tmp_path: Path):
    seen = []

    async def job() -> None:
        async with Node(logs=tmp_path, lease=tmp_path / "lease") as node:
            _, process = await running(node, READY + FOREVER)
            seen.append(process)
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        await job()
    await_gone(seen)


async def test_kill_all_ends_everything_without_waiting(node: Node):
    _, first = await running(node, STUBBORN + READY + FOREVER, name="engine-0")
    _, second = await running(node, STUBBORN + READY + FOREVER, name="engine-1")
    node.kill_all()
    await_gone([first, second])


async def test_a_node_holds_the_lease_while_it_is_open(tmp_path: Path):
    async with Node(logs=tmp_path, lease=tmp_path / "lease"):
        with pytest.raises(ConfigError, match="is a run still alive there"):
            async with Node(logs=tmp_path, lease=tmp_path / "lease"):
                raise AssertionError("two nodes share a lease")
    async with Node(logs=tmp_path, lease=tmp_path / "lease"):
        pass


def await_gone(processes: list[psutil.Process]) -> None:
    gone, alive = psutil.wait_procs(processes, timeout=10)
    assert (len(gone), alive) == (len(processes), [])


# --- servers without a ready line


async def test_a_server_with_a_port_is_ready_when_it_is_healthy_and_gets_a_free_port_at_each_start(node: Node):
    child = node.add(template(SERVER, "{port}"), is_well=is_well)
    first = await child.start()
    assert first.startswith("http://127.0.0.1:")
    second = await child.start()
    assert await is_well(second)
    assert second != first
    assert not await is_well(first)


async def test_the_error_of_a_server_that_ends_before_it_is_healthy_has_the_reason(node: Node):
    child = node.add(template("import sys; sys.exit('no memory')"), is_well=is_well)
    with pytest.raises(RemoteError, match=r"ended with exit code 1 before it was ready; .* no memory"):
        await child.start()
    child = node.add(template("import sys; print('unknown flag', flush=True); sys.exit(2)"), is_well=is_well)
    with pytest.raises(ConfigError, match="unknown flag"):
        await child.start()


async def test_a_server_that_never_becomes_healthy_times_out(node: Node):
    child = node.add(template(FOREVER, ready_timeout_s=0.5), is_well=is_well)
    with pytest.raises(RemoteError, match=r"not ready after 0\.5 s"):
        await child.start()
    assert child.pid is None


#: A rank; what starts it (torchrun, say) watches nothing.
RANK = "import os; from pathlib import Path; from dora.node.lease import watch_lease; "
RANK += "watch_lease(Path(os.environ['DORA_LEASE'])); print('ready', flush=True); " + FOREVER
AGENT = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {RANK!r}], stdout=subprocess.PIPE); "
AGENT += "p.stdout.readline(); print('ready http://h:1', flush=True); p.wait()"
CONTROLLER = f"""
import asyncio, os, sys, uvloop
from pathlib import Path
from dora.node.plan import ProcessPlan
from dora.node.supervise import Node
async def main():
    lease = Path(sys.argv[1]) / "lease"
    async with Node(logs=Path(sys.argv[1]), lease=lease) as node:
        env = {{**os.environ, "DORA_LEASE": str(lease)}}
        plan = ProcessPlan(name="trainer", argv=(sys.executable, "-c", {AGENT!r}), env=env, ready_timeout_s=60)
        await node.add(plan).start()
        print("started", flush=True)
        await asyncio.Event().wait()
uvloop.run(main())
"""


@pytest.mark.parametrize("stopped", [[], [0], [1], [0, 1]], ids=["none", "agent", "rank", "both"])
def test_children_end_with_a_controller_that_is_killed_even_if_they_are_stopped(tmp_path: Path, stopped: list[int]):
    """Without SIGCONT: no process is left that could write after one."""
    controller = subprocess.Popen([sys.executable, "-c", CONTROLLER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert controller.stdout is not None
    with controller, controller.stdout:
        assert controller.stdout.readline() == "started\n"
        below = psutil.Process(controller.pid).children(recursive=True)
        assert len(below) == 2
        for index in stopped:
            below[index].suspend()
        controller.kill()
    await_gone(below)


async def test_a_child_inherits_no_lock(node: Node, tmp_path: Path):
    with hold(tmp_path / "lock"):
        _, process = await running(node, READY + FOREVER)
        held = {file.path for file in process.open_files()}
        own = {file.path for file in psutil.Process().open_files()}
    locks = {str(tmp_path / "lock"), str(tmp_path / "lease")}
    assert locks <= own
    assert not locks & held
