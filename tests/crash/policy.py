"""Model policies: 32 hex digits that show what they were trained on, and tokens that show which policy sampled them."""

from __future__ import annotations

import hashlib

EOS = 1
POLICY = "model.safetensors"  #: file of a version that holds the policy
BASE = "0" * 32  #: policy of version 0
#: Arrays of a micro-batch that its training depends on.
ARRAYS = ("tokens", "loss_mask", "behavior_logprobs", "lengths", "versions", "group_rewards")


def token(policy: str, trajectory: int, place: int) -> int:
    """The token that a policy samples at a position of a sequence."""
    drawn = hashlib.blake2b(f"{policy} {trajectory} {place}".encode(), digest_size=4).digest()
    number = int.from_bytes(drawn, "little")
    return EOS if number % 6 == 0 else 4 + number % 60


def trained(policy: str, waves: bytes) -> str:
    """The policy after training on `waves`."""
    return hashlib.blake2b(policy.encode() + waves, digest_size=16).hexdigest()
