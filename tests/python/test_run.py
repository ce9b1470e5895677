"""A run as an object, without starting one: what its folder says at any time, and which process it may signal."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import msgspec
import psutil
import pytest

import dora
from dora.app.demo import unpack_demo
from dora.app.saved_status import FRESH_S, SavedStatus, read_saved, read_status
from dora.jobs import run as runs
from dora.jobs.rows import Rows
from dora.jobs.start import call, last_words, reap, start
from dora.journal.run_folder import RunFolder
from dora.node.holder import Holder, find_process, hold_run, note_holder, read_holder
from dora.observe.sentence import sentence
from tests.e2e.runs import heed_ctrl_c
from tests.journal.recorded import full_run, write

#: A process that has a file open until it is interrupted. It blocks SIGINT: one that arrived before a read would not
#: end that read.
HOLDS = """
import signal, sys
held = open(sys.argv[1])
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
print("up", flush=True)
signal.sigwait([signal.SIGINT])
print("interrupted", flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """The demo's recorded run, finished."""
    return RunFolder(unpack_demo(tmp_path))


@contextmanager
def holder_of(folder: RunFolder, *, opens: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """A process that the lock names as the run's own. `opens`: what it has open instead of the lock."""
    folder.lock.touch()
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(opens or folder.lock)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=heed_ctrl_c,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            note_holder(folder.lock, Holder.of(process.pid))
            yield process
        finally:
            process.kill()


def set_phase(folder: RunFolder, phase: str, *, reason: str = "", age_s: float = 0.0) -> None:
    """Write the status anew, as a run does."""
    saved = read_saved(folder.root)
    now = replace(saved.snapshot, phase=phase, reason=reason)
    at, holder = time.time() - age_s, read_holder(folder.lock)
    status = SavedStatus(at, "http://127.0.0.1:9", replace(now, sentence=sentence(now)), holder=holder)
    written = folder.status.with_name("written")
    written.write_bytes(msgspec.json.encode(status))
    written.replace(folder.status)


# -- reading ----------------------------------------------------------------------------------------------------------


def test_a_finished_run_is_read_from_its_folder_alone(folder: RunFolder) -> None:
    run = dora.load(folder.root)
    assert run == dora.Run(folder.root)
    assert not run.is_running
    assert run.wait() == run.status() == run.stop()
    assert run.status()["sentence"].startswith("Finished in 1 min 13 s: all 64 steps are trained.")
    assert [row["step"] for row in run.metrics()] == [*range(64)]
    assert {row["name"] for row in run.held_out()} == {"heldout"}
    assert [run.held_out()[i]["version"] for i in (0, -1)] == [0, 64]
    samples = run.samples(None)
    assert run.samples() == samples[-runs.SAMPLES :]
    assert {"prompt", "text", "reward", "tokens"} <= set(samples[0])


def test_a_handle_is_a_description_that_does_not_change(folder: RunFolder) -> None:
    with pytest.raises(FrozenInstanceError):
        dora.load(folder.root).pid = 3  # type: ignore[misc]


def test_rows_become_an_arrow_table_with_all_columns(folder: RunFolder) -> None:
    run = dora.load(folder.root)
    table = run.metrics().to_arrow()
    assert table.column("step").to_pylist() == [*range(64)]
    assert run.samples().to_arrow().num_rows == runs.SAMPLES
    mixed = Rows([{"a": 1, "terms": [["x", 1.0]]}, {"b": "\ud800", "a": 2.5}]).to_arrow()
    assert mixed.to_pydict() == {"a": [1.0, 2.5], "terms": ['[["x", 1.0]]', None], "b": [None, '"\\ud800"']}
    assert Rows().to_arrow().num_rows == 0


def test_damaged_and_torn_rows_of_a_file_are_left_out(folder: RunFolder) -> None:
    folder.metrics.write_bytes(
        b'{"kind":"step","step":0}\nnot json\n[1]\n' + b"[" * 9_999 + b'\n\xff\n{"kind":"step","st'
    )
    assert dora.load(folder.root).metrics() == [{"kind": "step", "step": 0}]
    folder.metrics.unlink()
    assert dora.load(folder.root).metrics() == []


def test_a_pipe_in_place_of_a_file_is_refused(folder: RunFolder) -> None:
    folder.metrics.unlink()
    os.mkfifo(folder.metrics)
    with pytest.raises(dora.ConfigError, match="is a pipe, not a regular file"):
        dora.load(folder.root)
    with pytest.raises(dora.ConfigError, match="is a pipe, not a regular file"):
        dora.Run(folder.root).metrics()


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(dora.ConfigError, match="is not a run folder"):
        dora.load(tmp_path)
    for read in (dora.load, dora.attach):
        with pytest.raises(dora.ConfigError, match="no such run folder"):
            read(tmp_path / "gone")


def test_a_deleted_folder_is_one_clear_error_and_still_shown(tmp_path: Path) -> None:
    run = dora.Run(tmp_path / "<b>gone</b>", os.getpid(), 0)
    for ask in (run.status, run.metrics, run.held_out, run.samples, run.wait, run.stop):
        with pytest.raises(dora.ConfigError, match=r"no such run folder; was it deleted\?"):
            ask()
    assert not run.is_running
    assert "&lt;b&gt;gone&lt;/b&gt;: no such run folder; was it deleted?" in run._repr_html_()


# -- a notebook's picture ---------------------------------------------------------------------------------------------


def test_a_notebook_shows_the_sentence_and_curves_without_scripts(folder: RunFolder) -> None:
    html = dora.load(folder.root)._repr_html_()
    assert re.findall(r"<p>(.*?)</p>", html)[0].startswith("Finished in 1 min 13 s: all 64 steps are trained.")
    titles = re.findall(r"<figcaption>(.*?)</figcaption>", html)
    assert [title.rpartition(" ")[0] for title in titles] == ["reward", "held-out: heldout", "tokens per answer"]
    assert html.count("<polyline") == 3
    assert len(html) < 20_000


def test_text_of_a_run_cannot_become_markup_in_a_notebook(folder: RunFolder) -> None:
    attack = "<script>alert(1)</script>"
    rows = [
        {"kind": "evaluation", "name": attack, "version": 1, "mean": 0.5},
        {"kind": "evaluation", "name": [attack], "version": attack, "mean": attack},
        {"kind": "step", "step": 1, "reward_all_mean": 1e308},
        {"kind": "step", "step": {"a": attack}},
    ]
    huge = b'{"kind":"step","step":' + b"9" * 400 + b',"reward_all_mean":1}'
    folder.metrics.write_bytes(b"".join(line + b"\n" for line in (*map(msgspec.json.encode, rows), huge)))
    set_status = replace(read_saved(folder.root).snapshot, sentence=attack)
    folder.status.write_bytes(msgspec.json.encode(SavedStatus(0.0, "", set_status)))
    html = dora.load(folder.root)._repr_html_()
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 2, "in the sentence and in the title of the curve"


# -- a process and its folder -----------------------------------------------------------------------------------------


def test_an_attached_run_equals_the_one_that_was_started(folder: RunFolder) -> None:
    with holder_of(folder) as process:
        run = dora.attach(folder.root)
        assert (run.folder, run.pid) == (folder.root, process.pid)
        assert run.is_running
        assert dora.attach(folder.root) == run
    assert not run.is_running


def test_stop_interrupts_the_process_and_waits_for_it(folder: RunFolder) -> None:
    with holder_of(folder) as process:
        set_phase(folder, "interrupted", reason="interrupted by the user")
        assert dora.attach(folder.root).stop()["phase"] == "interrupted"
        assert process.stdout is not None
        assert process.stdout.read() == "interrupted\n"


def test_wait_gives_up_after_its_time_and_the_run_goes_on(folder: RunFolder) -> None:
    with holder_of(folder):
        run = dora.attach(folder.root)
        with pytest.raises(TimeoutError, match=r"still runs after 0\.01 s"):
            run.wait(timeout_s=0.01)
        assert run.is_running


#: Waits for a run, whose process it kills once it really waits.
WAITS = """
import os, signal, sys, time
pid, sleep = int(sys.argv[2]), time.sleep
time.sleep = lambda seconds: (os.kill(pid, signal.SIGKILL), sleep(seconds))
import dora
print(dora.attach(sys.argv[1]).wait()["phase"])
"""


def test_the_end_of_a_process_that_nobody_reaps_is_seen(folder: RunFolder) -> None:
    """In a container without an init, PID 1 leaves it a zombie."""
    with holder_of(folder) as process:
        set_phase(folder, "finished")
        waits = [sys.executable, "-c", WAITS, str(folder.root), str(process.pid)]
        assert subprocess.check_output(waits, text=True, timeout=30) == "finished\n"
        assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE


def test_a_killed_run_is_interrupted_without_notice_at_once_and_wait_says_so(folder: RunFolder) -> None:
    with holder_of(folder) as process:
        set_phase(folder, "running")
        run = dora.attach(folder.root)
        process.kill()
        with pytest.raises(dora.RunFailed, match="the controller ended without notice"):
            run.wait()
    assert run.status()["phase"] == "interrupted"
    assert asyncio.run(read_status(folder.root)).phase == "interrupted"


def test_a_run_that_can_no_longer_write_its_status_is_running_while_its_process_is(folder: RunFolder) -> None:
    """As on a full disk."""
    with holder_of(folder):
        set_phase(folder, "running", age_s=2 * FRESH_S)
        assert dora.attach(folder.root).status()["phase"] == "running"
        assert asyncio.run(read_status(folder.root)).phase == "running"
    assert asyncio.run(read_status(folder.root)).phase == "interrupted"


def test_a_failed_run_raises_its_reason_in_wait(folder: RunFolder) -> None:
    with holder_of(folder):
        set_phase(folder, "failed", reason="every reward failed")
    with pytest.raises(dora.RunFailed, match="every reward failed"):
        dora.attach(folder.root).wait()


def test_the_status_of_the_process_before_a_resume_is_not_that_of_the_resumed_run(folder: RunFolder) -> None:
    note_holder(folder.lock, Holder.of(os.getpid()))
    set_phase(folder, "interrupted")
    with holder_of(folder):
        assert dora.attach(folder.root).status()["phase"] == "starting"
    folder.output.write_text("dora: of an earlier life\n$ dora run --resume x\ndora: rollout.group_size: changed\n")
    with pytest.raises(dora.RunFailed, match=r"^Failed while starting: rollout.group_size: changed\.$"):
        dora.attach(folder.root).wait()


def test_the_end_of_a_run_is_known_even_if_the_clock_was_set_back_meanwhile(folder: RunFolder) -> None:
    with holder_of(folder):
        set_phase(folder, "finished")
    os.utime(folder.lock, (time.time() + 60, time.time() + 60))
    assert dora.attach(folder.root).wait()["phase"] == "finished"


@pytest.mark.parametrize("written", [b"", b"{}", b"\xff", b'{"pid":-1,"started":0,"host":"x"}' * 99])
def test_a_lock_that_names_no_process_is_refused_by_attach(folder: RunFolder, written: bytes) -> None:
    folder.lock.write_bytes(written)
    with pytest.raises(dora.ConfigError, match=r"does not say which process it belongs to; dora\.load reads"):
        dora.attach(folder.root)


def test_a_run_of_another_host_is_not_taken_for_a_process_of_this_one(folder: RunFolder) -> None:
    note_holder(folder.lock, Holder(os.getpid(), Holder.of(os.getpid()).started, "elsewhere"))
    with pytest.raises(dora.ConfigError, match="its process is on elsewhere"):
        dora.attach(folder.root)


def test_a_run_of_another_user_is_not_attached(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    note_holder(folder.lock, Holder.of(os.getpid()))
    monkeypatch.setattr(os, "geteuid", lambda: folder.root.stat().st_uid + 1)
    with pytest.raises(dora.ConfigError, match="belongs to another user"):
        dora.attach(folder.root)


def test_a_lock_cannot_have_a_process_signaled_that_has_nothing_to_do_with_the_run(folder: RunFolder) -> None:
    """A folder may come from others, who know processes of this user on a shared machine."""
    with holder_of(folder, opens=folder.config) as stranger:
        run = dora.attach(folder.root)
        assert not run.is_running
        run.stop()
        with pytest.raises(subprocess.TimeoutExpired):
            stranger.wait(0.2)


@pytest.mark.parametrize("pid", [-1, 0, 2**31 - 1, 2**70])
def test_an_impossible_process_is_not_running(folder: RunFolder, pid: int) -> None:
    assert find_process(pid, 0, lock=folder.lock) is None


def test_a_process_with_the_same_number_that_began_later_is_another(folder: RunFolder) -> None:
    with holder_of(folder) as process:
        started = Holder.of(process.pid).started
        assert find_process(process.pid, started, lock=folder.lock) is not None
        assert find_process(process.pid, started - 10, lock=folder.lock) is None


def test_a_run_is_known_after_the_clock_of_its_host_was_set(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux computes the time of the boot from the clock, and psutil the time of a start from that of the boot."""
    with holder_of(folder) as process:
        (proc := tmp_path / "proc").mkdir()
        (proc / str(process.pid)).symlink_to(f"/proc/{process.pid}")
        booted = re.sub(
            r"(?m)(?<=^btime )\d+", lambda found: str(int(found[0]) + 3_600), Path("/proc/stat").read_text()
        )
        (proc / "stat").write_text(booted)
        monkeypatch.setattr(psutil, "PROCFS_PATH", str(proc))
        assert dora.attach(folder.root).is_running


def test_the_process_of_a_run_writes_itself_into_the_lock(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text("x" * 500)
    with hold_run(lock):
        assert read_holder(lock) == Holder.of(os.getpid())


def test_a_resume_that_is_refused_leaves_the_holder(folder: RunFolder) -> None:
    with hold_run(folder.lock):
        with pytest.raises(dora.ConfigError, match="lock is held by another process"):
            dora.resume(folder.root)
        assert read_holder(folder.lock) == Holder.of(os.getpid())
    assert not folder.output.exists()


def test_a_run_that_has_nothing_more_to_do_keeps_its_last_process(folder: RunFolder) -> None:
    folder = RunFolder(folder.root.rename(folder.root.with_name("dora-20260101-000000-abcd")))
    world = full_run()
    folder.journal.unlink()
    write(folder, world.state.settings, world.journal)
    note_holder(folder.lock, Holder.of(os.getpid()))
    set_phase(folder, "finished")
    ended = [sys.executable, "-m", "dora", "run", "--continue", "--trust-folder", "--set", "run.steps=10"]
    said = subprocess.check_output([*ended, "--set", f"run.folder={folder.root.parent}"], text=True, timeout=60)
    assert "the run has ended: all 10 steps are trained; there is nothing to resume" in said
    assert read_holder(folder.lock) == Holder.of(os.getpid())
    assert dora.attach(folder.root).status()["phase"] == "finished"


# -- starting ---------------------------------------------------------------------------------------------------------


def test_a_process_is_known_by_its_command_line_once_it_is_started(tmp_path: Path) -> None:
    """A child has none until the kernel has loaded it; `wait` took such a run for one that had ended."""
    for _ in range(20):
        pid = start(["status", str(tmp_path)], output=tmp_path / "output.log")
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert command.split(b"\0")[1:5] == [b"-m", b"dora", b"status", bytes(tmp_path)]


def test_a_started_process_heeds_sigint_although_its_parent_ignores_it_and_leads_a_session(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        pid = start(["simulate", "--seeds", "9"], output=tmp_path / "output.log")
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        [ignored] = re.findall(r"^SigIgn:\s(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        assert not int(ignored, 16) >> (signal.SIGINT - 1) & 1
        assert os.getsid(pid) == pid
        assert os.readlink(f"/proc/{pid}/fd/0") == os.devnull
        assert os.readlink(f"/proc/{pid}/fd/1") == os.readlink(f"/proc/{pid}/fd/2") == str(tmp_path / "output.log")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_child_that_has_ended_does_not_stay_a_zombie(tmp_path: Path) -> None:
    pid = start(["--version"], output=tmp_path / "output.log")
    reap(pid)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
    assert re.fullmatch(r"\$ dora --version\ndora [\d.]+\n", (tmp_path / "output.log").read_text())


def test_a_command_that_is_refused_raises_its_own_words() -> None:
    with pytest.raises(dora.ConfigError, match=r"^gone\.toml: no such file$"):
        call(["check", "gone.toml"])


def test_the_output_that_an_error_of_a_command_names_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "typer.py").write_text("raise ValueError('broken')")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as broken:
        broken.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        with pytest.raises(dora.RunFailed, match=r"^ValueError: broken \(a bug: see .*\)$") as failed:
            call(["check"])
    output = Path(str(failed.value).rpartition(" ")[2].removesuffix(")"))
    assert "Traceback" in output.read_text()
    with pytest.raises(dora.ConfigError):
        call(["check", "gone.toml"])
    assert [*tmp_path.glob("dora-*")] == [output.parent]


def test_the_last_words_are_the_errors_at_the_end_of_the_last_start(tmp_path: Path) -> None:
    output = tmp_path / "output.log"
    assert last_words(output) == []
    output.write_text("$ dora run\ndora: old\n$ dora run\nstep 1\ndora: a\ndora: b\n")
    assert last_words(output) == ["a", "b"]
    output.write_text("$ dora run\nTraceback (most recent call last):\n  File\nKeyError: 'x'\n")
    assert last_words(output) == [f"KeyError: 'x' (a bug: see {output})"]
    output.write_text("$ dora run\ndora: old\n$ dora run\nrun folder x\n")
    assert last_words(output) == []


def test_a_folder_that_cannot_be_written_is_one_clear_error_and_nothing_starts(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(dora.ConfigError, match=r"^run\.folder: cannot write .*config\.toml: File too large$"):
            dora.run(run__folder=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_an_invalid_configuration_is_refused_before_a_folder_exists(tmp_path: Path) -> None:
    with pytest.raises(dora.ConfigError, match=r"run\.stepz"):
        dora.run(run={"folder": tmp_path, "stepz": 3})
    assert [*tmp_path.iterdir()] == []


# -- a full disk ------------------------------------------------------------------------------------------------------

#: Prints into a file on a disk that is full after the first line, and again when there is space.
PRINTS = """
import sys
from pathlib import Path
from dora.cli.output import say, tell, tolerate_lost_output
folder = Path(sys.argv[1])
opened = sys.stdout = sys.stderr = (folder / "output.log").open("a")
tolerate_lost_output()
say("first")
filler = (folder / "filler").open("wb", buffering=0)
try:
    while filler.write(bytes(4096)): pass
except OSError:
    pass
for number in range(1000):
    say(f"lost {number}")
    tell("lost too")
(folder / "filler").unlink()
filler.close()
say("last")
sys.__stdout__.write((folder / "output.log").read_text())
"""


def test_what_a_run_prints_on_a_full_disk_is_dropped_and_does_not_end_it(tmp_path: Path) -> None:
    mounted = [
        "unshare",
        "--mount",
        "--map-root-user",
        "sh",
        "-c",
        'mount -t tmpfs -o size=64k tmpfs "$0" && exec "$@"',
    ]
    if shutil.which("unshare") is None or subprocess.run([*mounted, str(tmp_path), "true"], check=False).returncode:
        pytest.skip("this machine lets nobody mount a file system of their own")
    said = subprocess.run(
        [*mounted, str(tmp_path), sys.executable, "-c", PRINTS, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    lines = said.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("first", "last")
    assert "lost 999" not in lines


def test_what_a_run_prints_into_a_pipe_without_a_reader_is_dropped(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    prints = "from dora.cli.output import say, tolerate_lost_output; tolerate_lost_output(); say('lost'); say('lost')"
    with os.fdopen(writing) as pipe:
        said = subprocess.run(
            [sys.executable, "-c", prints], stdout=pipe, stderr=subprocess.PIPE, check=True, timeout=60
        )
    assert said.stderr == b""
