"""Ranks and torchrun that are killed or stopped at any moment are started again, and the run goes on by itself."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.journal.reader import Journal
from dora.journal.run_folder import RunFolder
from tests.e2e.runs import Run, assert_audit_clean, events_of, orders_of, slow, small, until, until_gone

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]

STEPS = 6


@dataclass
class Survived:
    """A run whose ranks were killed again and again."""

    folder: RunFolder
    code: int
    told: str
    num_lost: int
    children: list[psutil.Process]


def torchrun(run: Run) -> psutil.Process:
    [process] = [child for child in run.children() if "torch.distributed.run" in child.cmdline()]
    return process


def loading(run: Run) -> list[psutil.Process]:
    """The ranks of a new start, once there are any."""
    return until(lambda: run.ranks() if run.status()["trainer"]["ranks_ready"] == 0 else None, what="new ranks")


@pytest.fixture(scope="module")
def survived(slow_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Survived:
    arguments = slow(
        tmp_path_factory.mktemp("runs"),
        slow_model,
        run__steps=STEPS,
        rollout__max_new_tokens=128,
        rollout__max_staleness=1,
        engine__min_step_ms=20,  # answers take longer than it takes to find the loss of ranks
        engine__instances=2,
        trainer__ranks=2,
        trainer__checkpoint_every=2,
        trainer__threads=1,
    )
    with Run(*arguments) as run:
        run.until_trained(1)
        run.ranks()[1].kill()
        loading(run)[0].kill()
        run.until_trained(2)
        run.until_status(lambda s: sum(one["residents"] for one in s["instances"]) >= 8, what="answers under way")
        torchrun(run).kill()
        run.until_trained(4)
        run.ranks()[0].suspend()
        run.until_status(lambda s: s["trainer"]["ranks_ready"] == 0, what="a rank that is stopped is lost")
        run.until_status(lambda s: s["trainer"]["ranks_ready"] == 2, what="the ranks are ready")
        children = run.children()
        code = run.end()
        return Survived(run.folder, code, run.told(), 4, children)


def test_the_run_ends_by_itself_with_every_step_trained(survived: Survived) -> None:
    assert survived.code == 0, survived.told
    assert max(event.step for event in events_of(survived.folder, ev.StepTrained)) == STEPS - 1
    assert_audit_clean(survived.folder)
    until_gone(survived.children)


def test_each_start_has_its_number_and_each_loss_is_told_once(survived: Survived) -> None:
    lost = events_of(survived.folder, ev.TrainerLost)
    assert [event.incarnation for event in lost] == [*range(survived.num_lost)]
    assert [order.incarnation for order in orders_of(survived.folder, cmd.RestartTrainer)] == [
        *range(1, survived.num_lost + 1)
    ]
    assert survived.told.count("trainer_lost") == survived.num_lost


def test_versions_keep_their_bytes_and_steps_their_history(survived: Survived) -> None:
    """The same number of ranks computes the same bits."""
    published = events_of(survived.folder, ev.VersionPublished)
    assert {event.version for event in published} == {*range(STEPS + 1)}
    assert len(published) > STEPS + 1, "some were written again"
    assert not [event for event in published if event.differs]
    assert len({(event.version, event.chain, *event.files.values()) for event in published}) == STEPS + 1
    trained = events_of(survived.folder, ev.StepTrained)
    assert len({(event.step, event.chain) for event in trained}) == STEPS


def test_each_group_is_trained_once_and_each_answer_sampled_once(survived: Survived) -> None:
    trained = [g for order in orders_of(survived.folder, cmd.ForgetGroups) for g in order.groups]
    assert sorted(trained) == [order.group for order in orders_of(survived.folder, cmd.AdmitGroup)]


def test_a_rank_that_is_stopped_is_found(survived: Survived) -> None:
    reasons = [event.reason for event in events_of(survived.folder, ev.TrainerLost)]
    assert reasons[-1].startswith("trainer rank 0 has been silent for ")
    assert not any("silent" in reason or "progress" in reason for reason in reasons[:-1])


def test_generation_goes_on_meanwhile(survived: Survived) -> None:
    events = [event for event, _ in Journal(survived.folder.journal)]
    lost = [place for place, event in enumerate(events) if isinstance(event, ev.TrainerLost)]
    ready = [place for place, event in enumerate(events) if isinstance(event, ev.TrainerReady)]
    sampled = [
        place for place, event in enumerate(events) if isinstance(event, (ev.ProgressReported, ev.GenerationFinished))
    ]
    assert any(begin < place < end for begin, end in zip(lost[1:], ready[1:], strict=False) for place in sampled)


def test_the_rows_of_metrics_are_those_of_a_run_without_losses(survived: Survived) -> None:
    rows = [json.loads(line) for line in survived.folder.metrics.read_text().splitlines()]
    steps = [row["step"] for row in rows if row["kind"] == "step"]
    assert steps == [*range(STEPS)]
    assert all(before["at"] < after["at"] for before, after in pairwise(row for row in rows if row["kind"] == "step"))


def test_ranks_that_cannot_start_again_end_the_run_which_can_be_resumed(tmp_path: Path) -> None:
    """Each of them is killed as soon as it is there."""
    with Run(*small(tmp_path, trainer__ranks=2, run__steps=500)) as run:
        run.until_trained(1)
        children, folder = run.children(), run.folder
        while run.process.poll() is None:
            with suppress(psutil.Error):  # it has ended just now
                for rank in run.ranks():
                    rank.kill()
        code = run.end()
    assert code == 1, run.told()
    line = "".join(run.err).splitlines()[-1]
    assert line.startswith("dora: the trainer was lost 5 times without training a step: trainer ")
    assert line.endswith(f"; logs: {folder.logs}; continue with dora run --resume {folder.root}")
    until_gone(children)
