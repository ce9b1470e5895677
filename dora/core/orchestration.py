"""Which of the orchestrator's rules are on (docs/SIMULATION.md): all of ours, ours without some, or the paper's own.

Invariant: none of them touches C1, C2 or C3. Rule F and the liveness rules hold whatever is chosen; these cost or save
time and staleness alone, and `dora simulate --ablate` shows how much. `rollout.rules`,
`rollout.without` and workload files name them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec


class Orchestration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One switch per rule; `refill` is the only one that is not on by itself."""

    streaming: bool = True  #: commit groups as they complete; else a step when all of its groups have
    kv_floor: bool = True  #: instances by tokens of KV over floors; else by requests alone, rounded (the paper's rule)
    kv_overcommit: bool = (
        True  #: keep KV for a share of what answers are expected to grow by; else (and with K = 0) for all of it
    )
    consolidation: bool = True  #: pack what is left of an old version onto fewer instances
    window: Literal["adaptive", "fixed", "open"] = "adaptive"  #: W; or always what it starts with; or F alone
    tail_care: bool = True  #: spread a new version over its instances; never slow urgent answers down to pack
    hysteresis: bool = True  #: pack only when the newest version has no room left
    refill: bool = False  #: let instances of old versions receive new prompts


#: What `without` may name, and what each of them changes.
SWITCHES: Final[dict[str, dict[str, bool | str]]] = {
    "streaming": {"streaming": False},
    "kv_floor": {"kv_floor": False},
    "kv_overcommit": {"kv_overcommit": False},
    "consolidation": {"consolidation": False},
    "adaptive_window": {"window": "open"},
    "tail_care": {"tail_care": False},
    "hysteresis": {"hysteresis": False},
}
#: The paper's (arXiv 2604.26256), as far as it tells them: allotment by requests, migration, refilled old versions. How
#: many requests may be live it does not tell; W fixed at 1.5 N reproduces its step times (docs/SIMULATION.md).
PAPER: Final = Orchestration(
    kv_floor=False, kv_overcommit=False, window="fixed", tail_care=False, hysteresis=False, refill=True
)


def orchestration_of(rules: str, *, without: Sequence[str] = (), refill: bool = False) -> Orchestration:
    """The rules by their name, `dora` or `paper`, less those that are switched off."""
    chosen = PAPER if rules == "paper" else Orchestration(refill=refill)
    changes: dict[str, bool | str] = {}
    for name in without:
        changes |= SWITCHES[name]
    return msgspec.structs.replace(chosen, **changes)
