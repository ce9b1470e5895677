"""Learning in simulated time: real answers and versions under the simulator's decisions."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
from learning import cells, fleets, harness

from dora.app.inputs import open_inputs
from dora.app.learn import SAVE_EVERY, LearningCurve, configured, job_of, learn
from dora.app.settings import trainer_settings
from dora.config.schema import Config
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import TrajectoryId
from dora.errors import ConfigError, RunFailed
from dora.learning import sampler as sampler_module
from dora.learning.learner import Learner, OneRank
from dora.learning.progress import Progress
from dora.learning.sampler import Sampler
from dora.learning.world import BLOCK, LearningWorld, RealAnswers
from dora.sim.tools import Call
from dora.sim.workload import Workload
from tests.e2e.runs import assert_one_clear_error, run_to_end
from tests.learning.test_harness import TINY, PlainTrainer

#: Sizes come from the workload.
TASK = tuple(one for one in TINY if not one.startswith(("run.steps", "rollout.group")))
SCALE = 100.0


def workload(*, strategy: str = "dora", k: int = 0, steps: int = 3) -> Workload:
    sizes = {"steps": steps, "groups_per_step": 8, "group_size": 4}
    return Workload().with_changes(
        job={"strategy": strategy, "max_staleness": k, **sizes},
        lengths={"scale": SCALE},
        fleet={"devices": 6, "rollout_devices": 4},
    )


def prepared(one: Workload, *changes: str, seed: int = 0) -> tuple[Config, Workload]:
    return configured(cells.TASKS["sums"], one, [*TASK, *changes], seed=seed)


def learned(one: Workload, *changes: str, seed: int = 0) -> LearningCurve:
    config, fitted = prepared(one, *changes, seed=seed)
    return learn(fitted, config, seed=seed, show=str)


class Recorded:
    """A simulated job with everything that a test may want to look at afterwards."""

    def __init__(self, one: Workload, *, every: int = 1) -> None:
        self.config, self.workload = prepared(one)
        self.commands: list[cmd.Command] = []
        self.lengths: dict[TrajectoryId, int] = {}  #: simulated tokens of complete answers
        self.answers: dict[TrajectoryId, list[int]] = {}  #: real tokens, when their group is committed
        self.versions: list[dict[str, torch.Tensor]] = []
        inputs = open_inputs(self.config)
        with OneRank():
            sampler = Sampler(self.config, model=inputs.model, tokenizer=inputs.tokenizer)
            settings = trainer_settings(self.config, max_staleness=self.workload.settings().max_lag)
            learner = Learner(settings, model=inputs.model)
            job = job_of(self.config, inputs, every=every)
            real = RealAnswers(job, sampler, learner.versions, Progress(None, about=""), workload=self.workload)

            def note(event: ev.Event, orders: Sequence[cmd.Command]) -> None:
                if isinstance(event, ev.GenerationFinished):
                    self.lengths[event.trajectory] = event.num_tokens
                    if event.trajectory in real.records:
                        self.answers[event.trajectory] = list(real.records[event.trajectory].tokens)
                self.commands += orders

            self.world = LearningWorld(
                self.workload,
                real,
                learner,
                seed=0,
                sink=note,
                on_version=lambda version, at_s: self.versions.append(learner.versions[version]),
            )
            try:
                self.world.run()
            finally:
                sampler.close()


def test_without_staleness_a_policy_learns_what_it_learns_in_the_lag_harness() -> None:
    found = learned(workload(strategy="sync"))
    config, _ = prepared(workload(strategy="sync"))
    with OneRank():
        expected = harness.run(config, staleness=0, eval_every=1)
    assert [(point.version, point.heldout) for point in found.points] == expected.heldout
    for mine, theirs in zip(found.steps, expected.steps, strict=True):
        for name in cells.METRICS:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name  # rows have another order


def test_a_sampler_that_stands_still_ends_the_job_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was only stopped for a while goes on."""
    monkeypatch.setattr(sampler_module, "WAIT_S", 0.0)
    with pytest.raises(RunFailed, match="no token was sampled for 0 s"):
        learned(workload(strategy="sync"))


