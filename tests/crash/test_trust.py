"""What a resume trusts in a run folder: a run is stopped, one thing is changed, and the run is resumed.

The application's own resume continues the run in virtual time, and the checker reads the result.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from msgspec import structs

from dora.app import resume as resuming
from dora.app.inputs import model_digest
from dora.app.prepare import prepare
from dora.app.settings import lineage_settings, rollout_only_settings, settings_of
from dora.app.trust import require_trust
from dora.config.load import dump, load, parse, state_folder
from dora.config.schema import Config
from dora.controller.lineage import base_chain
from dora.core.phases import TrajectoryPhase
from dora.core.tables import Trajectory
from dora.errors import ConfigError, RunFailed
from dora.journal.codec import Epoch
from dora.journal.signature import sign, user_key
from dora.journal.tokens import TokenWriter
from dora.journal.writer import JournalWriter
from dora.tasks.prompts import open_stream
from dora.weights.store import checksum_of
from tests.crash.checker import Checker, Expected, records
from tests.crash.disk import File, Folder, Tree
from tests.crash.life import RUN_ID, Life, Plan, World
from tests.crash.models import Faults
from tests.crash.policy import POLICY

PLAN = Plan(
    "stopped", ("run.steps=8", "trainer.checkpoint_every=2"), interrupted_at=6.0, faults=Faults(gone=0, refused=0)
)
RUN = ("runs", RUN_ID)


@dataclass
class Stopped:
    """An interrupted run with two checkpoints, two needed versions, and answers in flight."""

    world: World
    tree: Tree  # not to be changed
    recorded: resuming.Recorded

    def copy(self) -> Tree:
        return self.tree.copy()

    def resume(self, tree: Tree) -> Life:
        return self.world.resume(tree, seed="resumed")

    def go_on(self, tree: Tree) -> str:
        """Resume to the end, where everything must be correct; return the messages to the user."""
        life = self.resume(tree)
        assert life.outcome is not None, life.refusal
        assert life.outcome.finished
        chain = base_chain(model_digest(self.world.inputs.model))
        Checker(self.world.folder.root, Expected(chain, lineage_settings(self.world.config))).check()
        return life.said

    def refusal(self, tree: Tree, kind: type[Exception]) -> str:
        life = self.resume(tree)
        assert isinstance(life.refusal, kind), life.refusal
        return str(life.refusal)

    @property
    def checkpoints(self) -> list[str]:
        """Names of the checkpoints, by step."""
        return [Path(path).name for _, path in sorted(self.recorded.state.feed.checkpoints.items())]

    @property
    def versions(self) -> list[int]:
        return list(self.recorded.state.window.entries)

    def graded(self) -> Trajectory:
        """A finished answer that the trainer may need again."""
        groups = [group for feed in self.recorded.state.feed.steps.values() for group in feed.groups]
        found = [t for g in groups for t in g.trajectories if t.phase is TrajectoryPhase.GRADED and t.num_tokens > 1]
        return found[0]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    world = World(tmp_path_factory.mktemp("world"), PLAN)
    for seed in range(40):
        life = world.begin(seed=str(seed))
        found = Stopped(world, life.disk.tree, resuming.read_run(world.folder))
        state = found.recorded.state
        if all(found.checkpoints) and len(found.checkpoints) == len(found.versions) == 2 and state.trajectories:
            return found
    raise AssertionError("no seed gives such a run")


def data_of(tree: Tree, *path: str) -> bytes:
    found = tree.get((*RUN, *path))
    assert isinstance(found, File)
    return found.data


def write(tree: Tree, data: bytes, *path: str) -> None:
    file = tree.file((*RUN, *path))
    file.data = file.synced = data


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def copy_folder(tree: Tree, source: tuple[str, ...], target: tuple[str, ...]) -> None:
    found = tree.get((*RUN, *source))
    assert isinstance(found, Folder)
    for name in found.entries:
        write(tree, data_of(tree, *source, name), *target, name)


def edit_manifest(tree: Tree, folder: tuple[str, ...], **changes: object) -> None:
    manifest = json.loads(data_of(tree, *folder, "manifest.json"))
    write(tree, json.dumps(manifest | changes).encode(), *folder, "manifest.json")


# -- nothing changed --------------------------------------------------------------------------------------------------


def test_an_unchanged_run_continues_under_a_new_epoch(stopped: Stopped) -> None:
    assert stopped.go_on(stopped.copy()) == ""
    journal = stopped.world.folder.journal.read_bytes()
    assert [record["epoch"] for _, record in records(journal) if record["type"] == "Epoch"] == [0, 1]
    assert int(stopped.world.folder.fence.read_text().partition(".")[0]) >> 32 == 1


def test_a_trainer_of_the_previous_controller_makes_nothing_visible(stopped: Stopped) -> None:
    """The controller writes its epoch first, and ranks compare it with their own."""
    life = stopped.resume(stopped.copy())
    fence = stopped.world.folder.fence.relative_to(stopped.world.path).parts
    kinds = [(step.kind, step.path) for step in life.disk.steps]
    raised = next(i for i, (kind, path) in enumerate(kinds) if kind == "rename" and path[-1].startswith(".epoch-"))
    made = [
        i for i, (kind, path) in enumerate(kinds) if kind == "rename" and path[-1].startswith((".stage-", ".step-"))
    ]
    assert made
    assert raised < min(made)
    assert stopped.world.folder.fence.name == fence[-1]


# -- tokens and prompts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "which"), [(-1, "fewer"), (1, "more")])
def test_a_token_count_that_differs_from_the_journal_is_refused(
    stopped: Stopped, tmp_path: Path, change: int, which: str
) -> None:
    tree, answer, path = stopped.copy(), stopped.graded(), tmp_path / "tokens.bin"
    path.write_bytes(data_of(tree, "tokens.bin"))
    with TokenWriter(path, epoch=9) as tokens:
        new = [7] * max(change, 0)
        tokens.append(answer.id, 1, new, [-0.5] * len(new), start=answer.num_tokens + min(change, 0))
    write(tree, path.read_bytes(), "tokens.bin")
    said = stopped.refusal(tree, RunFailed)
    counts = (
        f"has {answer.num_tokens + change} tokens of trajectory {answer.id}, but the journal counts {answer.num_tokens}"
    )
    assert counts in said, which


def test_other_data_under_the_same_name_is_refused(stopped: Stopped, monkeypatch: pytest.MonkeyPatch) -> None:
    world = stopped.world
    other = open_stream(world.config.task, tokenizer=world.inputs.tokenizer, seed=99)
    monkeypatch.setattr(world, "inputs", replace(world.inputs, stream=other))
    assert re.search(r"the prompt of group \d+ has changed", stopped.refusal(stopped.copy(), RunFailed))


def test_another_model_is_refused(stopped: Stopped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = stopped.world
    model = Path(shutil.copytree(world.inputs.model, tmp_path / "model"))
    (model / POLICY).write_text("f" * 32)
    monkeypatch.setattr(world, "inputs", replace(world.inputs, model=model))
    assert "is not the model that the run began with" in stopped.refusal(stopped.copy(), RunFailed)


# -- the configuration ------------------------------------------------------------------------------------------------


def reconfigured(tree: Tree, key: str, value: str) -> Tree:
    """The tree with one line of the run's own configuration changed, and signed."""
    text, count = re.subn(rf"(?m)^{key} = .*$", f"{key} = {value}", data_of(tree, "config.toml").decode())
    assert count == 1
    home = state_folder(os.environ)
    content = text.partition("\n")[2].encode()
    write(tree, sign(content, run_id=RUN_ID, keys=[user_key(home) or b""]), "config.toml")
    return tree


