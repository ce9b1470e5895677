"""Request ids, version labels and names of adapters on servers.

Invariants: no request id is a prefix of another, because a server may stop requests by prefix; a label identifies the
bytes of a version, not only its number, and a server has it only while it is proved to hold them; no two loads of
adapters have the same name.
"""

from __future__ import annotations

import hashlib
from typing import Final

from dora.core.ids import VersionId

#: Label of a server from the beginning of a push until its weights are proved, however long that takes: the push may
#: have failed, or its controller may be gone.
UNCONFIRMED: Final = "unconfirmed"
#: Beginning of the names of all adapters of DORA, of any run.
ADAPTER_PREFIX: Final = "dora-"


def request_id(run_id: str, *, epoch: int, trajectory: int, attempt: int) -> str:
    """Return a fixed-width id: 8 hex digits of the run, epoch, trajectory (negative in evaluations), attempt.

    A server may still run requests of an earlier controller; the epoch tells them apart.
    """
    name = f"{hashlib.sha256(run_id.encode()).hexdigest()[:8]}-{epoch:04d}-{trajectory:+013d}-{attempt:06d}"
    if len(name) != 34 or attempt < 0 or epoch < 0:
        raise ValueError(f"trajectory {trajectory} or attempt {attempt} is too large for a request id")
    return name


def version_label(run_id: str, version: VersionId, *, digest: str) -> str:
    """Return the label of a version's weights and of their KV: `<run id>/<version>-<digest of its bytes>`."""
    return f"{run_id}/{version}-{digest}"


def adapter_name(run_id: str, *, epoch: int, instance: int, attempt: int, version: VersionId) -> str:
    """Return the name of an adapter for one load: that of a controller's start, of an instance, with this attempt."""
    run = hashlib.sha256(run_id.encode()).hexdigest()[:8]
    return f"{ADAPTER_PREFIX}{run}-{epoch:04d}-{instance}-{attempt}-v{version}"


def is_same_run(label: str, other: str) -> bool:
    """Return whether two labels are of one run."""
    return label.rpartition("/")[0] == other.rpartition("/")[0]


def digest_in(label: str) -> str:
    """Return the digest in a label of a version."""
    return label.rpartition("-")[2]


def version_in(label: str, *, run_id: str) -> VersionId | None:
    """Return the version in a label of this run, with any digest; None for other labels."""
    run, _, rest = label.rpartition("/")
    number = rest.partition("-")[0]
    return VersionId(int(number)) if run == run_id and number.isascii() and number.isdecimal() else None