def test_with_staleness_a_plain_trainer_that_follows_the_commands_makes_the_same_versions() -> None:
    """The replay knows which groups were admitted under which version, and committed to which step; nothing else."""
    run = Recorded(workload(k=2, steps=4))
    plain = PlainTrainer(run.config)
    versions = [{name: tensor.clone() for name, tensor in plain.weights.items()}]
    committed: dict[int, list[cmd.CommitGroup]] = defaultdict(list)
    for order in run.commands:
        if isinstance(order, cmd.CommitGroup):
            committed[order.step].append(order)
    assert any(order.step > order.version for orders in committed.values() for order in orders)
    with OneRank(), closing(harness.Rollout(run.config)) as rollout:
        for step in range(4):
            groups = []
            for order in committed[step]:
                rollout.load(versions[order.version])
                first = order.group - order.group % BLOCK
                group = rollout.groups(range(first, first + BLOCK), version=order.version)[order.group % BLOCK]
                ids = range(order.group * 4, (order.group + 1) * 4)
                assert [answer.tokens for answer in group.answers] == [run.answers[TrajectoryId(id)] for id in ids]
                groups.append(group)
            plain.step(step, groups)
            versions.append({name: tensor.clone() for name, tensor in plain.weights.items()})
            for name, weights in versions[-1].items():
                error = (run.versions[step + 1][name] - weights).square().mean().sqrt()
                assert error < 1e-5, name  # AdamW magnifies rounding; an update moves a weight by 6e-4


@pytest.mark.parametrize("strategy", ["partial_bounded", "partial"])
def test_weights_that_change_under_requests_change_the_rest_of_their_answers(strategy: str) -> None:
    run = Recorded(workload(strategy=strategy, k=1, steps=4))
    mixed = 0
    for id, simulated in run.lengths.items():
        real = len(run.answers[id])
        # A simulated answer may end later than its real one by less than a token: the prefix was rounded down.
        assert SCALE * (real - 1) < simulated <= SCALE * (real + 1)
        mixed += simulated != SCALE * real
    assert run.world.state.counters.version_conflicts > 0
    assert mixed < len(run.lengths)


