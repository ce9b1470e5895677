"""The audit of lineage: every step, version and checkpoint has the same history of trained tokens.

A chain is a digest of everything trained up to a step. Invariant: it identifies one history, so a replayed step,
version or checkpoint must have the original's chain. The bytes of a replayed version are compared with the original's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.training import KEPT_CHECKPOINTS
from dora.core.versions import digest_of
from dora.journal.audit_tables import AuditTables

LINEAGE: Final = "lineage"


def _on_step_trained(t: AuditTables, event: ev.StepTrained) -> None:
    known = t.chains.setdefault(event.step, event.chain)
    if event.chain != known:
        t.find(LINEAGE, "step", event.step, f"is trained again with chain {event.chain}; it had {known}")


def _on_version_published(t: AuditTables, event: ev.VersionPublished) -> None:
    version = event.version
    expected = t.chains.get(version - 1, event.chain)
    if event.chain != expected:
        t.find(LINEAGE, "version", version, f"has chain {event.chain}; step {version} has {expected}")
    is_other = event.files != t.published.setdefault(version, event.files)
    if is_other and version in t.stored:
        t.find(LINEAGE, "version", version, "is published again with other bytes, which are served")
    elif is_other or event.differs:  # if it was released, there may be no copy with which the trainer compares it
        t.replays_differ += 1
        if t.settings.deterministic:
            checksum = event.differs or digest_of(event.files)
            t.find(LINEAGE, "version", version, f"is recomputed with other bytes: checksum {checksum}")


def _on_checkpoint_saved(t: AuditTables, event: ev.CheckpointSaved) -> None:
    expected = t.chains.get(event.step - 1, event.chain)
    if event.chain != expected:
        t.find(LINEAGE, "step", event.step, f"follows a checkpoint with chain {event.chain}; expected {expected}")
    t.checkpoints.add(event.step)


def _drop_checkpoint(t: AuditTables, order: cmd.DropCheckpoint) -> None:
    newer = sum(step > order.step for step in t.checkpoints)
    if order.step not in t.checkpoints or newer < KEPT_CHECKPOINTS:
        t.find(LINEAGE, "step", order.step, f"loses its checkpoint, but only {newer} newer ones are kept")
    t.checkpoints.discard(order.step)


HANDLERS: Final[dict[type, Callable[[AuditTables, Any], None]]] = {
    ev.StepTrained: _on_step_trained,
    ev.VersionPublished: _on_version_published,
    ev.CheckpointSaved: _on_checkpoint_saved,
    cmd.DropCheckpoint: _drop_checkpoint,
}
