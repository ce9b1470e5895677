"""The strategies as settings of the same rules, and the settings a run's decisions depend on.

One controller, one code path: a comparison between strategies compares these few values and nothing else (invariant: no
other module of the core knows a strategy by its name).
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from dora.core.decode_time import DecodeTime
from dora.core.orchestration import Orchestration

#: How a server is paused for weights that reach it among live requests. `retract`: its KV is dropped, and everything
#: is prefilled again under the new weights; `in_place`: the KV of the old weights stays.
Pause = Literal["retract", "in_place"]

#: A trajectory without a token for this many watchdog times, on an instance that serves others, is stopped and goes on
#: elsewhere: after a retraction it may wait behind others, but not for ever.
SILENCE: Final = 3.0

#: Names of all strategies, as users write them.
STRATEGIES: Final = (
    "dora",
    "sync",
    "periodic",
    "one_step_off",
    "partial",
    "partial_bounded",
    "partial_sync",
    "oversample",
)
#: Those that read `max_staleness`; the others fix K.
READS_K: Final = frozenset({"dora", "partial", "partial_bounded"})


class Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What distinguishes one strategy from another."""

    max_staleness: int  #: K
    streamed: bool  #: commit groups as they complete; else when the whole batch has
    batched: bool  #: admit N groups as one block and push only a drained fleet
    in_flight: Pause | None = None  #: weights reach live requests, at once (not C1); None: they wait for empty servers
    bounded: bool = True  #: rule F; False: AReaL's capacity gate, under which K bounds no staleness (not C3)
    oversample: float = 1.0  #: alpha: groups under way in a step, in units of N; the first N complete are trained

    @property
    def discards(self) -> bool:
        """What a step does not take is thrown away (not C2); else, with weights in flight, it goes on."""
        return self.oversample > 1.0 and self.in_flight is None

    @property
    def has_window(self) -> bool:
        """The adaptive window W limits admission: `dora`'s own means against needless staleness."""
        return not self.batched and self.oversample == 1.0 and self.in_flight is None

    @property
    def broken_by_design(self) -> tuple[str, ...]:
        """Constraints that the strategy does without; what it costs them is counted and shown."""
        broken = {"C1": self.in_flight is not None, "C2": self.discards, "C3": not self.bounded}
        return tuple(name for name, is_broken in broken.items() if is_broken)


def rules_of(strategy: str, *, max_staleness: int, pause: Pause = "retract", oversample: float = 1.5) -> Rules:
    """Rules of a strategy by its name; `max_staleness` is read by READS_K, `pause` by all kinds of `partial`."""
    if strategy in _RULES:
        return _RULES[strategy]
    if strategy == "oversample":
        return Rules(max_staleness=0, streamed=True, batched=False, oversample=oversample)
    if strategy == "partial_sync":
        return Rules(
            max_staleness=0, streamed=False, batched=False, in_flight=pause, bounded=False, oversample=oversample
        )
    if strategy in ("partial", "partial_bounded"):
        bounded = strategy == "partial_bounded"
        return Rules(max_staleness=max_staleness, streamed=True, batched=False, in_flight=pause, bounded=bounded)
    return Rules(max_staleness=max_staleness, streamed=True, batched=False)


def strategy_of(rules: Rules) -> str:
    """The name of some rules."""
    if rules.oversample > 1.0:
        return "oversample" if rules.discards else "partial_sync"
    if rules.in_flight is not None:
        return "partial_bounded" if rules.bounded else "partial"
    if rules.batched:
        return "one_step_off"
    if not rules.streamed:
        return "sync"
    return "dora" if rules.max_staleness else "periodic"


#: `dora` with K = 0 is `periodic`, event for event: hence no entry of its own.
_RULES: Final = {
    "sync": Rules(max_staleness=0, streamed=False, batched=False),
    "periodic": Rules(max_staleness=0, streamed=True, batched=False),
    "one_step_off": Rules(max_staleness=1, streamed=False, batched=True),
}


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that decisions depend on besides events; the first record of a journal."""

    rules: Rules
    steps: int  #: T
    groups_per_step: int  #: N
    group_size: int  #: G
    max_new_tokens: int
    num_ranks: int  #: trainer ranks
    micro_batch_tokens: int  #: token budget of one rank's micro-batch
    filter_zero_variance: bool = True
    max_top_up: float = 10.0  #: groups a step may lose to filters and failures, in units of N
    orchestration: Orchestration = Orchestration()
    watchdog_s: float = 120.0  #: without a new token for so long, a trajectory's instance counts as lost
    no_progress_s: float = 300.0  #: without a commit for so long, while work is outstanding, the run fails
    max_attempts: int = 8  #: failed requests of one trajectory, instances lost apart
    max_parallel_pushes: int = 4
    eval_prompt_tokens: tuple[int, ...] = ()  #: prompt lengths of all evaluation samples, in order
    eval_every: int = 0  #: steps between evaluations; 0: only the first and the last version
    max_eval_share: float = 0.1  #: of all slots, while training work could use them
    decode_time: DecodeTime = DecodeTime()
    deterministic: bool = False  #: the trainer makes the same bytes of the same waves: a replay that differs is wrong

    @property
    def max_lag(self) -> int:
        """Most steps that a group may be stale: K, or the whole job where nothing bounds it."""
        return self.rules.max_staleness if self.rules.bounded else self.steps - 1
