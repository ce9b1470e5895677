"""Switches for the orchestrator's rules (docs/SIMULATION.md): DORA's own, without some of them, or another system's.

Runs have the defaults; workload files choose others. Invariant: C1, C2, C3 and liveness hold with any of them; they
change only time and staleness, and `dora simulate --ablate` shows by how much.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import msgspec

#: What a trajectory holds during a call of its environment. `keep`: its slot and KV. `pinned`: its slot and KV for as
#: long as a prefill would cost, then nothing; but the version's last instance stays with the version. `release`: as
#: `pinned`, but after a while the version's last instance may serve another version.
Calls = Literal["keep", "pinned", "release"]


class Orchestration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One switch per rule; all but `refill` are on by default."""

    streaming: bool = True  #: commit groups as they complete; else all groups of a step together
    kv_floor: bool = True  #: allot instances by KV tokens, with floors; else by requests, rounded (the paper's rule)
    kv_overcommit: bool = True  #: reserve KV for a share of the expected growth; else (and in `periodic`) for all of it
    consolidation: bool = True  #: pack the remaining requests of an old version onto fewer instances
    window: Literal["adaptive", "fixed", "open"] = "adaptive"  #: W adapts, or keeps its initial size; open: F alone
    tail_care: bool = True  #: spread a new version over its instances; never slow urgent answers down by packing
    hysteresis: bool = True  #: pack only when the newest version has no room left
    calls: Calls = "release"  #: what a trajectory holds during a call of its environment
    refill: bool = False  #: admit new prompts under old versions


#: The names that `without` accepts, each with its changes.
SWITCHES: Final[dict[str, dict[str, bool | str]]] = {
    "streaming": {"streaming": False},
    "kv_floor": {"kv_floor": False},
    "kv_overcommit": {"kv_overcommit": False},
    "consolidation": {"consolidation": False},
    "adaptive_window": {"window": "open"},
    "tail_care": {"tail_care": False},
    "hysteresis": {"hysteresis": False},
}
#: The paper's rules (arXiv 2604.26256) as far as it states them: allotment by requests, migration, refill. It does not
#: state how many requests may be live; W fixed at 1.5 N reproduces its step times (docs/DECISIONS.md).
PAPER: Final = Orchestration(
    kv_floor=False, kv_overcommit=False, window="fixed", tail_care=False, hysteresis=False, refill=True
)
#: PSRL's rules (arXiv 2601.12784), as far as switches express them: each group reserves the last step that it may join,
#: which is F alone; whole batches; new prompts for any version that may still take them; requests stay where they are.
PSRL: Final = Orchestration(streaming=False, consolidation=False, window="open", refill=True)
#: AReaL's rules (arXiv 2505.24298): whole batches. The rest is the strategy `partial`.
AREAL: Final = Orchestration(streaming=False)
#: Rules of other systems by the names that `job.rules` accepts beside `dora`.
NAMED: Final = {"paper": PAPER, "psrl": PSRL, "areal": AREAL}
#: All names that `job.rules` accepts.
RULES: Final = ("dora", *NAMED)


class Named(NamedTuple):
    """The arguments with which `orchestration_of` returns some rules."""

    rules: str
    without: tuple[str, ...]
    refill: bool
    calls: Calls


def named(orchestration: Orchestration) -> Named:
    """Return the names of these rules, with as few switched off as possible; LookupError if they have none."""
    for count in range(len(SWITCHES) + 1):
        for without in itertools.combinations(SWITCHES, count):
            for rules, refill in itertools.product(RULES, (False, True)):
                found = Named(rules, without, refill, orchestration.calls)
                if orchestration_of(rules, without=without, refill=refill, calls=found.calls) == orchestration:
                    return found
    raise LookupError(f"no rules have these switches: {orchestration}")


def orchestration_of(
    rules: str, *, without: Sequence[str] = (), refill: bool = False, calls: Calls = "release"
) -> Orchestration:
    """Return the rules with this name, without those that are switched off."""
    chosen = NAMED.get(rules) or Orchestration(refill=refill)
    changes = {key: value for name in without for key, value in SWITCHES[name].items()}
    return msgspec.structs.replace(chosen, calls=calls, **changes)