def test_a_change_that_alters_the_experiment_must_be_accepted(stopped: Stopped) -> None:
    tree = reconfigured(stopped.copy(), "learning_rate", "0.0625")
    assert "0.0625: alters the experiment; --accept-changes" in stopped.refusal(tree, ConfigError)
    config = load(stopped.world.folder.config, [], environ={})
    found = resuming.accept(stopped.recorded, config, stopped.recorded.settings, is_accepted=True)
    assert [line.partition(":")[0] for line in found] == ["trainer.learning_rate"]


def test_the_fewest_ranks_may_change_and_the_trainers_device_may_not(stopped: Stopped, tmp_path: Path) -> None:
    """Both decide whether a step that is trained again gives the same bytes."""
    stopped.copy()
    path = tmp_path / "config.toml"
    path.write_text(re.sub(r"(?m)^instances = .*$", "", stopped.world.folder.config.read_text()))

    def of(*changes: str) -> Config:
        return load(path, ["nodes.expected=12", "nodes.train=2", "trainer.ranks=2", *changes], environ={})

    recorded = replace(stopped.recorded, config=dump(of()))
    job = prepare(of("trainer.min_ranks=1"), stopped.world.inputs, recorded=recorded)
    assert [line.partition(":")[0] for line in job.changes] == ["trainer.min_ranks"]
    with pytest.raises(ConfigError, match=r"trainer\.device cannot change within a run"):
        prepare(of("trainer.device=cuda"), stopped.world.inputs, recorded=recorded, accept_changes=True)


