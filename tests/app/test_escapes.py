"""Texts of files and other processes that would control a terminal, in every field: commands show them harmlessly."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import get_args

import msgspec
import pytest
import tomli_w
from rich.console import Console

from dora.app.demo import unpack_demo
from dora.app.saved_status import SavedStatus
from dora.cli import output
from dora.cli.app import main
from dora.cli.instances import draw
from dora.cli.summary import summary
from dora.config.schema import Config
from dora.core.commands import AnyCommand
from dora.core.events import AnyEvent
from dora.errors import DoraError, one_line
from dora.journal.codec import FORMAT, Epoch, Handled, Header, Note
from dora.journal.deep import KeptTrajectory, encode_kept
from dora.journal.run_folder import RunFolder
from dora.journal.spans import TimelineRow, encode_line
from dora.journal.writer import JournalWriter
from dora.observe.snapshot import Snapshot, encode
from dora.status.page_server import InstanceReply
from dora.status.terminal import PlainView
from dora.weights.store import Manifest
from tests.escapes import HOSTILE, answering, as_json, hostile_answers, require_harmless
from tests.journal.recorded import full_run
from tests.made import made, plain, poisoned


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run folder with hostile text in every field of every file."""
    found = RunFolder(unpack_demo(tmp_path).rename(tmp_path / "hostile"))
    for path in (found.journal, found.config):
        path.unlink()
    found.config.write_bytes(tomli_w.dumps(_poisoned(Config().model_dump(mode="json"))).encode())
    facts = [made(kind, text=HOSTILE) for kind in get_args(AnyEvent)]
    orders = tuple(made(kind, text=HOSTILE) for kind in get_args(AnyCommand))
    world = full_run()
    with JournalWriter(found.journal) as journal:
        journal.append(Header(FORMAT, HOSTILE, "2026-01-01T00:00:00Z", HOSTILE, world.state.settings))
        journal.append(made(Epoch, text=HOSTILE))
        journal.append(made(Note, text=HOSTILE))
        for fact in facts:
            journal.append(Handled(fact, orders))
        for event, commands in world.journal:
            journal.handled(event, commands)
    found.tokens.write_bytes(b"")
    found.spans.write_bytes(encode_line(("rank", 0, 0.0, 1.0, HOSTILE, 3)) * 2)
    with found.timeline.open("ab") as timeline:
        timeline.write(encode_line(made(TimelineRow, text=HOSTILE)))
    with found.trajectories.open("ab") as kept:
        kept.write(encode_kept(made(KeptTrajectory, text=HOSTILE)))
    with found.metrics.open("ab") as metrics:
        rows = [{"kind": kind, "at": 1.0, "step": 1, "version": 1, "name": HOSTILE, HOSTILE: 1.0, "mean": 0.5}
                for kind in ("step", "evaluation", HOSTILE)]  # fmt: skip
        metrics.writelines(msgspec.json.encode(row) + b"\n" for row in rows)
    found.status.write_bytes(msgspec.json.encode(made(SavedStatus, text=HOSTILE)))
    version = found.versions / "v000001"
    version.mkdir(parents=True)
    (version / "manifest.json").write_bytes(msgspec.json.encode(made(Manifest, text=HOSTILE)))
    found.status_token.write_text(HOSTILE)
    return found


