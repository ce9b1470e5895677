"""The decision core in surroundings that answer in any order, late, twice, or not at all.

Each example drives one job through faults that hypothesis chooses; `Outside` refuses whatever breaks a rule. At the end
the faults stop, and the job has to end by itself. A bug found here becomes an event list in test_regressions.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from dora.core import events as ev
from dora.core.on_training import RESTART_PAUSES_S
from dora.core.orchestration import SWITCHES, orchestration_of
from dora.core.strategies import Settings, rules_of
from tests.core.outside import DIGEST, Outside
from tests.core.test_sweep import CALLS

_INDEX = st.integers(0, 11)
#: Of the hosts of environments, in episodes: any, or that of a group and a few more.
_ROOM = st.sampled_from([0, 0, 0, 3, 4, 9])

_JOBS = st.builds(
    Settings,
    rules=st.sampled_from(
        [
            *(rules_of("dora", max_staleness=k) for k in (0, 1, 2, 2, 3, 3, 4)),
            *(rules_of(name, max_staleness=0) for name in ("sync", "periodic", "one_step_off")),
            *(rules_of("partial", max_staleness=k) for k in (0, 2)),
            *(rules_of("partial_bounded", max_staleness=k) for k in (1, 3)),
            rules_of("partial_sync", max_staleness=0),
            *(rules_of("oversample", max_staleness=0, oversample=alpha) for alpha in (1.5, 3.0)),
        ]
    ),
    steps=st.integers(3, 8),
    groups_per_step=st.sampled_from([1, 3, 6]),
    group_size=st.sampled_from([2, 2, 3]),
    max_new_tokens=st.just(40),
    num_ranks=st.integers(1, 2),
    micro_batch_tokens=st.sampled_from([16, 64]),
    filter_zero_variance=st.booleans(),
    max_top_up=st.sampled_from([0.5, 10.0]),
    orchestration=st.builds(
        orchestration_of,
        st.sampled_from(["dora", "dora", "paper"]),
        without=st.lists(st.sampled_from(list(SWITCHES)), max_size=3),
        refill=st.booleans(),
        calls=st.sampled_from(CALLS),
    ),
    watchdog_s=st.just(30.0),
    no_progress_s=st.just(1e9),
    max_attempts=st.integers(1, 3),
    max_episodes=_ROOM,
    eval_prompt_tokens=st.lists(st.integers(1, 5), max_size=4).map(tuple),
    eval_every=st.integers(0, 2),
    max_eval_share=st.sampled_from([0.1, 0.5]),
)


def pick(items: Sequence[Any] | Mapping[Any, Any], index: int) -> Any:
    """One of the items there are; the same index picks the same one."""
    return list(items)[index % len(items)]


def while_running(condition: Any) -> Any:
    """Apply a rule only to a job that has not ended, and only under this condition."""
    return precondition(lambda self: self.outside.outcome is None and condition(self.outside))


class AnyOrder(RuleBasedStateMachine):
    """A job and its surroundings; each rule is one thing that can happen."""

    @initialize(
        job=_JOBS,
        seed=st.integers(0, 2**16),
        num_servers=st.sampled_from([1, 2, 4, 6, 6]),
        prompts=st.one_of(st.none(), st.none(), st.integers(0, 24)),
        up=st.sampled_from([0, 3, 6, 6]),
        calls=st.sampled_from([0.0, 0.0, 0.2, 0.6]),
        adapters=st.booleans(),
    )
    def begin(
        self, job: Settings, seed: int, num_servers: int, prompts: int | None, up: int, calls: float, adapters: bool
    ) -> None:
        job = msgspec.structs.replace(job, adapters=adapters and job.rules.in_flight is None)
        self.outside = Outside(job, seed=seed, num_servers=num_servers, prompts=prompts, calls=calls)
        for instance in list(self.outside.servers)[:up]:
            self.outside.come_up(instance, slots=1 + instance % 3, kv_tokens=300)

    def teardown(self) -> None:
        if hasattr(self, "outside"):
            self.outside.conclude()

    @while_running(lambda o: True)
    @rule(num_events=st.integers(1, 120))
    def work(self, num_events: int) -> None:
        self.outside.work(num_events)

    @while_running(lambda o: o.requests)
    @rule(num_events=st.integers(20, 120))
    def work_while_a_version_has_a_long_tail(self, num_events: int) -> None:
        oldest = min(r.order.version for r in self.outside.requests.values())
        self.outside.work(num_events, stalled=(oldest,))

    @while_running(lambda o: True)
    @rule(num_events=st.integers(1, 60), mishap_share=st.sampled_from([0.03, 0.1, 0.3]))
    def muddle_through(self, num_events: int, mishap_share: float) -> None:
        self.outside.work(num_events, mishap_share=mishap_share)

    # -- requests

    @while_running(lambda o: o.requests)
    @rule(index=_INDEX, num_tokens=st.integers(1, 20))
    def progress(self, index: int, num_tokens: int) -> None:
        t = pick(self.outside.requests, index)
        self.outside.produce(t, num_tokens)
        self.outside.report(self.outside.requests[t].order.instance)

    @while_running(lambda o: o.requests)
    @rule(index=_INDEX, num_tokens=st.integers(0, 20))
    def tokens_that_nobody_has_reported(self, index: int, num_tokens: int) -> None:
        self.outside.produce(pick(self.outside.requests, index), num_tokens)

    @while_running(lambda o: o.requests)
    @rule(index=_INDEX)
    def finish(self, index: int) -> None:
        self.outside.finish(pick(self.outside.requests, index))

    @while_running(lambda o: any(r.stopping for r in o.requests.values()))
    @rule(index=_INDEX, naturally=st.booleans())
    def stop(self, index: int, naturally: bool) -> None:
        t = pick([t for t, r in self.outside.requests.items() if r.stopping], index)
        if naturally:
            self.outside.finish(t)
        else:
            self.outside.stop(t)

    @while_running(lambda o: o.requests)
    @rule(index=_INDEX)
    def stop_that_nobody_asked_for(self, index: int) -> None:
        self.outside.stop(pick(self.outside.requests, index))

    @while_running(lambda o: o.requests)
    @rule(index=_INDEX, how=st.sampled_from(["broken", "refused", "refused for good"]))
    def fail(self, index: int, how: str) -> None:
        t = pick(self.outside.requests, index)
        self.outside.fail(t, server_gone=how == "broken", final=how == "refused for good")

    @while_running(lambda o: o.requests)
    @rule(index=_INDEX)
    def start_call(self, index: int) -> None:
        self.outside.start_call(pick(self.outside.requests, index))

    @while_running(lambda o: o.requests)
    @rule(index=_INDEX)
    def all_requests_of_an_instance_call(self, index: int) -> None:
        instance = self.outside.requests[pick(self.outside.requests, index)].order.instance
        for t in [t for t, r in self.outside.requests.items() if r.order.instance == instance]:
            if t in self.outside.requests and self.outside.outcome is None:
                self.outside.start_call(t)

    @while_running(lambda o: o.calls)
    @rule(index=_INDEX, num_tokens=st.integers(0, 20), ended=st.booleans())
    def end_call(self, index: int, num_tokens: int, ended: bool) -> None:
        self.outside.end_call(pick(self.outside.calls, index), num_tokens=num_tokens, ended=ended)

    @while_running(lambda o: o.calls)
    @rule(index=_INDEX)
    def fail_call(self, index: int) -> None:
        self.outside.end_call(pick(self.outside.calls, index), num_tokens=0, failed="injected")

    @while_running(lambda o: o.grades)
    @rule(index=_INDEX, reward=st.sampled_from([None, 0.0, 0.0, 1.0]))
    def grade(self, index: int, reward: float | None) -> None:
        self.outside.grade(pick(self.outside.grades, index), reward)

    @while_running(lambda o: o.grades)
    @rule(reward=st.sampled_from([None, 1.0]))
    def grade_all_alike(self, reward: float | None) -> None:
        for t in list(self.outside.grades):
            if self.outside.outcome is None:
                self.outside.grade(t, reward)

    # -- servers

    @while_running(lambda o: not all(s.up or i in o.dismissed for i, s in o.servers.items()))
    @rule(index=_INDEX, slots=st.integers(1, 4), kv_tokens=st.sampled_from([30, 100, 400]))
    def come_up(self, index: int, slots: int, kv_tokens: int) -> None:
        down = [i for i, s in self.outside.servers.items() if not s.up and i not in self.outside.dismissed]
        self.outside.come_up(pick(down, index), slots=slots, kv_tokens=kv_tokens)

    @while_running(lambda o: any(not s.up for s in o.servers.values()))
    @rule(index=_INDEX, digest=st.sampled_from([DIGEST, DIGEST, DIGEST, DIGEST[::-1], ""]))
    def take_over(self, index: int, digest: str) -> None:
        self.outside.take_over(pick([i for i, s in self.outside.servers.items() if not s.up], index), digest=digest)

    @while_running(lambda o: any(s.up for s in o.servers.values()))
    @rule(index=_INDEX)
    def lose(self, index: int) -> None:
        self.outside.lose(pick([i for i, s in self.outside.servers.items() if s.up], index))

    @while_running(lambda o: True)
    @rule(index=_INDEX, leave=st.booleans())
    def drain(self, index: int, leave: bool) -> None:
        self.outside.drain(pick(self.outside.servers, index), leave=leave)

    @while_running(lambda o: o.barred)
    @rule(index=_INDEX)
    def recall(self, index: int) -> None:
        self.outside.recall(pick(sorted(self.outside.barred), index))

    @while_running(lambda o: True)
    @rule()
    def evaluate(self) -> None:
        self.outside.evaluate()

    @while_running(lambda o: o.dismissed)
    @rule(index=_INDEX)
    def let_go(self, index: int) -> None:
        self.outside.let_go(pick(sorted(self.outside.dismissed), index))

    @while_running(lambda o: len(o.servers) < 8)
    @rule()
    def join(self) -> None:
        self.outside.join()

    @while_running(lambda o: o.requests)
    @rule(index=_INDEX)
    def long_prefill(self, index: int) -> None:
        instance = self.outside.requests[pick(self.outside.requests, index)].order.instance
        self.outside.deliver(ev.PrefillReported(self.outside.now, instance))

    @while_running(lambda o: any(s.up for s in o.servers.values()))
    @rule(index=_INDEX)
    def press_or_relieve(self, index: int) -> None:
        instance = pick([i for i, s in self.outside.servers.items() if s.up], index)
        self.outside.press(instance, pressed=not self.outside.servers[instance].pressed)

    @while_running(lambda o: o.requests)
    @rule(index=_INDEX)
    def press_all_of_a_version(self, index: int) -> None:
        version = pick(sorted({r.order.version for r in self.outside.requests.values()}), index)
        for instance, server in self.outside.servers.items():
            if server.holds(version) and not server.pressed:
                self.outside.press(instance, pressed=True)

    @while_running(lambda o: o.pushes)
    @rule(index=_INDEX)
    def finish_push(self, index: int) -> None:
        self.outside.finish_push(pick(self.outside.pushes, index))

    @while_running(lambda o: o.pushes)
    @rule(index=_INDEX)
    def fail_push(self, index: int) -> None:
        self.outside.fail_push(pick(self.outside.pushes, index))

    @while_running(lambda o: o.unloads)
    @rule(index=_INDEX)
    def finish_unload(self, index: int) -> None:
        self.outside.finish_unload(pick(self.outside.unloads, index))

    @while_running(lambda o: o.unloads)
    @rule(index=_INDEX)
    def fail_unload(self, index: int) -> None:
        self.outside.fail_unload(pick(self.outside.unloads, index))

    # -- trainer, time, restarts, echoes

    @while_running(lambda o: o.unpublished)
    @rule()
    def publish(self) -> None:
        self.outside.publish()

    @while_running(lambda o: o.may_train())
    @rule()
    def train(self) -> None:
        self.outside.train()

    @while_running(lambda o: o.trainer_step is not None)
    @rule()
    def save_checkpoint(self) -> None:
        self.outside.save_checkpoint()

    @while_running(lambda o: o.starting and o.state.feed.losses < len(RESTART_PAUSES_S))
    @rule(back=st.integers(0, 3))
    def lose_trainer(self, back: int) -> None:
        self.outside.lose_trainer(back=back)

    @while_running(lambda o: len(o.journal) > o.restarted_at + 25)
    @rule(back=st.integers(0, 3), replays=st.booleans())
    def restart_controller(self, back: int, replays: bool) -> None:
        self.outside.restart_controller(back=back, replays=replays)

    @while_running(lambda o: len(o.journal) > o.restarted_at + 25)
    @rule(more_steps=st.integers(0, 2), max_episodes=_ROOM)
    def resume_with_other_settings(self, more_steps: int, max_episodes: int) -> None:
        self.outside.restart_controller(back=0, more_steps=more_steps, max_episodes=max_episodes)

    @rule(seconds=st.sampled_from([0.0, 0.2, 1.0, 4.0, 31.0, 70.0]))
    def tick(self, seconds: float) -> None:
        self.outside.tick(seconds)

    @while_running(lambda o: o.late)
    @rule(index=st.integers(0, 39))
    def repeat(self, index: int) -> None:
        self.outside.repeat(pick(self.outside.echoes(), index))

    @while_running(lambda o: o.echoes_of_the_removed())
    @rule(index=st.integers(0, 39))
    def repeat_of_an_instance_that_has_left(self, index: int) -> None:
        self.outside.repeat(pick(self.outside.echoes_of_the_removed(), index))


def examples(number: int) -> settings:
    return settings(max_examples=number, stateful_step_count=50, suppress_health_check=list(HealthCheck))


class TestAnyOrder(AnyOrder.TestCase):  # type: ignore[misc]
    settings = examples(10)


@pytest.mark.deep
class TestAnyOrderLong(AnyOrder.TestCase):  # type: ignore[misc]
    settings = examples(80)