@pytest.mark.parametrize(("key", "value"), [("optimizer", "muon"), ("optimizer_state", "8bit")])
def test_another_format_of_the_optimizers_state_is_refused_even_if_accepted(
    stopped: Stopped, key: str, value: str
) -> None:
    stopped.copy()
    config = load(stopped.world.folder.config, [f"trainer.{key}={value}"], environ={})
    with pytest.raises(ConfigError, match=f'trainer.{key}: .* -> "{value}": the checkpoints of the run hold'):
        resuming.accept(stopped.recorded, config, stopped.recorded.settings, is_accepted=True)


@pytest.mark.parametrize(
    ("key", "value"), [("rank", "4"), ("rank", "0"), ("alpha", "16"), ("rslora", "true"), ("targets", "['q_proj']")]
)
def test_an_adapter_of_other_settings_is_refused_even_if_accepted(stopped: Stopped, key: str, value: str) -> None:
    """With another scale it would load, and be another policy than the version that servers have."""
    stopped.copy()
    of_run = ["trainer.lora.rank=8"]
    recorded = replace(stopped.recorded, config=dump(load(stopped.world.folder.config, of_run, environ={})))
    config = load(stopped.world.folder.config, [*of_run, f"trainer.lora.{key}={value}"], environ={})
    with pytest.raises(ConfigError, match=rf"trainer\.lora\.{key}: .* -> .*: the checkpoints of the run hold"):
        resuming.accept(recorded, config, recorded.settings, is_accepted=True)


@pytest.mark.parametrize(
    ("of_run", "change"),
    [
        ([], "task.revisit_share=0.5"),
        (["task.revisit_share=0.5"], "task.revisit_share=1.0"),
        (["task.revisit_share=0.5"], "run.seed=7"),
    ],
)
def test_how_rows_are_passed_over_cannot_change_even_if_accepted(
    stopped: Stopped, of_run: list[str], change: str
) -> None:
    stopped.copy()
    own = ["task.sources.0.kind=function", "task.sources.0.name=tests.crash.environment:sums", "eval.sets=[]"]
    own += ['task.rewards=[{kind="math"}]', "task.sources.0.options={}"]
    recorded = replace(stopped.recorded, config=dump(load(stopped.world.folder.config, [*own, *of_run], environ={})))
    config = load(stopped.world.folder.config, [*own, *of_run, change], environ={})
    key = change.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"--resume: {key}: .* -> .*: cannot change within a run; start a new one"):
        resuming.accept(recorded, config, recorded.settings, is_accepted=True)


def test_a_configuration_that_was_changed_without_a_signature_is_not_taken_up(stopped: Stopped) -> None:
    tree = stopped.copy()
    write(tree, data_of(tree, "config.toml") + b"# nothing", "config.toml")
    assert "config.toml: is not signed with a key of yours; --trust-folder" in stopped.refusal(tree, ConfigError)


def test_a_resume_signs_its_own_configuration(stopped: Stopped) -> None:
    stopped.go_on(reconfigured(stopped.copy(), "checkpoint_every", "3"))
    folder = stopped.world.folder
    assert b"checkpoint_every = 3" in folder.config.read_bytes()
    require_trust(folder, load(folder.config, environ={}), named=(), to="another resume")


def test_an_operational_change_needs_no_consent_but_is_reported_and_recorded(stopped: Stopped) -> None:
    tree = reconfigured(stopped.copy(), "checkpoint_every", "3")
    line = "trainer.checkpoint_every: 2 -> 3"
    assert f"dora: changed: {line}\n" in stopped.go_on(tree)
    journal = stopped.world.folder.journal.read_bytes()
    epochs = [record for _, record in records(journal) if record["type"] == "Epoch"]
    assert [list(epoch["changes"]) for epoch in epochs] == [[], [line]]


