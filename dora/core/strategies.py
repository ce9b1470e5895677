"""The strategies as settings of the same rules (system.md §4), and the settings a run's decisions depend on.

One controller, one code path: a comparison between strategies compares these few values and nothing else.
"""

from __future__ import annotations

from typing import Final

import msgspec

from dora.core.decode_time import DecodeTime
from dora.core.orchestration import Orchestration


class Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What distinguishes one strategy from another."""

    max_staleness: int  #: K
    streamed: bool  #: commit groups as they complete; else when the whole batch has
    batched: bool  #: admit N groups as one block and push only a drained fleet


def rules_of(strategy: str, *, max_staleness: int) -> Rules:
    """Rules of a strategy by its name; `max_staleness` is read by `dora` alone."""
    return _RULES[strategy] if strategy in _RULES else Rules(max_staleness=max_staleness, streamed=True, batched=False)


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
