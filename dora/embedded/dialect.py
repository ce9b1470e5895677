"""The differences between the releases of SGLang that the embedded engine can imitate (docs/SGLANG.md).

Handlers read these facts and never compare versions. `dora serve --dialect` chooses a release. All but the default are
for tests, which show that the client works with each release.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from dora.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    version: str
    has_spans: bool = True  # `weight_versions` in the last chunk; `weight_version` is always there
    has_ready: bool = True  # GET /ready
    has_get_load: bool = False  # GET /get_load, which /v1/loads replaced
    has_update_gate: bool = True  # tensor and distributed updates are refused outside begin_ and end_weight_update
    #: A paused server flushes even if requests (such as retracted ones) are queued. False: the queue must be empty.
    flushes_over_queue: bool = True
    #: An update that cannot flush changes the weights, keeps the label and answers 400. False: the server dies.
    outlives_failed_flush: bool = True
    #: 400 `{"error": "<text>"}`. False: 500, plain text.
    names_unknown_sampling_key: bool = True
    #: Adapters are served. Older releases have routes for them too, which were not read.
    has_adapters: bool = True
    #: The choice of experts is returned. Older releases have the field too, but were not read.
    returns_experts: bool = True


_V23 = Dialect(version="0.5.23")
_V22 = replace(_V23, version="0.5.22", has_adapters=False, returns_experts=False)
_V21 = replace(_V22, version="0.5.21", outlives_failed_flush=False, names_unknown_sampling_key=False)
_V20 = replace(_V21, version="0.5.20", has_update_gate=False, flushes_over_queue=False, has_get_load=True)
_V18 = replace(_V20, version="0.5.18", has_spans=False, has_ready=False)

DIALECTS: Final = {dialect.version: dialect for dialect in (_V18, _V20, _V21, _V22, _V23)}
DEFAULT_DIALECT: Final = _V20.version


def dialect_of(version: str) -> Dialect:
    if (dialect := DIALECTS.get(version)) is None:
        raise ConfigError(f"dialect: unknown release '{version}'; choose one of {', '.join(DIALECTS)}")
    return dialect