def test_a_run_continues_with_other_time_limits(stopped: Stopped) -> None:
    """They decide what counts as a fault; who finds one too short should not need a new run."""
    before = stopped.recorded.settings
    stopped.go_on(reconfigured(stopped.copy(), "no_progress_s", "4321.0"))
    after = resuming.read_run(stopped.world.folder).settings
    assert before.no_progress_s != 4321.0
    assert after == structs.replace(before, no_progress_s=4321.0)


def test_settings_that_decisions_depend_on_cannot_change(stopped: Stopped) -> None:
    tree = reconfigured(stopped.copy(), "groups_per_step", "3")
    assert "--resume: rollout.groups_per_step cannot change within a run" in stopped.refusal(tree, ConfigError)
    altered = ["rollout.max_staleness=0", "trainer.updates=2", "trainer.learning_rate=0.25"]
    altered += ["run.steps=9", "trainer.micro_batch_tokens=64", "trainer.ranks=1"]  # these may change
    config = load(None, [*stopped.world._overrides(), *altered], environ={})
    settings = settings_of(config, eval_prompt_tokens=stopped.recorded.settings.eval_prompt_tokens)
    says = r"--resume: rollout\.max_staleness, trainer\.updates cannot change"
    with pytest.raises(ConfigError, match=says):
        resuming.accept(stopped.recorded, config, settings, is_accepted=True)


def test_a_rollout_alone_says_that_its_number_of_steps_cannot_change(stopped: Stopped) -> None:
    """It has the groups of all steps in one."""
    stopped.copy()
    config = load(None, [*stopped.world._overrides(), "run.steps=9"], environ={})
    before, after = parse(stopped.recorded.config), settings_of(config, eval_prompt_tokens=())
    recorded = replace(
        stopped.recorded,
        rollout_only=True,
        settings=rollout_only_settings(settings_of(before, eval_prompt_tokens=())),
    )
    with pytest.raises(ConfigError, match=r"^--resume: run\.steps cannot change within a run; start a new one"):
        resuming.accept(recorded, config, rollout_only_settings(after), is_accepted=True)


def test_what_the_log_keeps_is_no_part_of_the_history() -> None:
    found = {lineage_settings(load(None, [f"log.trajectories_per_step={n}"], environ={})) for n in (0, 4)}
    assert len(found) == 1


def test_steps_that_must_be_trained_again_are_trained_as_they_were(stopped: Stopped) -> None:
    recorded, trained = stopped.recorded, stopped.recorded.state.feed.trained
    altered = ["trainer.learning_rate=0.5", "objective.kl_coefficient=0.1", "rollout.temperature=0.5"]
    config = load(None, [*stopped.world._overrides(), *altered, "log.level=debug"], environ={})
    start = resuming.Start((), may_start_over=True, step=trained - 1)
    says = (
        r"--resume: rollout\.temperature, trainer\.learning_rate, objective\.kl_coefficient: cannot change now: "
        r"steps \d+ to \d+ must be"
    )
    with pytest.raises(ConfigError, match=says):
        resuming.require_same_history(recorded, start, settings=lineage_settings(config), config=config)
    resuming.require_same_history(
        recorded, replace(start, step=trained), settings=lineage_settings(config), config=config
    )


def test_steps_from_before_a_change_are_trained_again_with_the_settings_that_they_had(
    stopped: Stopped, tmp_path: Path
) -> None:
    """A later controller had another learning rate; the checkpoint with which that began is damaged."""
    tree, path, before = stopped.copy(), tmp_path / "journal.msgpack", parse(stopped.recorded.config)
    after = load(None, [*stopped.world._overrides(), "trainer.learning_rate=0.25"], environ={})
    path.write_bytes(data_of(tree, "journal.msgpack"))
    with JournalWriter(path) as journal:
        journal.append(Epoch(1, stopped.recorded.last_at, dump(after)))
    write(tree, path.read_bytes(), "journal.msgpack")
    write(tree, b"", "checkpoints", stopped.checkpoints[-1], "manifest.json")
    learned = f"trainer.learning_rate = {before.trainer.learning_rate}"
    says = rf"trained again with the settings that they had \({learned}\); resume with these, stop with Ctrl-C"
    assert re.search(says, stopped.refusal(reconfigured(tree, "learning_rate", "0.25"), ConfigError))
    recorded = resuming.read_run(stopped.world.folder)
    start = resuming.Start((), may_start_over=False, step=recorded.state.feed.trained - 1)
    resuming.require_same_history(recorded, start, settings=lineage_settings(before), config=before)