def test_one_group_in_four_is_sampled_and_trained_and_lends_its_lengths_to_the_others() -> None:
    run = Recorded(workload(k=1).with_changes(job={"groups_per_step": 16}), every=4)
    groups = {id // 4 for id in run.lengths}
    sampled = {id // 4 for id in run.answers}
    assert [number // 4 for number in sorted(sampled)] == list(range(len(sampled)))  # one in each window of four
    assert len(groups) - 3 <= 4 * len(sampled) <= len(groups) + 3
    lent = {tuple(run.lengths[TrajectoryId(4 * group + i)] for i in range(4)) for group in groups - sampled}
    owned = {
        tuple(SCALE * len(run.answers[TrajectoryId(4 * group + i)]) for i in range(4))
        for group in sampled
        if all(TrajectoryId(4 * group + i) in run.answers for i in range(4))
    }
    assert len(lent & owned) > len(lent) / 2  # the others are lent by groups that were not admitted
    assert sum(map(len, run.world.answer_tokens.values())) == 4 * len(
        {order.group for order in run.commands if isinstance(order, cmd.CommitGroup)} & sampled
    )


def test_a_simulation_repeats_itself() -> None:
    first, second = (learned(workload(k=1)) for _ in range(2))
    assert first.digest == second.digest
    assert [point.heldout for point in first.points] == [point.heldout for point in second.points]


def test_another_seed_or_k_is_another_history() -> None:
    curves = [learned(workload(k=k), seed=seed) for k, seed in ((1, 0), (1, 1), (0, 0))]
    assert len({curve.digest for curve in curves}) == 3


class Interrupted(Exception):
    """Ends a simulation from outside."""


@pytest.mark.deep
@pytest.mark.parametrize("at", [(SAVE_EVERY,), (2, SAVE_EVERY + 1)])
def test_a_simulation_goes_on_where_it_was_interrupted(tmp_path: Path, at: Sequence[int]) -> None:
    """The second case is interrupted before the trainer was saved, and again after that."""
    config, fitted = prepared(workload(k=1, steps=SAVE_EVERY + len(at)))
    for version in at:

        def interrupt(line: str, version: int = version) -> None:
            if line.startswith(f"version {version} "):
                raise Interrupted

        with pytest.raises(Interrupted):
            learn(fitted, config, seed=0, show=interrupt, folder=tmp_path)
    assert [path.name for path in tmp_path.glob("step-*")] == [f"step-{SAVE_EVERY:06}"]
    kept = {path.name for path in (tmp_path / "versions").iterdir()}
    assert f"{SAVE_EVERY}.safetensors" in kept
    assert "0.safetensors" not in kept  # no answer of it was left
    resumed = learn(fitted, config, seed=0, show=str, folder=tmp_path)
    assert resumed == learn(fitted, config, seed=0, show=str)


def test_a_torn_end_is_made_again_and_what_was_saved_is_not_made_again(tmp_path: Path) -> None:
    with closing(Progress(tmp_path, about="a")) as saved:
        assert [saved.recall(lambda n=n: n, int) for n in range(3)] == [0, 1, 2]  # type: ignore[misc]
    with (tmp_path / "made").open("r+b") as file:
        file.truncate((tmp_path / "made").stat().st_size - 1)
    with closing(Progress(tmp_path, about="a")) as saved:
        assert [saved.recall(lambda: 7, int) for _ in range(3)] == [0, 1, 7]


def test_a_folder_is_of_one_process_at_a_time(tmp_path: Path) -> None:
    with closing(Progress(tmp_path, about="a")), pytest.raises(ConfigError, match="another process makes this simul"):
        Progress(tmp_path, about="a")
    Progress(tmp_path, about="a").close()


def test_answers_to_rows_that_have_changed_are_not_used(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n}+{n + 1}=", "answer": "{2 * n + 1}"}}\n' for n in range(1, 40)))
    source = f'task.sources=[{{kind="jsonl", path="{rows}"}}]'
    others = f'eval.sets=[{{name="held out", source={{kind="jsonl", path="{tmp_path / "held-out.jsonl"}"}}}}]'
    (tmp_path / "held-out.jsonl").write_text('{"prompt": "3+3=", "answer": "6"}\n')
    config, fitted = prepared(workload(steps=2), source, others, 'task.rewards=[{kind="math"}]')
    learn(fitted, config, seed=0, show=str, folder=tmp_path / "saved")
    rows.write_text(rows.read_text().replace('"1+2="', '"2+1="').replace('"5+6="', '"6+5="'))
    with pytest.raises(ConfigError, match="saved: has answers to other prompts, which have changed; delete it"):
        learn(fitted, config, seed=0, show=str, folder=tmp_path / "saved")


def test_a_folder_of_another_simulation_is_refused(tmp_path: Path) -> None:
    Progress(tmp_path, about="a").close()
    with pytest.raises(ConfigError, match="is of another simulation"):
        Progress(tmp_path, about="b")
    with closing(Progress(tmp_path, about="a")) as saved:
        saved.recall(lambda: "a word", str)
    with closing(Progress(tmp_path, about="a")) as saved, pytest.raises(ConfigError, match="does not have what"):
        saved.recall(lambda: 1.0, float)


def test_versions_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "versions").mkdir()
    (tmp_path / "versions" / "0.safetensors").write_bytes(b"x")
    config, fitted = prepared(workload(k=1))
    with pytest.raises(ConfigError, match=r"versions: its versions cannot be read"):
        learn(fitted, config, seed=0, show=str, folder=tmp_path)


@pytest.mark.deep
def test_answers_that_are_lost_are_named(tmp_path: Path) -> None:
    config, fitted = prepared(workload(k=1, steps=SAVE_EVERY + 1))
    learn(fitted, config, seed=0, show=str, folder=tmp_path)
    sizes = [(tmp_path / "made").stat().st_size // part for part in (4, 3, 2)]
    for size in sizes[::-1]:
        with (tmp_path / "made").open("r+b") as file:
            file.truncate(size)
        with pytest.raises(ConfigError, match=r"not saved, although later ones were.*delete the simulation's folder"):
            learn(fitted, config, seed=0, show=str, folder=tmp_path)


def test_weights_that_are_older_than_their_tag_teach_something_else() -> None:
    config, fitted = prepared(workload(k=1, steps=4))
    plain, behind = (learn(fitted, config, seed=0, show=str, behind=n) for n in (0, 2))
    assert sum(plain.staleness) == sum(behind.staleness)  # the core knows nothing of it
    assert max(step["all/log_ratio_abs_mean"] for step in behind.steps) > 1.5 * max(
        step["all/log_ratio_abs_mean"] for step in plain.steps
    )


def test_metrics_are_those_of_the_step_before_a_version_also_if_later_steps_are_trained_by_then() -> None:
    """Versions take long to publish here, and two more steps are trained meanwhile."""
    made = learned(workload(k=2, steps=4).with_changes(train={"publish_bytes_s": 1e8}))
    drift = [step["all/log_ratio_abs_mean"] for step in made.steps]
    assert drift[0] == pytest.approx(0.0, abs=1e-4)
    assert len(set(drift)) == 4


def test_rewards_receive_what_those_of_a_run_do(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def score(response, num_tokens, max_tokens, finish, source):\n"
        "    return 1000 * num_tokens + max_tokens + 0.5 * (finish == 'length') + 0.25 * (source == 'easy')\n"
        "def other(response): return -1.0\n"
    )
    mine = f'task.rewards=[{{kind="function", name="{file}:score"}}]'
    theirs = f'eval.sets.0.rewards=[{{kind="function", name="{file}:other"}}]'
    one = workload(steps=2)
    for changes, expected in (((mine,), 0.25), ((mine, theirs), None)):
        made = learned(one, 'task.sources.0.label="easy"', 'eval.sets.0.source.label="easy"', *changes)
        rewards = made.points[0].rewards
        if expected is None:
            assert rewards == [-1.0] * 8
            continue
        lengths = [reward // 1000 for reward in rewards]
        assert all(0 < length <= 24 for length in lengths)
        for reward, length in zip(rewards, lengths, strict=True):
            assert reward - 1000 * length - 24 in ({0.25, 0.75} if length == 24 else {0.25})


def test_each_sample_of_a_held_out_prompt_is_another_answer() -> None:
    made = learned(workload(steps=2), "eval.sets.0.samples=3", "eval.sets.0.temperature=1.0")
    assert len(made.points[0].rewards) == 24
    single = learned(workload(steps=2), "eval.sets.0.temperature=1.0")
    assert made.points[0].rewards[::3] == single.points[0].rewards


def test_a_reward_that_fails_counts_as_in_a_run(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def some(response):\n    assert sum(map(ord, response)) % 3\n    return 1.0\n"
        "def none(response): raise ValueError('never right')\n"
    )
    made = learned(workload(steps=2), f'task.rewards=[{{kind="function", name="{file}:some"}}]')
    rewards = [reward for point in made.points for reward in point.rewards]
    assert any(map(math.isnan, rewards))
    assert made.points[-1].heldout == 1.0
    with pytest.raises(RunFailed, match="never right"):
        learned(workload(steps=2), f'task.rewards=[{{kind="function", name="{file}:none"}}]')


def test_longer_answers_take_longer() -> None:
    short, long = (learned(workload().with_changes(lengths={"scale": scale})) for scale in (10.0, 1000.0))
    assert long.step_s > 5 * short.step_s
    assert [point.version for point in long.points] == [0, 1, 2, 3]


def test_without_evaluations_between_the_first_and_the_last_version_are_scored() -> None:
    made = learned(workload(steps=3), "eval.every=0")
    assert [bool(point.rewards) for point in made.points] == [True, False, False, True]


def test_what_cannot_be_simulated_is_refused_by_name(tmp_path: Path) -> None:
    for changes, says in (
        (("eval.sets=[]",), "eval.sets: a curve needs a held-out set"),
        (('environment.name="mine:Env"',), "environment.name: only single answers are simulated"),
    ):
        with pytest.raises(ConfigError, match=says):
            prepared(workload(), *changes)
    judge = 'task.rewards=[{kind="judge", url="http://127.0.0.1:1", name="m"}]'
    with pytest.raises(ConfigError, match="rewards of kind judge: simulations ask no judge"):
        prepared(workload(), judge)
    with pytest.raises(ConfigError, match=r"^lengths\.scale: a token must take as long as a finite number, above 0"):
        prepared(workload().with_changes(lengths={"scale": 0.0}))
    filters = workload().with_changes(job={"filter_zero_variance": True})
    with pytest.raises(ConfigError, match=r"task\.revisit_share: simulations pass over no rows; leave it at 1"):
        prepared(filters, "task.revisit_share=0.5")
    for part in ({"tools": {"calls": (0.5, 0.5)}}, {"lengths": {"calls": (((Call(3, 1.0, 2),),),)}}):
        with pytest.raises(ConfigError, match=rf"^{next(iter(part))}\.calls: a policy that learns makes no calls"):
            prepared(workload().with_changes(**part))


@pytest.mark.deep
def test_the_command_prints_a_row_for_each_case_and_writes_the_curves(tmp_path: Path) -> None:
    file, curves = tmp_path / "small.toml", tmp_path / "curves.json"
    file.write_text(
        "[job]\nsteps = 2\ngroups_per_step = 8\ngroup_size = 4\n[lengths]\nscale = 100.0\n"
        "[fleet]\ndevices = 6\nrollout_devices = 4\n"
    )
    asked = ("simulate", str(file), "--learn", str(cells.TASKS["sums"]))
    done = run_to_end(*asked, "--k", "0,1", "--json", str(curves))
    assert (done.returncode, done.stderr) == (0, "")
    table = done.stdout.splitlines()[-3:]
    assert table[0].split()[:4] == ["strategy", "K", "seed", "step"]
    assert [line.split()[:3] for line in table[1:]] == [["dora", "0", "0"], ["dora", "1", "0"]]
    found = json.loads(curves.read_text())
    assert [curve["digest"][:8] for curve in found] == [line.split()[-1] for line in table[1:]]
    assert [point["version"] for point in found[0]["points"]] == [0, 1, 2]
    refused = run_to_end(*asked, "--wide")
    assert_one_clear_error(refused, code=2, says="--learn: is not valid with --pictures, --wide and --processes")
    missing = run_to_end("simulate", str(file), "--learn", str(tmp_path / "no.toml"))
    assert_one_clear_error(missing, code=2, says="no.toml: no such file")


def test_every_control_changes_what_its_curves_are_made_of() -> None:
    calibration = fleets.Calibration(100.0, [], [], profile="", commit="")
    made = {}
    for name, control in fleets.CONTROLS.items():
        for setting in control.settings:
            cell = fleets.FleetCell("tail-bound", setting.strategy, setting.k, 0, name)
            plan = fleets.PlanFound("tail-bound", setting.strategy, setting.k, 1, 9, 64, 32_768, 30.0, "", commit="")
            made[name, setting] = *fleets.configuration(cell, calibration, plan), control.behind
    found = list(made.values())
    assert all(one not in found[:number] for number, one in enumerate(found))
    assert not made[fleets.UNFILTERED, fleets.SYNC][1].job.filter_zero_variance
