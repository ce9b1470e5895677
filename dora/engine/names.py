"""What requests and versions are called on servers.

Invariant: no request id is a prefix of another, since a server may stop requests by prefix; and a label names the bytes
of a version, not its number alone.
"""

from __future__ import annotations

import hashlib
from typing import Final

from dora.core.ids import VersionId

_DIGITS: Final = 8


def request_id(run_id: str, *, epoch: int, trajectory: int, attempt: int) -> str:
    """A fixed-width id: 8 hex digits of the run, the controller's epoch, the trajectory (evaluation's are negative),
    the attempt. A server may still be at the requests of a controller that died, so its epoch keeps them apart."""
    name = f"{hashlib.sha256(run_id.encode()).hexdigest()[:8]}-{epoch:04d}-{trajectory:+013d}-{attempt:06d}"
    if len(name) != 34 or attempt < 0 or epoch < 0:
        raise ValueError(f"trajectory {trajectory} or attempt {attempt} is too large for a request id")
    return name


def version_label(run_id: str, version: VersionId, *, checksum: str) -> str:
    """Label of a version's weights and of the KV made with them: `<run id>/<version>-<digest of its bytes>`."""
    return f"{run_id}/{version}-{checksum[:_DIGITS]}"


def version_in(label: str, *, run_id: str) -> VersionId | None:
    """The version that a label of this run names, whatever its digest; None for any other label."""
    run, _, rest = label.rpartition("/")
    number = rest.partition("-")[0]
    return VersionId(int(number)) if run == run_id and number.isascii() and number.isdecimal() else None
