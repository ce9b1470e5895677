"""What requests name on a server, and what its answers then prove: the label of the version whose weights it has or,
with adapters, the name of an adapter beside the weights with which it came up.

Invariant: a request names an adapter only if that load of it was confirmed and its unload was not ordered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dora.controller.published import Published
from dora.core.ids import FOREIGN_VERSION, InstanceId, VersionId
from dora.engine.names import adapter_name


@dataclass(frozen=True)
class ServedWeights:
    """Servers of full weights."""

    published: Published

    def adapter(self, instance: InstanceId, version: VersionId) -> str | None:
        """Return the adapter that a request under `version` names; None: the server's own weights."""
        return None

    def version_of(self, label: str, *, instance: InstanceId, version: VersionId) -> VersionId:
        """Return the version of tokens that a server has reported with this label, for a request under `version`."""
        return self.published.version_of(label)


@dataclass(frozen=True)
class ServedAdapters:
    """Servers that hold adapters. A label is that of the model's weights, and shows that they were not replaced. The
    adapter that answered is taken to be the one that was requested (docs/STALENESS.md)."""

    run_id: str
    epoch: int  # of the controller
    labels: Mapping[InstanceId, str]  # of the weights with which each server came up
    loaded: dict[tuple[InstanceId, VersionId], str] = field(default_factory=dict)  #: names of confirmed loads

    def name(self, instance: InstanceId, attempt: int, version: VersionId) -> str:
        """Return the name of a load."""
        return adapter_name(self.run_id, epoch=self.epoch, instance=instance, attempt=attempt, version=version)

    def adapter(self, instance: InstanceId, version: VersionId) -> str | None:
        return self.loaded[instance, version]

    def version_of(self, label: str, *, instance: InstanceId, version: VersionId) -> VersionId:
        return version if label == self.labels.get(instance) else FOREIGN_VERSION


Served = ServedWeights | ServedAdapters
