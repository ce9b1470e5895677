"""The strategies as values of `Rules`, and the settings that decisions depend on.

Invariant: no other module of the core knows a strategy by its name, so that strategies differ in these values only.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from dora.core.decode_time import DecodeTime
from dora.core.orchestration import Orchestration

#: How a server is paused for an update in flight. `retract`: its KV is dropped, and all requests are prefilled again
#: under the new weights; `in_place`: the KV of the old weights is kept.
Pause = Literal["retract", "in_place"]

#: Number of watchdog times without a token after which a trajectory is moved, although others on its instance get
#: tokens. One would be too few: after a retraction the server may queue the request behind others for a while.
SILENCE: Final = 3.0

#: Upper limits of settings that determine how much the state holds. Runs have hundreds at most.
MAX_STALENESS: Final = 1 << 16
MAX_GROUP_SIZE: Final = 1 << 16
MAX_RANKS: Final = 1 << 16

#: Names of all strategies.
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


class Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The differences between strategies."""

    max_staleness: int  #: K
    streamed: bool  #: commit groups as they complete; else N at a time
    batched: bool  #: admit N groups as one batch, and push only while no group is unfinished
    in_flight: Pause | None = None  #: update live requests at once (breaks C1); None: push to empty instances
    bounded: bool = True  #: rule F; False: AReaL's capacity gate, under which K does not bound staleness (breaks C3)
    oversample: float = 1.0  #: alpha: groups in progress per step, in units of N; the first N complete are trained

    @property
    def discards(self) -> bool:
        """Whether surplus groups are discarded when the step closes (breaks C2). With updates in flight they stay."""
        return self.oversample > 1.0 and self.in_flight is None

    @property
    def spreads(self) -> bool:
        """Whether siblings go to different servers: a step waits for all groups, and siblings have similar lengths."""
        return not self.streamed

    @property
    def has_window(self) -> bool:
        """Whether the adaptive window W limits admission, which avoids needless staleness (`dora` only)."""
        return not self.batched and self.oversample == 1.0 and self.in_flight is None

    @property
    def num_adapters(self) -> int:
        """Versions that a server of adapters holds side by side: the K + 1 that may be live, the one under evaluation,
        and one that is being unloaded while the next is loaded."""
        return self.max_staleness + 3

    @property
    def broken_by_design(self) -> tuple[str, ...]:
        """Constraints that the strategy does not keep; violations are counted and shown."""
        broken = {"C1": self.in_flight is not None, "C2": self.discards, "C3": not self.bounded}
        return tuple(name for name, is_broken in broken.items() if is_broken)


def rules_of(strategy: str, *, max_staleness: int, pause: Pause = "retract", oversample: float = 1.5) -> Rules:
    """Return the rules of a strategy.

    `max_staleness` applies to `dora`, `partial` and `partial_bounded`; `pause` to all kinds of `partial`.
    """
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
    """Return the name of the strategy with these rules."""
    if rules.oversample > 1.0:
        return "oversample" if rules.discards else "partial_sync"
    if rules.in_flight is not None:
        return "partial_bounded" if rules.bounded else "partial"
    if rules.batched:
        return "one_step_off"
    if not rules.streamed:
        return "sync"
    return "dora" if rules.max_staleness else "periodic"


#: `periodic` is `dora` with K = 0, event for event.
_RULES: Final = {
    "sync": Rules(max_staleness=0, streamed=False, batched=False),
    "periodic": Rules(max_staleness=0, streamed=True, batched=False),
    "one_step_off": Rules(max_staleness=1, streamed=False, batched=True),
}


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything besides events that decisions depend on; part of a journal's first record."""

    rules: Rules
    steps: int  #: T; 0: version 0 is evaluated, and nothing is trained
    groups_per_step: int  #: N
    group_size: int  #: G
    max_new_tokens: int
    num_ranks: int  #: parts of a wave: trainer ranks, or groups that divide sequences, with which the run began
    micro_batch_tokens: int  #: token budget of such a part
    updates: int = 1  #: M: optimizer updates of a step; it divides N
    shared_prompts: bool = False  #: the trainer computes the prompt of siblings on one rank once
    filter_zero_variance: bool = True
    max_top_up: float = 10.0  #: filtered and failed groups allowed per step, in units of N
    orchestration: Orchestration = Orchestration()
    watchdog_s: float = 120.0  #: time without a new token after which an instance with requests counts as lost
    no_progress_s: float = 300.0  #: time without progress, while work is outstanding, after which the run fails
    call_limit_s: float = 0.0  #: longest time of a call of an environment, by which calls extend no_progress_s
    max_episodes: int = 0  #: unfinished trajectories for which environments have room; 0: any number
    max_attempts: int = 8  #: requests of one trajectory that may fail, not counting lost instances
    eval_prompt_tokens: tuple[int, ...] = ()  #: prompt lengths of all evaluation samples, in order
    eval_every: int = 0  #: steps between evaluations; 0: only the first and the last version
    max_eval_share: float = 0.1  #: share of all slots for samples, while training could use the slots
    decode_time: DecodeTime = DecodeTime()
    prefill_s_per_token: float = 5e-5  #: time to prefill the context of a trajectory again after a call
    own_prompts: bool = False  #: a trajectory begins with a call, which returns its prompt; that of its group is empty
    adapters: bool = False  #: versions are adapters, which a server serves side by side; else each is a full model
    deterministic: bool = False  #: the trainer writes the same bytes for the same waves, so a replay may not differ

    @property
    def is_possible(self) -> bool:
        """Whether a run can have these settings: the divisors, and those that determine how much the state holds."""
        counts = (self.groups_per_step, self.max_new_tokens, self.micro_batch_tokens, self.updates)
        return (
            self.steps >= 0
            and min(counts) >= 1
            and self.groups_per_update >= 1
            and 1 <= self.group_size <= MAX_GROUP_SIZE
            and 1 <= self.num_ranks <= MAX_RANKS
            and 0 <= self.rules.max_staleness <= MAX_STALENESS
            and not (self.adapters and self.rules.in_flight)
        )

    @property
    def num_holdings(self) -> int:
        """Versions that a server holds side by side: one, or several adapters."""
        return self.rules.num_adapters if self.adapters else 1

    @property
    def groups_per_update(self) -> int:
        """N / M."""
        return self.groups_per_step // self.updates

    @property
    def max_lag(self) -> int:
        """Largest staleness of a group: K, or the whole job if K does not bound it."""
        return self.rules.max_staleness if self.rules.bounded else self.steps - 1
