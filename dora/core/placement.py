"""Placement choices as pure functions: instances per version, and packing an old version onto fewer instances.

Invariant: allotments add up to at most the fleet, and a plan fits the slots and KV of its targets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heapreplace

from dora.core.decode_time import DecodeTime
from dora.core.ids import InstanceId, VersionId
from dora.core.tables import Server, Trajectory

#: Share of KV that plans may fill; the rest is a margin for wrong estimates.
KV_FILL = 0.9
#: Largest factor by which a move may slow down urgent residents of the target.
MAX_SLOWDOWN = 1.10


def kv_floor(*, num_unfinished: int, num_tokens: int, slots: float, kv_tokens: float) -> int:
    """Return the number of average instances that hold an old version's unfinished trajectories without eviction."""
    if not num_unfinished:
        return 0
    return max(1, math.ceil(num_tokens / (KV_FILL * kv_tokens)), math.ceil(num_unfinished / slots))


def allot(
    num_instances: int, *, demand: Mapping[VersionId, float], floors: Mapping[VersionId, int]
) -> dict[VersionId, int]:
    """Return the instances per version: first the floors, then the rest by largest remainder of the demand.

    `demand`, in KV tokens, and `floors` have the same keys in deadline order. If the floors exceed the fleet, the
    earliest deadlines come first.
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


def allot_by_requests(num_instances: int, *, requests: Mapping[VersionId, int]) -> dict[VersionId, int]:
    """Return the paper's allotment (arXiv 2604.26256), round(DP_total · R_w / ΣR), without correcting the rounding."""
    total = sum(requests.values())
    return {version: round(num_instances * count / total) for version, count in requests.items()}


def plan_moves(
    source: Server, targets: Sequence[Server], *, urgent_deadline: int, decode_time: DecodeTime
) -> list[tuple[Trajectory, Server]] | None:
    """Assign each resident of `source` to a target; None if they do not fit or slow down urgent work too much.

    The longest resident comes first, onto the least loaded target. A target with a resident due by `urgent_deadline`
    may become slower by the factor MAX_SLOWDOWN at most.
    """
    open_targets = [_rank(i, num_requests=i.num_requests, kv_load=i.kv_load) for i in targets]
    heapify(open_targets)
    moves: dict[InstanceId, list[Trajectory]] = {}
    plan: list[tuple[Trajectory, Server]] = []
    for t in sorted(source.residents.values(), key=lambda t: (-t.footprint, t.id)):
        while open_targets and not _fits(t, open_targets[0]):
            heappop(open_targets)  # (nearly) full
        if not open_targets:
            return None
        *_, num_requests, kv_load, target = open_targets[0]
        plan.append((t, target))
        moves.setdefault(target.id, []).append(t)
        heapreplace(open_targets, _rank(target, num_requests=num_requests + 1, kv_load=kv_load + t.footprint))
    gaining = [i for i in targets if i.id in moves]
    if any(_slows_down(i, moves[i.id], urgent_deadline=urgent_deadline, decode_time=decode_time) for i in gaining):
        return None
    return plan


#: Share of slots, share of KV, id (which breaks ties); then the number of requests, their KV tokens, the instance.
_Rank = tuple[float, float, InstanceId, int, int, Server]


def _rank(instance: Server, *, num_requests: int, kv_load: int) -> _Rank:
    """Return the sort key of a target with its planned load; the least loaded one comes first."""
    share, kv_share = num_requests / instance.slots, kv_load / instance.kv_tokens
    return share, kv_share, instance.id, num_requests, kv_load, instance


def _fits(trajectory: Trajectory, rank: _Rank) -> bool:
    *_, num_requests, kv_load, target = rank
    return num_requests < target.slots and kv_load + trajectory.footprint <= KV_FILL * target.kv_tokens


def _slows_down(target: Server, gained: Sequence[Trajectory], *, urgent_deadline: int, decode_time: DecodeTime) -> bool:
    """Whether a resident due by `urgent_deadline` becomes slower by more than MAX_SLOWDOWN."""
    before = decode_time.step_s(num_requests=target.num_requests, num_tokens=target.kv_load)
    num_tokens = target.kv_load + sum(t.footprint for t in gained)
    after = decode_time.step_s(num_requests=target.num_requests + len(gained), num_tokens=num_tokens)
    if after <= MAX_SLOWDOWN * before:
        return False
    return any(t.group is not None and t.group.deadline <= urgent_deadline for t in target.residents.values())
