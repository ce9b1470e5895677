"""How the configuration of an evaluation is derived, and what its answers add up to."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from dora.app.evaluate import evaluation_of, overrides_of, version_named
from dora.app.export import with_weights
from dora.app.held_out import MAX_CAUSES, HeldOutAnswer, Results, SetFacts, _Noted, read_results, set_result
from dora.config.load import load
from dora.config.schema import Config
from dora.core import events as ev
from dora.core.ids import TrajectoryId, VersionId
from dora.core.phases import TrajectoryPhase
from dora.core.state import State
from dora.core.tables import Trajectory
from dora.errors import ConfigError, DoraError
from dora.journal.run_folder import RunFolder
from dora.weights.store import VersionStore
from tests.controller.fakes import settings_of
from tests.weights.nodes import publish

_CALLING = TrajectoryPhase.CALLING


def config(*overrides: str) -> Config:
    return load(None, [*overrides, "run.steps=0"], environ={})


def test_an_evaluation_is_not_the_newest_run_of_the_name_that_it_evaluates() -> None:
    found = evaluation_of(config())
    assert found.run.name == "dora-eval"
    assert evaluation_of(found).run.name == "dora-eval"


def test_a_greedy_set_is_sampled_only_if_several_answers_are_asked_for() -> None:
    sampled = config("rollout.temperature=0.7")
    assert [one.temperature for one in evaluation_of(sampled).eval.sets] == [0.0]
    assert [one.temperature for one in evaluation_of(sampled, samples=1).eval.sets] == [0.0]
    assert [one.temperature for one in evaluation_of(sampled, samples=4).eval.sets] == [0.7]


def test_without_held_out_sets_every_source_is_one() -> None:
    sources = '[{kind="arithmetic"},{kind="arithmetic"},{kind="seeds",label="b"}]'
    given = config(f"task.sources={sources}", "eval.sets=[]", 'environment.name="x.py:X"', "rollout.temperature=0.5")
    found = evaluation_of(given, prompts=7).eval.sets
    assert [(one.name, one.prompts, one.temperature) for one in found] == [
        ("arithmetic", 7, 0.5), ("arithmetic-1", 7, 0.5), ("b", 7, 0.5),
    ]  # fmt: skip


def test_one_server_is_enough_for_an_evaluation_whatever_k_is() -> None:
    found = config(*overrides_of(model="a model", urls=["http://one:1"], of_task=False), "rollout.max_staleness=4")
    assert (found.num_instances, found.engine.urls, found.model.path) == (1, ("http://one:1",), "a model")
    assert found.num_ranks == found.num_training_nodes == 0


@pytest.mark.parametrize("name", ["seed", "owner/name", "owner/name@main", "@3", ""])
def test_what_names_no_run_is_taken_for_a_model(name: str) -> None:
    assert version_named(name) is None


FACTS = SetFacts("a", "sums", 2, 3, 1.0, 0, "digest")


def test_failures_are_left_out_of_every_score_and_counted_by_cause() -> None:
    right, wrong = HeldOutAnswer(1.0, 4, False, ""), HeldOutAnswer(0.0, 8, True, "")
    failed = HeldOutAnswer(None, 0, False, "grading: timeout")
    found = set_result(FACTS, [[right, wrong, failed], [failed, failed, wrong]])
    assert found.mean == pytest.approx(1 / 3)
    assert found.pass_at == {1: 0.25, 2: 1.0}, "of the prompts with as many graded answers"
    assert (found.graded, found.failed, found.truncated) == (3, {"grading: timeout": 3}, 2)
    assert found.rewards == [[1.0, 0.0, None], [None, None, 0.0]]
    assert found.mean_tokens == pytest.approx(20 / 6)
    assert found.max_tokens == 8


def test_a_set_of_which_nothing_was_graded_has_no_score() -> None:
    failed = HeldOutAnswer(None, 0, False, "generation: refused")
    found = set_result(FACTS, [[failed] * 3, [failed] * 3])
    assert (found.mean, found.interval, found.pass_at, found.graded) == (None, None, {}, 0)


def test_a_call_that_was_lost_with_its_controller_is_told_as_its_cause() -> None:
    lost, replayed, sampled = (TrajectoryId(-number) for number in (1, 2, 3))
    state, noted = State(settings_of(eval_prompt_tokens=(1, 1, 1))), _Noted()
    for id, phase in ((lost, _CALLING), (replayed, _CALLING), (sampled, TrajectoryPhase.RESIDENT)):
        sample = Trajectory(id, group=None, version=VersionId(0), num_prompt_tokens=1, phase=phase)
        state.evaluation.trajectories[id] = sample
    noted.before(state, ev.GenerationFailed(1.0, lost, 1, 0, server_gone=True, reason="instance 0 is down"))
    noted.before(state, ev.ControllerRestarted(2.0, 1, {sampled: 0}, replayable=(replayed,)))
    assert noted.failures == {lost: "environment: restart"}


def test_only_so_many_causes_are_told_apart() -> None:
    answers = [[HeldOutAnswer(None, 0, False, f"grading: {chr(65 + i)}")] for i in range(MAX_CAUSES + 5)]
    found = set_result(msgspec.structs.replace(FACTS, prompts=MAX_CAUSES + 5, samples=1), answers)
    assert len(found.failed) == MAX_CAUSES + 1
    assert found.failed["other causes"] == 5


def test_failures_that_differ_in_what_was_answered_have_one_cause() -> None:
    told = [f"grading: ValueError: invalid literal for int(): 'a{i}' (r.py:7)" for i in range(3)]
    answers = [[HeldOutAnswer(None, 0, False, text)] for text in told]
    found = set_result(msgspec.structs.replace(FACTS, prompts=3, samples=1), answers)
    assert found.failed == {told[0]: 3}


def test_the_held_out_sets_of_another_task_do_not_matter_if_the_task_is_scored() -> None:
    own = ["task.sources=[{kind='jsonl', path='a.jsonl'}]", "task.rewards=[{kind='math'}]"]
    with pytest.raises(ConfigError, match="which is not the task"):
        config(*overrides_of(model=None, urls=[], of_task=False), *own)
    assert config(*overrides_of(model=None, urls=[], of_task=True), *own).eval.sets == ()


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 100_000, b"\xff", b'{"sets": 3}'])
def test_results_of_others_are_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "results.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"results\.json: does not have the results of an evaluation"):
        read_results(RunFolder(tmp_path))


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    one = set_result(FACTS, [[HeldOutAnswer(1.0, 4, False, "")] * 3] * 2)
    found = Results(run_id="r", model="m", seed=0, seconds=1.5, sets=[one])
    (tmp_path / "results.json").write_bytes(msgspec.json.encode(found))
    assert read_results(RunFolder(tmp_path)) == found


def test_the_damaged_file_of_a_version_is_named(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.journal.touch()
    run.config.touch()
    run.versions.mkdir()
    publish(VersionStore(memory_root=run.versions, durable_root=run.versions), 2)
    damaged = run.versions / "v000002" / "config.json"
    damaged.write_text("[]")
    with pytest.raises(ConfigError, match=rf"^--model {tmp_path}: {damaged} does not match its checksum: version 2 is"):
        version_named(str(tmp_path))


@pytest.mark.parametrize("kind", ["pipe", "file", "link", "link inside"])
def test_made_weights_are_kept_in_a_folder_of_the_run_alone(tmp_path: Path, kind: str) -> None:
    (outside := tmp_path / "outside").mkdir()
    (root := tmp_path / "run").mkdir()
    run = RunFolder(root)
    store = VersionStore(memory_root=run.versions, durable_root=run.versions)
    staged = store.stage(VersionId(1))
    (staged / "config.json").write_text("{}")
    store.seal(VersionId(1), staged)
    if kind == "pipe":
        os.mkfifo(run.merged)
    elif kind == "file":
        run.merged.write_text("")
    elif kind == "link":
        run.merged.symlink_to(outside)
    else:
        run.merged.mkdir()
        (run.merged / "v000001").symlink_to(outside)
    with pytest.raises(DoraError, match=r"/merged.*: (is a |File exists)|/merged: .*File exists"):
        with_weights(run, VersionId(1), store)
    assert [*outside.iterdir()] == []