def _poisoned(value: object) -> object:
    if isinstance(value, dict):
        return {key: _poisoned(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_poisoned(item) for item in value if item is not None]
    return HOSTILE if isinstance(value, str) else value


@pytest.mark.parametrize(
    "command",
    [
        *("status", "audit", "audit --deep", "report", "trace", "export", "track", "track --to tensorboard"),
        *("run --resume", "simulate --from"),
    ],
)
def test_a_command_shows_text_of_a_run_folder_harmlessly(
    folder: RunFolder, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["dora", *command.split(), str(folder.root)])
    require_harmless_end(capfd)


def test_a_status_of_another_process_is_shown_harmlessly(tmp_path: Path) -> None:
    now = made(Snapshot, text=HOSTILE)
    with (tmp_path / "shown").open("w+") as file:
        console = Console(file=file, width=300)
        console.print(draw(now.instances))
        PlainView(console).show(now)
        file.seek(0)
        require_harmless(file.read())
    require_harmless("\n".join(summary(now, folder=RunFolder(Path("/run")), violations=0)))
    assert encode(now)


@pytest.mark.parametrize("print_it", [output.say, output.tell])
def test_what_a_command_prints_is_one_line(print_it: Callable[[str], None], capfd) -> None:
    print_it(HOSTILE)
    print_it(str(DoraError(HOSTILE)))
    shown = "".join(capfd.readouterr())
    require_harmless(shown)
    assert shown.count("\n") == 2


@pytest.mark.parametrize("command", ["status", "status --watch", "instances list", "instances add 1"])
def test_a_command_shows_the_answers_of_an_address_harmlessly(
    command: str, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    first, *others = command.split()
    wanted, code = (InstanceReply, 409) if "add" in others else (Snapshot, 200)
    good = plain(wanted, text="x") | ({"phase": "finished"} if "--watch" in others else {})  # else it goes on
    answers = [*(as_json(bad, status=code) for bad in poisoned(good, HOSTILE)), *hostile_answers()]
    if "--watch" in others:
        answers = [answer for answer in answers if b'"phase": "\\u001b' not in answer]
    monkeypatch.setenv("DORA_STATUS_TOKEN", "sesame and more of it")
    with answering() as server:
        monkeypatch.setattr(sys, "argv", ["dora", first, server.url, *others])
        for answer in answers:
            server.answer = answer
            require_harmless_end(capfd)


def require_harmless_end(capfd: pytest.CaptureFixture[str]) -> None:
    """Carry out the command of sys.argv; it prints something, and nothing harmful."""
    with suppress(SystemExit):
        main()
    shown = capfd.readouterr()
    assert shown.out + shown.err
    require_harmless(shown.out)
    require_harmless(shown.err)


@pytest.mark.parametrize(
    "begin", ["configure_logging(Path('log.jsonl'), level='info', run='r', role='controller')", "show_warnings()"]
)
def test_a_warning_is_one_line_whatever_field_has_text_of_others(tmp_path: Path, begin: str) -> None:
    script = f"""if True:
        import logging, structlog
        from pathlib import Path
        from dora.log import configure_logging, show_warnings
        {begin}
        structlog.get_logger().info({HOSTILE!r})
        structlog.get_logger().warning("instance_lost", reason={HOSTILE!r}, **{{{HOSTILE!r}: 1}})
        structlog.get_logger().warning({HOSTILE!r})
        logging.getLogger("library").warning({HOSTILE!r})
    """
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    require_harmless(done.stderr)
    assert (done.stdout, done.stderr.count("\n")) == ("", 3)


def test_a_process_without_a_log_shows_a_traceback_harmlessly(tmp_path: Path) -> None:
    script = f"""if True:
        import logging, sys
        from dora.log import show_warnings
        show_warnings()
        try:
            raise KeyError(ValueError({HOSTILE!r}), type(sys)) from ValueError({HOSTILE!r})
        except KeyError:
            logging.getLogger("library").exception({HOSTILE!r})
    """
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    require_harmless(done.stderr)
    assert "\n  | ValueError: " in done.stderr


@pytest.mark.parametrize(
    "prints", ["dora.trainer.full_disk import print_error", "dora.embedded.engine_state import die"]
)
def test_the_last_words_of_a_process_are_one_line(prints: str) -> None:
    script = f"from {prints} as show; show({HOSTILE!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    require_harmless(done.stderr)
    assert done.stderr.count("\n") == 1


def test_an_indentation_is_kept_and_a_line_stays_one() -> None:
    assert one_line("  a \n  b\n\nc") == "  a b c"
