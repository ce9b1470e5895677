"""Model policies: 32 hex digits that show what they were trained on, and tokens that show which policy sampled them.

And a model environment, whose answers show which turn of which episode they answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

EOS = 1
POLICY = "policy.txt"  #: file of a version that holds the policy
BASE = "0" * 32  #: policy of version 0
#: Arrays of a micro-batch that its training depends on.
ARRAYS = ("tokens", "loss_mask", "behavior_logprobs", "lengths", "versions", "group_rewards")


def token(policy: str, trajectory: int, place: int) -> int:
    """The token that a policy samples at a position of a sequence."""
    drawn = hashlib.blake2b(f"{policy} {trajectory} {place}".encode(), digest_size=4).digest()
    number = int.from_bytes(drawn, "little")
    return EOS if number % 6 == 0 else 4 + number % 60


def answered(
    episode: int, turn: int, sampled: Sequence[int]
) -> tuple[Literal["observation", "end", "graded", "failed"], list[int], float]:
    """The environment's answer to a turn: the tokens that it appends, which a policy never samples, and its reward.

    "graded": the episode ends, and the task's rewards grade it.
    """
    drawn = hashlib.blake2b(f"{episode} {turn} {[*sampled]}".encode(), digest_size=8).digest()
    kind, reward = drawn[0] % 20, float(drawn[1] & 1)
    if kind < 11:
        return "observation", [2 + (byte & 1) for byte in drawn[2 : 3 + drawn[6] % 3]], reward / 4
    return ("end" if kind < 15 else "graded" if kind < 19 else "failed"), [], reward if kind < 15 else 0.0


def trained(policy: str, waves: bytes) -> str:
    """The policy after training on `waves`."""
    return hashlib.blake2b(policy.encode() + waves, digest_size=16).hexdigest()
