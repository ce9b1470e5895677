"""Why no group is admitted: every reason there is, each in a state that has no earlier one."""

from __future__ import annotations

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.admission import Refusal, why_not_admitted
from tests.core.builders import PROMPT, Core, started


def why(core: Core) -> Refusal | None:
    return why_not_admitted(core.state)


def test_before_version_0_is_published() -> None:
    core = Core()
    core.ready()
    assert why(core) is Refusal.NO_VERSION


def test_nothing_refuses_a_group_but_time() -> None:
    """What could be admitted has been, so that some reason is left."""
    core = started(slots=100, kv=10**6)
    assert why(core) in (Refusal.RULE_F, Refusal.WINDOW)


def test_an_empty_prompt_source() -> None:
    core = Core(source=1)
    core.ready()
    core.publish(0)
    core.up(0)
    core.pushed(0, 0)
    assert why(core) is Refusal.NO_PROMPT


def test_the_window_is_full() -> None:
    core = started(max_staleness=3, groups_per_step=2, slots=100, kv=10**6)
    assert core.state.ledger.num_untrained == core.state.window_size == 3
    assert why(core) is Refusal.WINDOW


def test_rule_f() -> None:
    core = started(max_staleness=0, groups_per_step=2, slots=100, kv=10**6)
    assert why(core) is Refusal.RULE_F


def test_the_baseline_comes_first() -> None:
    core = Core(eval_prompt_tokens=(PROMPT,) * 4)
    core.ready()
    core.publish(0)
    core.up(0, slots=3)
    core.pushed(0, 0)
    assert why(core) is Refusal.BASELINE


def test_a_batch_is_in_progress() -> None:
    core = started("one_step_off", groups_per_step=2, slots=100, kv=10**6)
    assert why(core) is Refusal.BLOCK


def test_no_instance_takes_work() -> None:
    core = Core()
    core.ready()
    core.publish(0)
    assert why(core) is Refusal.NO_INSTANCE


def test_every_instance_is_full() -> None:
    core = started(slots=2, groups_per_step=4)
    assert why(core) is Refusal.NO_ROOM


def test_an_ended_run() -> None:
    core = started()
    core.tell(ev.TrainerReady(core.now, 7))
    assert core.of(cmd.FailRun)
    assert why(core) is Refusal.ENDED
