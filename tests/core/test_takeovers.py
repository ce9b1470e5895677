"""Servers that outlive a controller: a version that is needed, with the journaled bytes, is served without a push."""

from __future__ import annotations

import pytest

from dora.core import commands as cmd
from dora.core.ids import InstanceId
from dora.core.phases import GroupPhase, WeightsPhase
from dora.core.strategies import STRATEGIES
from dora.core.versions import digest_of
from tests.core.builders import Core, admit, generate, push, started, two_versions
from tests.core.test_interrupts import interrupted
from tests.core.world import Faults, run

ZERO, ONE = InstanceId(0), InstanceId(1)


def restarted(core: Core, *trajectories: int) -> Core:
    """The core under a new controller; no server is up, and no answer of these has a token yet."""
    core.restarted(dict.fromkeys(trajectories, 0))
    core.ready(core.state.feed.trained)
    return core


def test_a_server_with_a_needed_version_continues_its_answers_at_once() -> None:
    core = restarted(started(), *range(4))
    orders = [generate(t, on=0, version=0, attempt=3) for t in (1, 0, 3, 2)]
    assert core.up(0, holds=0) == orders
    assert core.state.instances[ZERO].full.phase is WeightsPhase.SERVING
    assert core.state.window.entries[0].serving == {ZERO: core.state.instances[ZERO]}


def test_a_server_with_the_newest_version_admits_groups_at_once() -> None:
    core = Core()
    core.ready()
    core.publish(0)
    assert core.up(0, slots=2, holds=0) == [
        admit(0, version=0, deadline=1),
        generate(0, on=0, version=0),
        generate(1, on=0, version=0),
    ]


@pytest.mark.parametrize("digest", ["", "00000000", digest_of({"weights": "1"}), digest_of({"weights": "0"})[:7]])
def test_a_server_with_other_bytes_of_the_version_is_pushed_like_an_empty_one(digest: str) -> None:
    core = restarted(started(), *range(4))
    assert core.up(0, holds=0, digest=digest) == [push(0, version=0, attempt=2)]
    assert core.state.instances[ZERO].full.phase is WeightsPhase.LOADING


@pytest.mark.parametrize("holds", [0, 7])
def test_a_server_with_a_version_that_was_released_or_never_published_is_pushed(holds: int) -> None:
    core = started(groups_per_step=1, slots=2, max_staleness=0)
    core.answer(0)
    core.train(0)
    core.publish(1)
    assert 0 not in core.state.window.entries
    restarted(core)
    assert core.up(0, holds=holds) == [push(0, version=1, attempt=core.attempts[cmd.PushWeights, 0])]


def test_a_server_that_is_up_or_comes_late_does_not_change_what_it_serves() -> None:
    core = started()
    before = core.state.counters.late_completions
    core.up(0, holds=0)  # of an instance that is up
    assert core.state.counters.late_completions == before + 1
    assert core.state.instances[ZERO].residents


def test_an_adopted_server_gets_the_work_of_its_version_before_it_can_be_given_to_another() -> None:
    """The other version is in need, and its server has not come back yet."""
    core = restarted(two_versions(), 16, 17, 18, 19, 20, 21, 22, 23)
    assert [o.version for o in core.up(0, slots=4, holds=0) if isinstance(o, cmd.Generate)] == [0] * 4
    assert core.up(1, slots=4, holds=1)[0] == admit(12, version=1, deadline=3)
    assert core.of(cmd.PushWeights)[-1].version == 0  # of the first controller: no push since


def test_an_adopted_server_that_its_version_does_not_need_is_given_to_one_in_need() -> None:
    core = restarted(two_versions(source=12), *range(16, 24))
    core.up(0, slots=8, holds=1)
    assert core.attempts[cmd.PushWeights, 0] == 2
    assert core.state.instances[ZERO].full.pushing == 0
    assert [o.instance for o in core.up(1, slots=8, holds=0) if isinstance(o, cmd.Generate)] == [1] * 8


def test_a_version_that_was_given_away_is_at_home_again_on_an_adopted_server() -> None:
    core = started(instances=2)
    core.state.given_away[0] = 0.0
    core.lost(1)
    core.up(1, holds=0)
    assert core.state.given_away == {}


def test_a_drained_server_that_comes_back_gets_no_work_until_it_is_recalled_with_the_version_that_it_holds() -> None:
    core = started(instances=2, slots=2, source=2)
    core.drain(1)
    core.lost(1)
    assert core.up(1, slots=2, holds=0) == []
    assert not core.state.window.entries[0].serving.get(ONE)
    assert [o.instance for o in core.recall(1) if isinstance(o, cmd.Generate)] == [1, 1]
    assert len(core.of(cmd.PushWeights)) == 2  # one each at the start


@pytest.mark.parametrize("strategy", ["partial", "partial_bounded", "partial_sync"])
def test_with_updates_in_flight_a_server_keeps_the_newest_version_and_is_updated_from_an_older_one(
    strategy: str,
) -> None:
    core = interrupted(strategy, source=4)
    core.pushed(0, 1)
    core.pushed(1, 1)
    restarted(core, *range(4, 8))
    assert {o.version for o in core.up(0, holds=1) if isinstance(o, cmd.Generate)} <= {1}
    assert core.state.instances[ZERO].full.version == 1
    assert core.up(1, holds=0) == [push(1, version=1, attempt=core.attempts[cmd.PushWeights, 1])]


def test_an_evaluation_continues_on_an_adopted_server() -> None:
    core = Core(eval_prompt_tokens=(3, 3), eval_every=1, source=0)
    core.ready()
    core.publish(0)
    core.up(0)
    core.pushed(0, 0)
    samples = [t for t in core.state.trajectories if t < 0]
    assert len(samples) == 2
    restarted(core, *samples)
    assert {o.trajectory for o in core.up(0, holds=0) if isinstance(o, cmd.Generate)} == set(samples)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_with_every_fault_at_once_servers_that_outlive_controllers_lose_no_group_and_no_token(strategy: str) -> None:
    faults = Faults(
        push_fails=0.2,
        request_fails=0.1,
        instance_dies=0.02,
        grading_fails=0.02,
        zero_variance=0.2,
        controller_restarts=0.1,
        late_completion=0.2,
        kept=0.7,
    )
    adopted = 0
    for seed in range(4):
        world = run(strategy, seed=seed, faults=faults)
        assert isinstance(world.outcome, cmd.FinishRun)
        assert world.state.ledger.counts[GroupPhase.TRAINED] == 8 * 4
        assert world.state.counters.scheduling_aborts == 0 or strategy == "oversample"
        adopted += sum(getattr(event, "version", None) is not None for event, _ in world.journal if is_up(event))
    assert adopted > 4


def is_up(event: object) -> bool:
    return type(event).__name__ == "InstanceUp"
