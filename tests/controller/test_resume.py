"""A run that stopped in the middle, continued from its folder alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dora.app import resume
from dora.app.inputs import Inputs
from dora.cli.run import run as command
from dora.config.schema import TaskConfig
from dora.controller.lineage import Lineage
from dora.controller.published import Published
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import GroupId, TrajectoryId
from dora.core.phases import TrajectoryPhase
from dora.errors import ConfigError, RunFailed
from dora.journal.audit import audit_entries
from dora.journal.reader import Journal
from dora.journal.run_folder import RunFolder
from dora.journal.tokens import TokenWriter, read_tokens
from dora.node.lease import hold
from dora.seed.policy import path as seed_path
from dora.tasks import prompts
from dora.tasks.prompts import Prompt, open_stream
from tests.controller.fakes import CHAIN, RUN_ID, Job, make_job

#: Numbers of the answers whose grades never come: a sample of the first evaluation, and one of two siblings.
UNGRADED = {1, 4}


async def stopped(folder: Path) -> Job:
    """Interrupted after its first step, with grades outstanding."""
    job = make_job(folder, samples=3)
    job.graders.frozen = set(UNGRADED)

    def interrupt(event: ev.Event, commands: list[cmd.Command]) -> None:
        if isinstance(event, ev.StepTrained):
            job.controller.interrupt()

    job.watcher.hook = interrupt
    assert not (await job.run()).finished
    job.close()
    return job


async def resumed(folder: Path, *, steps: int = 0) -> Job:
    """A new controller on the same folder."""
    run = RunFolder(folder)
    recorded = resume.read_run(run)
    known = {
        "published": Published(RUN_ID, files=recorded.files),
        "lineage": Lineage(base=CHAIN, settings=b"", trained=recorded.chains),
    }
    job = make_job(folder, samples=3, state=recorded.state, epoch=recorded.next_epoch, io=known)
    inputs = Inputs(
        seed_path(), None, None, job.io.tokenizer, job.io.tokenizer.vocab_size, job.io.stream, job.io.evaluations
    )
    counts = resume.restore(run, recorded.state, trajectories=job.io.trajectories, inputs=inputs, visits=job.io.visits)
    job.first = [
        ev.ControllerRestarted(recorded.last_at, recorded.next_epoch, counts, steps),
        ev.TrainerReady(recorded.last_at, recorded.state.feed.trained if steps else 0),
    ]
    return job


async def test_a_resume_restores_graded_siblings_and_samples_beside_the_ungraded(tmp_path: Path) -> None:
    before = await stopped(tmp_path)
    after = await resumed(tmp_path)
    wanted, found = before.io.trajectories.records, after.io.trajectories.records
    waiting = [t for t, trajectory in after.controller.state.trajectories.items() if trajectory.reward is None]
    assert {t < 0 for t in waiting} == {True, False}
    for trajectory in [
        *before.io.evaluations.ids(0),
        *(s for t in waiting if t >= 0 for s in (t - t % 2, t - t % 2 + 1)),
    ]:
        id = TrajectoryId(trajectory)
        assert found[id].prompt == wanted[id].prompt
        assert (found[id].tokens, found[id].logprobs) == (wanted[id].tokens, wanted[id].logprobs)
        assert (found[id].reward, found[id].truncated) == (wanted[id].reward, wanted[id].truncated)
    after.close()


async def test_a_resume_asks_the_environment_for_prompts_that_are_still_answered_alone_and_again_if_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "PAUSES_S", (0.0, 0.0))
    (await stopped(tmp_path)).close()
    run = RunFolder(tmp_path)
    state = resume.read_run(run).state
    job = make_job(tmp_path, samples=3, state=state, epoch=1)
    job.close()
    io, asked = job.io, list[str]()

    def converse(row: Mapping[str, Any], source: str, where: str) -> prompts.Conversation:
        asked.append(row["prompt"])
        if has_failed := asked.count(row["prompt"]) < needed:
            return prompts.Conversation(failed="it is not there", may_pass=has_failed)
        return prompts.Conversation(tokens=io.tokenizer.encode(row["prompt"], special_tokens=True))

    def restored() -> dict[GroupId, Prompt]:
        for each in (asked, io.trajectories.prompts, io.trajectories.records):
            each.clear()
        resume.restore(run, state, trajectories=io.trajectories, inputs=inputs, visits=io.visits)
        return {**io.trajectories.prompts}

    needed = 1
    stream = open_stream(TaskConfig(), tokenizer=io.tokenizer, seed=0, converse=converse)
    inputs = Inputs(seed_path(), None, None, io.tokenizer, io.tokenizer.vocab_size, stream, io.evaluations)
    found = restored()
    ended = (TrajectoryPhase.GRADING, TrajectoryPhase.GRADED)
    siblings = [t for t in resume._needed(state).values() if t.id >= 0]
    answered = {GroupId(t.id // state.settings.group_size) for t in siblings if t.phase not in ended}
    assert 0 < len(answered) < len(found)
    assert sorted(asked) == sorted(found[group].text for group in answered)
    needed = 3
    assert restored() == found
    assert len(asked) == 3 * len(answered)
    needed = 4
    with pytest.raises(RunFailed, match="it is not there, so its group, which is under way, cannot go on"):
        restored()


@pytest.mark.parametrize("phase", [TrajectoryPhase.CALLING, TrajectoryPhase.WAITING])
async def test_what_a_call_gave_is_not_known_without_its_event(tmp_path: Path, phase: TrajectoryPhase) -> None:
    """An observation is written before the event that reports it; sampled tokens count as they are."""
    before = await stopped(tmp_path)
    run = RunFolder(tmp_path)
    state = resume.read_run(run).state
    trajectory = next(t for t in state.trajectories.values() if t.phase is TrajectoryPhase.GRADING)
    trajectory.phase = phase
    wanted = before.io.trajectories.records[trajectory.id].tokens
    with TokenWriter(run.tokens) as writer:
        attempt, start = trajectory.attempt + 1, trajectory.num_tokens
        writer.append(trajectory.id, attempt, [5, 6], [0.0, 0.0], start=start, loss_mask=[0, 0])
    job = make_job(tmp_path, samples=3, state=state, epoch=1)
    job.close()
    io = job.io
    inputs = Inputs(seed_path(), None, None, io.tokenizer, io.tokenizer.vocab_size, io.stream, io.evaluations)
    resume.restore(run, state, trajectories=io.trajectories, inputs=inputs, visits=io.visits)
    found = io.trajectories.records[trajectory.id]
    if phase is TrajectoryPhase.CALLING:
        assert (found.tokens, found.observed) == (wanted, [])
    else:
        assert found.observed == [(len(wanted), len(wanted) + 2)]


async def test_a_resumed_run_ends_with_every_group_trained_once_and_every_evaluation_reported(tmp_path: Path) -> None:
    await stopped(tmp_path)
    job = await resumed(tmp_path)
    assert (await job.run()).finished
    job.close()
    entries = list(Journal(tmp_path / "journal.msgpack"))
    report = audit_entries(job.settings, entries, token_counts=read_tokens(tmp_path / "tokens.bin").counts)
    assert report.violations == ()
    assert report.evaluations == (0, 3)
    orders = [order for _, made in entries for order in made]
    trained = [g for o in orders if isinstance(o, cmd.ForgetGroups) for g in o.groups]
    dropped = [o.group for o in orders if isinstance(o, cmd.DropGroup)]
    assert sorted(trained + dropped) == [o.group for o in orders if isinstance(o, cmd.AdmitGroup)]
    assert len(trained) == 6


async def test_a_trainer_without_a_checkpoint_is_fed_every_step_again_in_the_same_waves(tmp_path: Path) -> None:
    before = await stopped(tmp_path)
    job = await resumed(tmp_path)
    await job.run()
    job.close()
    for first, again in zip(before.trainer.waves, job.trainer.waves, strict=False):
        for mine, theirs in zip(first, again, strict=True):
            assert (mine.step, mine.index, mine.last) == (theirs.step, theirs.index, theirs.last)
            assert mine.trajectories.tolist() == theirs.trajectories.tolist()
            assert mine.tokens.tolist() == theirs.tokens.tolist()
            assert mine.behavior_logprobs.tolist() == theirs.behavior_logprobs.tolist()


async def test_a_finished_run_that_is_given_more_steps_goes_on_and_its_journal_proves_both_parts(
    tmp_path: Path,
) -> None:
    job = make_job(tmp_path)
    assert (await job.run()).reason == "all 3 steps are trained"
    job.close()
    job = await resumed(tmp_path, steps=5)
    assert (await job.run()).reason == "all 5 steps are trained"
    job.close()
    journal = Journal(tmp_path / "journal.msgpack")
    assert journal.header.settings.steps == 3
    assert audit_entries(journal.header.settings, journal).violations == ()
    assert resume.read_run(RunFolder(tmp_path)).settings.steps == 5


async def test_a_finished_run_is_not_resumed(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    await job.run()
    job.close()
    run = RunFolder(tmp_path)
    recorded = resume.read_run(run)
    with pytest.raises(ConfigError, match=r"the run has ended: all 3 steps are trained; there is nothing to resume"):
        resume.require_unfinished(run, recorded, steps=3)
    resume.require_unfinished(run, recorded, steps=4)


def test_a_run_locked_by_another_process_is_not_read(tmp_path: Path) -> None:
    """What it holds now may be another thing a moment later."""
    folder = RunFolder(tmp_path)
    for path in (folder.config, folder.journal):
        path.write_bytes(b"\xff no config and no journal")
    resume_it = partial(
        command,
        None,
        [],
        resume=tmp_path,
        accept_changes=False,
        trust_folder=False,
        rollout_only=False,
        train_only=None,
        or_continue=False,
        into=None,
    )
    with hold(folder.lock), pytest.raises(ConfigError, match="lock is held by another process"):
        resume_it()
    with pytest.raises(ConfigError, match=r"config\.toml"):
        resume_it()
