"""Placement choices as functions of data (system.md §5.2, §5.3): how many instances each version deserves, and
whether what is left of an old version can be packed onto fewer of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dora.core.decode_time import DecodeTime
from dora.core.groups import Trajectory
from dora.core.instances import Instance

#: KV is filled to this share by plans, so that estimates may be wrong by the rest.
KV_FILL = 0.9
#: A move may slow the target's urgent residents down by this factor.
MAX_SLOWDOWN = 1.10


def kv_floor(*, num_unfinished: int, num_tokens: int, slots: int, kv_tokens: int) -> int:
    """Fewest instances that hold an old version's unfinished trajectories without eviction; 0 if it needs none."""
    if not num_unfinished:
        return 0
    return max(1, math.ceil(num_tokens / (KV_FILL * kv_tokens)), math.ceil(num_unfinished / slots))


def allot(num_instances: int, *, demand: Mapping[int, float], floors: Mapping[int, int]) -> dict[int, int]:
    """Instances per version: floors first, then the rest by largest remainder over demand in tokens of KV.

    `demand` and `floors` have the same keys, in deadline order; if the floors exceed the fleet, earliest first.
    """
    given = dict.fromkeys(demand, 0)
    left = num_instances
    for version, floor in floors.items():
        given[version] = min(floor, left)
        left -= given[version]
    total = sum(demand.values())
    if left <= 0 or total <= 0:
        return given
    ideal = {v: num_instances * d / total for v, d in demand.items()}
    missing = {v: max(0.0, ideal[v] - given[v]) for v in demand}
    scale = left / sum(missing.values()) if sum(missing.values()) > 0 else 0.0
    shares = {v: m * scale for v, m in missing.items()}
    for version, share in shares.items():
        given[version] += int(share)
    left -= sum(int(s) for s in shares.values())
    by_remainder = sorted(shares, key=lambda v: (int(shares[v]) - shares[v], -v))
    for version in by_remainder[:left]:
        given[version] += 1
    return given


def plan_moves(
    source: Instance, targets: Sequence[Instance], *, urgent_deadline: int, decode_time: DecodeTime
) -> list[tuple[Trajectory, Instance]] | None:
    """Where each resident of `source` goes, or None if the move does not fit or slows urgent work down too much.

    Longest first onto the least loaded target of the same version. A target with a resident due by
    `urgent_deadline` may get slower by MAX_SLOWDOWN at most.
    """
    requests = {i.id: len(i.residents) + len(i.reserved) for i in targets}
    kv_load = {i.id: i.kv_load for i in targets}
    gained = {i.id: 0 for i in targets}
    plan: list[tuple[Trajectory, Instance]] = []
    for t in sorted(source.residents.values(), key=lambda t: (-t.footprint, t.id)):
        open_targets = [
            i for i in targets if requests[i.id] < i.slots and kv_load[i.id] + t.footprint <= KV_FILL * i.kv_tokens
        ]
        if not open_targets:
            return None
        target = min(open_targets, key=lambda i: (requests[i.id] / i.slots, kv_load[i.id] / i.kv_tokens, i.id))
        requests[target.id] += 1
        kv_load[target.id] += t.footprint
        gained[target.id] += t.num_prompt_tokens + t.num_tokens
        plan.append((t, target))
    for i in targets:
        if not any(t.group is not None and t.group.deadline <= urgent_deadline for t in i.residents.values()):
            continue
        num_tokens = i.num_tokens
        before = decode_time.step_s(num_requests=len(i.residents) + len(i.reserved), num_tokens=num_tokens)
        after = decode_time.step_s(num_requests=requests[i.id], num_tokens=num_tokens + gained[i.id])
        if after > MAX_SLOWDOWN * before:
            return None
    return plan
