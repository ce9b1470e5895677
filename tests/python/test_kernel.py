"""Runs under a real notebook kernel: interrupted, killed and restarted, two at once, failing, and deleted.

One story is played once; what was seen in it is asserted rule by rule.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook

import dora

pytestmark = [pytest.mark.deep, pytest.mark.timeout(1500)]

PATIENCE_S = 600.0
#: A job that would take hours, of steps of a fraction of a second.
FIRST_CELL = """
import dora
job = {
    "run": {"steps": 100_000, "folder": "runs"},
    "rollout": {"groups_per_step": 4, "group_size": 4, "max_staleness": 0, "filter_zero_variance": False},
    "engine": {"instances": 1},
    "trainer": {"ranks": 1, "checkpoint_every": 100_000, "start_timeout_s": 600},
    "eval": {"sets": []},
}
"""


class Notebook:
    """A notebook in a folder, whose cells a kernel executes one by one."""

    def __init__(self, folder: Path) -> None:
        self._client = NotebookClient(
            new_notebook(), timeout=int(PATIENCE_S), resources={"metadata": {"path": str(folder)}}
        )

    async def open(self) -> None:
        self._client.create_kernel_manager()
        await self._client.async_start_new_kernel()
        await self._client.async_start_new_kernel_client()

    async def close(self) -> None:
        """Kill the kernel, as a restart of it does."""
        self._client.kc.stop_channels()
        await self._client.km.shutdown_kernel(now=True)

    async def execute(self, code: str) -> str:
        """Return the HTML that the cell shows, or else its text; CellExecutionError if it raises."""
        return _shown((await self._execute(new_code_cell(code))).outputs)

    async def _execute(self, cell: Any) -> Any:
        self._client.nb.cells.append(cell)
        await self._client.async_execute_cell(cell, len(self._client.nb.cells) - 1)
        return cell

    async def error_of(self, code: str) -> str:
        """Return the error that the cell ends with."""
        with pytest.raises(CellExecutionError) as raised:
            await self.execute(code)
        return f"{raised.value.ename}: {raised.value.evalue}"

    async def interrupt(self, code: str) -> str:
        """Interrupt the cell while it does the last of its lines; return the error that it ends with."""
        *lines, last = code.strip().splitlines()
        cell = new_code_cell("\n".join([*lines, "print('busy', flush=True)", last]))
        executing = asyncio.create_task(self._execute(cell))
        while "busy" not in _shown(cell.outputs):
            await asyncio.wait([executing], timeout=0.1)
        await asyncio.wait([executing], timeout=1.0)  # so that it is in the last line
        await self._client.km.interrupt_kernel()
        with pytest.raises(CellExecutionError) as raised:
            await executing
        return str(raised.value.ename)


def _shown(outputs: Sequence[Any]) -> str:
    texts = [out.get("data", {}).get("text/html") or out.get("data", {}).get("text/plain") or out.get("text", "")
             for out in outputs]  # fmt: skip
    return "".join(texts)


@dataclass
class Story:
    """What was seen."""

    folders: list[Path] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  #: trained by each run while both went on
    printed: list[str] = field(default_factory=list)
    error_elsewhere: str = ""
    after_interrupt: list[bool] = field(default_factory=list)
    after_restart: list[bool] = field(default_factory=list)
    attached: str = ""  #: what the new kernel shows of the first run
    attached_equal: str = ""
    error_in_wait: str = ""
    stopped: dict[str, Any] = field(default_factory=dict)
    other_goes_on: bool = False
    left_of_stopped: list[psutil.Process] = field(default_factory=list)
    resumed: str = ""
    refused: str = ""
    error_of_failed: str = ""
    status_of_failed: dict[str, Any] = field(default_factory=dict)
    error_of_deleted: str = ""
    shown_of_deleted: str = ""
    left_of_deleted: list[psutil.Process] = field(default_factory=list)


async def until(holds: Callable[[], bool], *, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not await asyncio.to_thread(holds):
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.2)


def has_trained(run: dora.Run) -> bool:
    now = run.status()
    assert now["phase"] in ("starting", "running"), now["sentence"]
    return now.get("steps_trained", 0) >= 2 and "\nstep 1/" in (run.folder / "output.log").read_text()


def tree(run: dora.Run) -> list[psutil.Process]:
    process = psutil.Process(run.pid)
    return [process, *process.children(recursive=True)]


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


async def play(folder: Path) -> Story:
    seen = Story()
    notebook = Notebook(folder)
    await notebook.open()
    processes: list[psutil.Process] = []
    try:
        await notebook.execute(FIRST_CELL)
        names = await notebook.execute("a = dora.run(job)\nb = dora.run(job)\nprint(a.folder)\nprint(b.folder)")
        seen.folders = [Path(name) for name in names.split()]
        runs = [dora.attach(name) for name in seen.folders]
        for run in runs:
            await until(lambda run=run: has_trained(run), what=f"steps of {run.folder}")
        processes = [process for run in runs for process in tree(run)]
        seen.printed = [(name / "output.log").read_text() for name in seen.folders]
        seen.steps = [run.status()["steps_trained"] for run in runs]

        seen.error_elsewhere = await notebook.interrupt("import time\ntime.sleep(600)")
        seen.after_interrupt = [run.is_running for run in runs]
        await notebook.close()
        await notebook.open()
        seen.after_restart = [run.is_running for run in runs]
        await notebook.execute(FIRST_CELL)
        seen.attached = await notebook.execute(f"a = dora.attach({str(seen.folders[0])!r})\na")
        seen.attached_equal = await notebook.execute("a.pid")

        of_first = tree(runs[0])
        seen.error_in_wait = await notebook.interrupt("a.wait()")
        seen.stopped, seen.other_goes_on = runs[0].status(), runs[1].is_running
        seen.left_of_stopped = alive(of_first)
        seen.resumed = await notebook.execute("a = dora.resume(a)\nprint(a.status()['phase'], a.stop()['phase'])")

        seen.refused = await notebook.error_of(
            "def mine(response): return 1.0\n"
            "dora.run(job, task__rewards=[{'kind': 'function', 'name': mine}])"
        )  # fmt: skip
        seen.error_of_failed = await notebook.error_of(
            "c = dora.run(job, task__rewards=[{'kind': 'function', 'name': 'gone.py:mine'}])\nc.wait()"
        )
        seen.status_of_failed = dora.load((await notebook.execute("print(c.folder)")).strip()).status()

        of_second = tree(runs[1])
        await notebook.execute(
            f"b = dora.attach({str(seen.folders[1])!r})\n"
            "import shutil\n"
            "while b.folder.exists(): shutil.rmtree(b.folder, ignore_errors=True)"
        )
        seen.error_of_deleted = await notebook.error_of("b.wait()")
        seen.shown_of_deleted = await notebook.execute("b")
        seen.left_of_deleted = alive(of_second)
    finally:
        for process in alive(processes):
            process.kill()
        await notebook.close()
    return seen


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return asyncio.run(play(tmp_path_factory.mktemp("notebook")))


def test_two_runs_of_one_notebook_go_on_at_the_same_time(story: Story) -> None:
    assert min(story.steps) >= 2
    assert (
        len({address for text in story.printed for address in re.findall(r"^status +(\S+)", text, re.MULTILINE)}) == 2
    )


def test_a_run_prints_plain_lines_although_the_kernel_asks_for_colors(story: Story) -> None:
    assert all(re.search(r"^step 1/100000  reward ", text, re.MULTILINE) for text in story.printed)
    assert not any("\x1b" in text for text in story.printed)


def test_an_interrupt_of_another_cell_does_not_reach_the_runs(story: Story) -> None:
    assert story.error_elsewhere == "KeyboardInterrupt"
    assert story.after_interrupt == [True, True]


def test_a_killed_and_restarted_kernel_leaves_the_runs_alone_and_attaches(story: Story) -> None:
    assert story.after_restart == [True, True]
    assert re.search(r"<p>Step [\d,]+ (of|is)", story.attached), story.attached
    assert "<polyline" in story.attached
    assert story.attached_equal.isdecimal()


def test_an_interrupt_in_wait_stops_that_run_cleanly(story: Story) -> None:
    assert story.error_in_wait == "KeyboardInterrupt"
    assert story.stopped["phase"] == "interrupted"
    assert story.stopped["reason"] != "the controller ended without notice"
    assert (story.left_of_stopped, story.other_goes_on) == ([], True)


def test_a_stopped_run_is_resumed_and_stops_while_it_starts(story: Story) -> None:
    assert story.resumed == "starting interrupted\n"


def test_a_reward_of_the_notebook_itself_is_refused_with_how_to_move_it(story: Story) -> None:
    assert story.refused.startswith("ConfigError: task.rewards.0.name: 'mine' is defined in a notebook")
    assert "%%writefile" in story.refused


def test_a_run_that_ends_with_an_error_raises_it_in_wait(story: Story) -> None:
    assert re.match(r"RunFailed: Failed while starting: task\.rewards\.0\.name: gone\.py: no such file",
                    story.error_of_failed)  # fmt: skip
    assert story.status_of_failed["phase"] == "failed"


def test_a_run_whose_folder_is_deleted_ends_and_says_so(story: Story) -> None:
    assert story.error_of_deleted.startswith("ConfigError: ")
    assert "no such run folder; was it deleted?" in story.error_of_deleted
    assert "was it deleted?" in story.shown_of_deleted
    assert story.left_of_deleted == []
