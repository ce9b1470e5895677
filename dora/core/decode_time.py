"""The duration of a decoding step as a function of batch size and resident tokens (docs/SIMULATION.md).

Shared by placement, the simulator and the paced servers, so that differences between them have other causes.
"""

from __future__ import annotations

import msgspec


class DecodeTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """t = base + per_request · b + per_token · resident tokens, in seconds per decoding step."""

    base_s: float = 2e-3
    per_request_s: float = 5e-5
    per_token_s: float = 1e-7

    def step_s(self, *, num_requests: int, num_tokens: int) -> float:
        """Return the seconds for one token of each of `num_requests` requests with `num_tokens` in KV in total."""
        return self.base_s + self.per_request_s * num_requests + self.per_token_s * num_tokens
