"""Request ids. SGLang aborts by prefix as well as by name (sglang.md §4), so no id may be a prefix of another."""

from __future__ import annotations

import hashlib


def request_id(run_id: str, *, trajectory: int, attempt: int) -> str:
    """A fixed-width id: 8 hex digits of the run, the trajectory (evaluation's are negative), the attempt."""
    rid = f"{hashlib.sha256(run_id.encode()).hexdigest()[:8]}-{trajectory:+013d}-{attempt:06d}"
    if len(rid) != 29 or attempt < 0:
        raise ValueError(f"trajectory {trajectory} or attempt {attempt} is too large for a request id")
    return rid
