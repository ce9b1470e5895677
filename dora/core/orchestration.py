"""Which of the orchestrator's rules are on (system.md §5): all of ours, ours without some, or the paper's own.

Invariant: none of them touches C1, C2 or C3. Rule F and the liveness rules hold whatever is chosen; these cost or save
time alone, and `dora simulate --without` shows how much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec


class Orchestration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One switch per rule; `refill` is the only one that is not on by itself."""

    streaming: bool = True  #: commit groups as they complete; else a step when all of its groups have
    kv_floor: bool = True  #: instances by tokens of KV over floors; else by requests alone, rounded (the paper's rule)
    consolidation: bool = True  #: pack what is left of an old version onto fewer instances
    adaptive_window: bool = True  #: W; else F alone bounds admission
    tail_care: bool = True  #: spread a new version over its instances; never slow urgent answers down to pack
    hysteresis: bool = True  #: pack only when the newest version has no room left
    refill: bool = False  #: let instances of old versions receive new prompts


#: What `without` may name.
SWITCHES: Final = tuple(name for name in Orchestration.__struct_fields__ if name != "refill")
#: As far as it is published (arXiv 2604.26256): allotment by requests, migration, refilled old versions.
PAPER: Final = Orchestration(kv_floor=False, adaptive_window=False, tail_care=False, hysteresis=False, refill=True)


def orchestration_of(rules: str, *, without: Sequence[str] = (), refill: bool = False) -> Orchestration:
    """The rules by their name, `dora` or `paper`, less those that are switched off."""
    chosen = PAPER if rules == "paper" else Orchestration(refill=refill)
    return msgspec.structs.replace(chosen, **dict.fromkeys(without, False))