def test_more_steps_change_the_history_only_under_a_schedule_that_follows_them() -> None:
    def settings(schedule: str, steps: int) -> bytes:
        return lineage_settings(load(None, [f"trainer.schedule={schedule}", f"run.steps={steps}"], environ={}))

    assert settings("constant", 24) == settings("constant", 48)
    assert settings("cosine", 24) != settings("cosine", 48)


# -- versions ---------------------------------------------------------------------------------------------------------


def folder_of(version: int) -> tuple[str, str]:
    return ("versions", f"v{version:06d}")


def test_a_version_that_the_journal_does_not_know_is_set_aside(stopped: Stopped) -> None:
    tree = stopped.copy()
    copy_folder(tree, folder_of(stopped.versions[0]), folder_of(99))
    edit_manifest(tree, folder_of(99), version=99)
    assert "set aside, not in the journal: version 99" in stopped.go_on(tree)
    assert "v000099" not in names(stopped.world.folder.versions)


def test_a_version_with_other_bytes_than_in_the_journal_is_set_aside_and_recomputed(
    stopped: Stopped, tmp_path: Path
) -> None:
    tree, version = stopped.copy(), stopped.versions[0]
    (tmp_path / POLICY).write_text("f" * 32)
    write(tree, b"f" * 32, *folder_of(version), POLICY)
    files = json.loads(data_of(tree, *folder_of(version), "manifest.json"))["files"]
    edit_manifest(tree, folder_of(version), files=files | {POLICY: checksum_of(tmp_path / POLICY)})
    assert f"set aside, not in the journal: version {version}" in stopped.go_on(tree)


def test_a_damaged_copy_of_a_version_is_deleted_and_recomputed(stopped: Stopped) -> None:
    tree, version = stopped.copy(), stopped.versions[0]
    write(tree, b"f" * 32, *folder_of(version), POLICY)
    assert f"does not match its checksum; this copy of version {version} is deleted" in stopped.go_on(tree)


def test_missing_versions_are_recomputed_from_an_older_checkpoint(stopped: Stopped) -> None:
    tree = stopped.copy()
    for version in stopped.versions:
        tree._remove((*RUN, *folder_of(version)))
    assert stopped.go_on(tree) == ""


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_the_journal_does_not_know_is_set_aside(stopped: Stopped) -> None:
    tree, newest = stopped.copy(), stopped.checkpoints[-1]
    stranger = newest[:-8] + "ffffffff"
    copy_folder(tree, ("checkpoints", newest), ("checkpoints", stranger))
    said = stopped.go_on(tree)
    assert f"set aside, not in the journal: {stopped.world.folder.checkpoints}/.aside-{stranger}" in said
    assert stranger not in names(stopped.world.folder.checkpoints)


def test_a_checkpoint_of_another_history_is_set_aside_for_an_older_one(stopped: Stopped) -> None:
    tree, newest = stopped.copy(), stopped.checkpoints[-1]
    edit_manifest(tree, ("checkpoints", newest), chain="f" * 32)
    assert f"{newest} belongs to another history" in stopped.go_on(tree)


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"f" * len(data)], ids=["shorter", "other"])
def test_a_damaged_checkpoint_costs_steps_and_not_the_run(stopped: Stopped, damage: Callable[[bytes], bytes]) -> None:
    tree, path = stopped.copy(), ("checkpoints", stopped.checkpoints[-1], "rank-1.safetensors")
    write(tree, damage(data_of(tree, *path)), *path)
    said = stopped.go_on(tree)
    assert "using an older checkpoint" in said or "the trainer continues from step" in said


def test_a_journal_that_was_altered_is_not_continued(stopped: Stopped) -> None:
    """A frame in the middle is missing, so that the decisions after it do not follow from the events."""
    tree = stopped.copy()
    journal = data_of(tree, "journal.msgpack")
    ends = list(dict.fromkeys(end for end, _ in records(journal)))
    middle = len(ends) // 2
    write(tree, journal[: ends[middle - 1]] + journal[ends[middle] :], "journal.msgpack")
    assert "the journal cannot be continued" in stopped.refusal(tree, RunFailed)
