"""Request ids. SGLang aborts by prefix as well as by name (sglang.md §4), so no id may be a prefix of another."""

from __future__ import annotations

import hashlib
import re
from typing import Final

_RID: Final = re.compile(r"[0-9a-f]{8}-([+-]\d{12})-\d{6}")


def request_id(run_id: str, *, trajectory: int, attempt: int) -> str:
    """A fixed-width id: 8 hex digits of the run, the trajectory (evaluation's are negative), the attempt."""
    rid = f"{hashlib.sha256(run_id.encode()).hexdigest()[:8]}-{trajectory:+013d}-{attempt:06d}"
    if len(rid) != 29 or attempt < 0:
        raise ValueError(f"trajectory {trajectory} or attempt {attempt} is too large for a request id")
    return rid


def trajectory_of(rid: str) -> int | None:
    """The trajectory that `request_id` named; None for an id of other making."""
    found = _RID.fullmatch(rid)
    return int(found[1]) if found else None
