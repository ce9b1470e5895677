"""How long one decoding step takes, from batch size and resident tokens (docs/SIMULATION.md).

Placement, the simulator and the paced servers share it, so that a disagreement between them has another cause.
"""

from __future__ import annotations

import msgspec


class DecodeTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """t = base + per_request · b + per_token · resident tokens, in seconds per decoding step."""

    base_s: float = 2e-3
    per_request_s: float = 5e-5
    per_token_s: float = 1e-7

    def step_s(self, *, num_requests: int, num_tokens: int) -> float:
        """Seconds for one token of each of `num_requests` that hold `num_tokens` in KV together."""
        return self.base_s + self.per_request_s * num_requests + self.per_token_s * num_tokens
