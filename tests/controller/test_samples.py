"""Samples for people: which trajectories are kept, and with what."""

from __future__ import annotations

import math
import tracemalloc
from array import array
from contextlib import closing
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from dora.controller.evaluations import EvalSet, Evaluations
from dora.controller.samples import SampleFile, Samples
from dora.controller.trajectories import Trajectories
from dora.core import commands as cmd
from dora.core.ids import InstanceId, StepId, TrajectoryId, VersionId
from dora.core.phases import GroupPhase
from dora.core.tables import Group
from dora.environments.renderer import Renderer, open_renderer
from dora.files import LineFile
from dora.journal.deep import EVALUATION, KeptPart, KeptTrajectory, encode_kept, read_kept
from dora.journal.tokens import TokenWriter
from dora.observe.episodes import TimedEpisodes
from dora.seed.policy import path as seed_path
from dora.tasks.tokenizer import Tokenizer, load_tokenizer
from dora.transport.messages import TrainerLogprobs
from tests.controller.fakes import prompt

GROUP_SIZE = 2


class Kept:
    """Samples of six groups, and of an evaluation of four prompts."""

    def __init__(
        self, folder: Path, *, keep: int = 2, tokenizer: Tokenizer | None = None, renderer: Renderer | None = None
    ) -> None:
        with TokenWriter(folder / "tokens.bin", epoch=0) as tokens:
            self.trajectories = Trajectories(tokens, group_size=GROUP_SIZE)
            self.groups = [self.group(number) for number in range(6)]
        self.evaluations = Evaluations([EvalSet("heldout", [prompt(i) for i in range(4)], 1, 0.0)])
        for sample in self.evaluations.ids(VersionId(3)):
            self.trajectories.open(sample, prompt(0))
        self.samples = Samples(
            self.trajectories,
            evaluations=self.evaluations,
            tokenizer=tokenizer or load_tokenizer(seed_path()),
            episodes=TimedEpisodes(),
            tags={group.id: group.version for group in self.groups},
            keep=keep,
            renderer=renderer,
        )

    def group(self, number: int) -> Group:
        made = Group(
            number,
            version=VersionId(number % 3),
            deadline=9,
            num_prompt_tokens=3,
            group_size=GROUP_SIZE,
            admitted_at=0.0,
        )
        self.trajectories.prompts[number] = prompt(number)
        self.trajectories.admit(number)
        for trajectory in made.trajectories:
            trajectory.reward = float(trajectory.id % 2)
            record = self.trajectories.records[trajectory.id]
            record.tokens, record.logprobs = array("i", [5, 6]), array("f", [-0.5, -0.25])
        return made

    def of_step(self, groups: list[Group]) -> list[KeptTrajectory]:
        return list(self.samples.of_step(groups, step=7))


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


def test_a_trained_sample_has_the_log_probs_of_the_trainer_if_it_sent_them(kept: Kept) -> None:
    logprobs = np.array([-0.5000001, -0.25], np.float32)
    kept.samples.on_logprobs(TrainerLogprobs(rank=0, trajectory=TrajectoryId(9), logprobs=logprobs))
    first, second = kept.of_step(kept.groups)
    assert (first.group, first.trajectory, first.trainer_logprobs) == (4, 9, (-0.5, -0.25))
    assert (first.outcome, first.reward, first.answer, first.version) == ("trained", 1.0, "03", 1)
    assert (second.trajectory, second.trainer_logprobs) == (0, ())
    assert kept.of_step(kept.groups)[0].trainer_logprobs == (), "they belong to one step"


def test_each_server_is_compared_with_the_trainer_by_fresh_answers_alone(kept: Kept) -> None:
    """Groups 2 and 5 have version 2; trajectory 5 was moved, 10 was decoded by the other server."""
    for trajectory, instance in ((4, 0), (5, 0), (5, 1), (10, 3), (6, 0)):
        order = cmd.Generate(TrajectoryId(trajectory), 1, InstanceId(instance), VersionId(2), 0)
        kept.samples.on_commands([order])
    for trajectory, off in ((4, 0.0), (5, 0.1), (6, 1.0), (11, 1.0)):
        logprobs = np.array([-0.5 + off, -0.25], np.float32)
        kept.samples.on_logprobs(TrainerLogprobs(rank=0, trajectory=TrajectoryId(trajectory), logprobs=logprobs))
    found = kept.samples.mismatches(kept.groups, step=StepId(2))
    assert found == {0: 0.0, 1: pytest.approx((math.expm1(0.1) - 0.1) / 2, rel=1e-4)}
    kept.samples.on_commands([cmd.ForgetGroups(tuple(group.id for group in kept.groups))])
    assert kept.samples.mismatches(kept.groups, step=StepId(2)) == {}
    assert not kept.samples._instances


