"""Whether a server computes the log-probs that the weights of a version give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dora.errors import RemoteError

#: Maximum difference of log-probs under the same weights, by dtype. With bfloat16 the comparison detects weights of
#: mixed versions, but not always the weights of an adjacent version.
TOLERANCE: Final = {"float32": 1e-3, "bfloat16": 5e-2}


def require_close(found: Sequence[float], expected: Sequence[float], *, dtype: str, under: str) -> None:
    """Raise RemoteError unless these are the log-probs under the weights or the adapter that `under` names."""
    if len(found) != len(expected):
        raise RemoteError(f"{len(found)} log-probs, expected {len(expected)}")
    differences = [abs(a - b) for a, b in zip(found, expected, strict=True)]
    if not all(difference <= TOLERANCE[dtype] for difference in differences):  # NaN also fails
        worst = f"{max(differences):.1e} from those under {under}"
        raise RemoteError(f"the log-probs differ by up to {worst} (limit {TOLERANCE[dtype]:g})")
