"""Run folders that another version of DORA wrote, whose configuration has keys that this version does not have."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora.app.resume import read_run
from dora.cli.audit import audit
from dora.cli.run import run
from dora.cli.track import track
from dora.config.load import dump, load
from dora.config.recorded import read_recorded
from dora.errors import ConfigError
from dora.journal import reader
from dora.journal.codec import FORMAT, AnyRecord, Epoch, Header, decode
from dora.journal.commits import Commits
from dora.journal.reader import Journal
from dora.journal.run_folder import RunFolder
from dora.journal.tokens import TokenWriter
from dora.journal.writer import JournalWriter
from tests.core.world import run as run_of_core
from tests.core.world import settings
from tests.journal.recorded import new_folder, write

#: Keys in a section, sections, a section that has become a key, and the name of a loss.
OTHER = (
    ("[rollout]\n", '[rollout]\npause_all = "retract"\nwithout_all = []\n'),
    ("[trainer]\n", "[trainer]\nprobe_all = 512\n"),
    ("[engine]\n", "[engine]\ndecode_all = { base_s = 0.002 }\n"),
    ("[run]\n", "[elsewhere]\nkey = 1\n\n[run]\n"),
    ('kind = "ppo"', 'kind = "ppo_of_another_version"'),
)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A folder as a start of another version leaves it."""
    folder = RunFolder.create(tmp_path, name="old")
    text = dump(load(None, ["trainer.threads=2", "run.group=staff"], environ={}))
    for ours, theirs in OTHER:
        assert ours in text
        text = text.replace(ours, theirs, 1)
    folder.config.write_text(text)
    folder.trajectories.touch()
    folder.metrics.touch()
    with TokenWriter(folder.tokens, epoch=0) as tokens, JournalWriter(folder.journal) as journal:
        journal.append(Header(FORMAT, folder.run_id, "2026-01-31T00:00:00+00:00", "0.0.9", settings()))
        journal.append(Epoch(0, 0.0, text))
        Commits(journal=journal, tokens=tokens).sync()
    return folder


def test_a_resume_is_refused_in_one_line_that_names_keys_and_version(folder: RunFolder) -> None:
    before = folder.config.read_text()
    with pytest.raises(ConfigError) as caught:
        run(
            None,
            (),
            resume=folder.root,
            accept_changes=False,
            trust_folder=True,
            rollout_only=False,
            train_only=None,
            or_continue=False,
            into=None,
        )
    assert str(caught.value) == (
        f"--resume: {folder.config}: this version of DORA has no rollout.pause_all, rollout.without_all, "
        "engine.decode_all, trainer.probe_all and 1 more; continue the run with the version that wrote it (0.0.9, "
        "2026-01-31), or start a new one from its newest version (dora export, then model.path)"
    )
    assert folder.config.read_text() == before


def test_a_configuration_that_was_altered_is_still_that_of_another_version_in_the_journal(folder: RunFolder) -> None:
    folder.config.write_text(dump(load(None, environ={})))
    with pytest.raises(
        ConfigError, match=r"^--resume: another version of DORA wrote the configuration in the journal;"
    ):
        _ = read_run(folder).configuration


def test_a_resume_decodes_each_record_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = run_of_core(seed=3, steps=2)
    folder = write(new_folder(tmp_path), world.settings, world.journal)
    num_records, decoded = sum(1 for _ in Journal(folder.journal).records()), 0

    def counting(data: bytes) -> AnyRecord:
        nonlocal decoded
        decoded += 1
        return decode(data)

    monkeypatch.setattr(reader, "decode", counting)
    recorded = read_run(folder)
    assert decoded == num_records + 1  # the header, before
    assert (recorded.next_epoch, recorded.state.feed.trained, len(recorded.chains)) == (1, 2, 2)


def test_readers_ignore_what_they_do_not_know(folder: RunFolder) -> None:
    config = read_recorded(folder.config, environ={"DORA_TOKEN": "t"})
    assert (config.run.group, config.trainer.threads, config.trainer.token) == ("staff", 2, "t")
    folder.config.write_text(folder.config.read_text().replace("threads = 2", 'threads = "two"'))
    with pytest.raises(ConfigError, match=r"trainer\.threads: got \"two\", expected an integer$"):
        read_recorded(folder.config, environ={})


def test_a_folder_of_another_version_is_audited_and_tracked(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.config.write_text(folder.config.read_text().replace('group = "staff"\n', ""))
    with pytest.raises(SystemExit, match="1"):  # nothing to compare
        audit(folder.root, deep=True)
    track(folder.root, to=["tensorboard"], trust_folder=False)
    assert "tensorboard  0 rows, complete" in capsys.readouterr().out