def test_the_mismatch_of_a_large_step_is_the_mean_over_its_tokens_and_takes_few_bytes_for_each(kept: Kept) -> None:
    rng, num_tokens = np.random.default_rng(3), 50_000
    ratios: list[float] = []
    for group in (one for one in kept.groups if one.version == VersionId(2)):
        for trajectory in group.trajectories:
            record = kept.trajectories.records[trajectory.id]
            record.tokens = array("i", bytes(4 * num_tokens))
            record.logprobs = array("f", -rng.random(num_tokens, dtype=np.float32))
            kept.samples.on_commands([cmd.Generate(trajectory.id, 1, InstanceId(0), VersionId(2), 0)])
            logprobs = -rng.random(num_tokens, dtype=np.float32)
            kept.samples.on_logprobs(TrainerLogprobs(rank=0, trajectory=trajectory.id, logprobs=logprobs))
            ratio = np.round(logprobs.astype(np.float64), 6) - np.asarray(record.logprobs, dtype=np.float64)
            ratios += (np.expm1(ratio) - ratio).tolist()
    tracemalloc.start()
    found = kept.samples.mismatches(kept.groups, step=StepId(2))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == {0: float(np.mean(ratios))}
    assert peak_bytes < 24 * len(ratios)


def test_groups_are_chosen_without_comparing_them_with_one_another(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10,000 groups, that would take half a second of the controller's loop."""

    def compared(self: Group, other: object) -> bool:
        raise AssertionError("two groups are compared")

    monkeypatch.setattr(Group, "__eq__", compared)
    groups = [kept.group(number) for number in range(6)]
    logprobs = np.array([-0.5, -0.25], np.float32)
    for group in groups[::2]:
        sent = TrainerLogprobs(rank=0, trajectory=group.trajectories[0].id, logprobs=logprobs)
        kept.samples.on_logprobs(sent)
    assert [sample.group for sample in kept.of_step(groups)] == [0, 2]


def test_only_what_the_policy_sampled_is_compared(kept: Kept) -> None:
    record = kept.trajectories.records[TrajectoryId(4)]
    record.tokens, record.logprobs = array("i", [5, 6, 7]), array("f", [-0.5, 0.0, -0.25])
    record.observed.append((1, 2))
    kept.samples.on_commands([cmd.Generate(TrajectoryId(4), 1, InstanceId(0), VersionId(2), 0)])
    logprobs = np.array([-0.5, -0.25], np.float32)
    kept.samples.on_logprobs(TrainerLogprobs(rank=0, trajectory=TrajectoryId(4), logprobs=logprobs))
    assert kept.samples.mismatches(kept.groups, step=StepId(2)) == {0: 0.0}


def test_samples_of_dropped_groups_come_with_the_next_step_once_and_are_as_many_as_are_kept(kept: Kept) -> None:
    drops = [cmd.DropGroup(group, GroupPhase.FILTERED, "zero variance", (1.0, 1.0)) for group in (1, 2, 3)]
    kept.samples.on_commands(drops)
    kept.trajectories.forget([1, 2, 3])
    found = [one for one in kept.of_step([kept.groups[0]]) if one.outcome != "trained"]
    assert [(one.group, one.outcome, one.reward, one.version, one.step) for one in found] == [
        (1, "filtered: zero variance", 1.0, 1, 7),
        (2, "filtered: zero variance", 1.0, 2, 7),
    ]
    assert [one.outcome for one in kept.of_step([kept.groups[0]])] == ["trained"]


def test_a_dropped_group_without_tokens_leaves_no_sample(kept: Kept) -> None:
    for trajectory in kept.trajectories.siblings(1):
        kept.trajectories.records[trajectory].tokens = array("i")
    kept.samples.on_commands([cmd.DropGroup(1, GroupPhase.FAILED, "generation: gone", (None, None))])
    assert kept.of_step([]) == []


def test_samples_of_an_evaluation_are_evenly_spread(kept: Kept) -> None:
    found = list(kept.samples.of_evaluation(VersionId(3), trained=3))
    ids = kept.evaluations.ids(VersionId(3))
    assert [(one.trajectory, one.outcome, one.step) for one in found] == [
        (ids[0], EVALUATION, 2),
        (ids[2], EVALUATION, 2),
    ]


def test_a_sample_has_the_terms_of_its_reward_and_the_text_of_each_token(kept: Kept) -> None:
    record = kept.trajectories.records[TrajectoryId(0)]
    tokens = load_tokenizer(seed_path(), thinking=None).encode("1203")
    record.tokens, record.logprobs = array("i", tokens), array("f", [-0.5] * len(tokens))
    record.terms, record.metrics = (("exact", 1.0), ("length", -0.25)), (("moves", 7.0),)
    [sample] = kept.of_step([kept.groups[0]])
    assert sample.metrics == record.metrics
    assert (sample.terms, "".join(sample.pieces), len(sample.pieces)) == (record.terms, "1203", len(tokens))


def test_the_file_of_samples_never_exceeds_its_bound_across_resumes_too(kept: Kept, tmp_path: Path) -> None:
    path, bound = tmp_path / "trajectories.jsonl", 4_000
    sizes, ids = [], count()
    for _ in range(3):  # each time as if resumed
        file = SampleFile(LineFile(path), max_bytes=bound)
        with closing(file.file):
            assert not file.is_full
            for _ in range(4):
                for line in file.lines(replace(one, trajectory=next(ids)) for one in kept.of_step(kept.groups)):
                    file.file.write(line)
                sizes.append(path.stat().st_size)
            longest = max(map(len, path.read_bytes().splitlines(keepends=True)))
    assert file.is_full
    assert bound - longest < sizes[-1] <= bound
    assert len(list(read_kept(path))) == path.read_bytes().count(b"\n") > 8, "no line is torn"


def test_nothing_is_kept_if_that_is_the_setting(tmp_path: Path) -> None:
    kept = Kept(tmp_path, keep=0)
    kept.samples.on_commands([cmd.DropGroup(1, GroupPhase.FILTERED, "zero variance", (1.0, 1.0))])
    assert kept.of_step(kept.groups) == list(kept.samples.of_evaluation(VersionId(3), trained=3)) == []


def test_a_sample_that_comes_again_after_a_resume_is_not_written_again(kept: Kept, tmp_path: Path) -> None:
    """Its step is trained again, and the row of the step was lost."""
    path = tmp_path / "trajectories.jsonl"
    written = kept.of_step(kept.groups)
    path.write_bytes(encode_kept(written[0]))
    file = SampleFile(LineFile(path), max_bytes=10_000)
    with closing(file.file):
        assert file.lines(written) == [encode_kept(written[1])]


def test_an_episode_is_kept_by_its_turns_with_their_calls_and_what_was_observed(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(seed_path("seed-tools"))
    renderer = open_renderer(tokenizer)
    kept = Kept(tmp_path, tokenizer=tokenizer, renderer=renderer)
    said = (
        '<tool_call>\n{"name": "look_up", "arguments": {"key": "k1"}}\n</tool_call><tool_call>{</tool_call><|im_end|>',
        "v7",
    )
    shown = "\n<|im_start|>user\n<tool_response>\nk30\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    parts = [tokenizer.encode(text, special_tokens=False) for text in (said[0], shown, said[1])]
    record = kept.trajectories.records[TrajectoryId(0)]
    record.tokens = array("i", [token for part in parts for token in part])
    record.observed = [(len(parts[0]), len(parts[0]) + len(parts[1]))]
    record.logprobs = array("f", [0.0] * len(record.tokens))
    found = kept.of_step(kept.groups[:1])[0].parts
    ends = (len(parts[0]), len(parts[0]) + len(parts[1]), len(record.tokens))
    assert found == (
        KeptPart("policy", said[0], ends[0], (("look_up", '{"key":"k1"}'), ("", "{"))),
        KeptPart("environment", shown, ends[1]),
        KeptPart("policy", said[1], ends[2]),
    )
    path = tmp_path / "trajectories.jsonl"
    path.write_bytes(b"".join(map(encode_kept, kept.of_step(kept.groups[:1]))))
    assert next(iter(read_kept(path))).parts == found


def test_an_answer_of_a_run_without_an_environment_has_no_parts(kept: Kept) -> None:
    assert [sample.parts for sample in kept.of_step(kept.groups)] == [()] * 2
