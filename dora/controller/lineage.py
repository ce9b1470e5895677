"""Lineage: a digest of everything that the weights were trained on.

chain(s) = H(chain(s - 1), the settings that affect the model, the waves of step s as sent); chain(-1) = H(the model).
Invariant: equal chains mean equal histories. Every wave has the chain before its step, which the trainer compares with
the chain of its weights; the last wave of a step also has the chain after the step, and so have the version, the
checkpoint and the StepTrained of the step. A step that is trained again must result in the same chain.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec
import numpy as np

from dora.core.ids import StepId
from dora.errors import RunFailed
from dora.transport.messages import MicroBatch

_DIGEST_BYTES = 16


class Lineage:
    """The chains of one run."""

    def __init__(self, *, base: str, settings: bytes, trained: Mapping[StepId, str]) -> None:
        """`base`: chain before step 0. `trained`: journaled chains by step."""
        self.base = base
        self._settings = settings
        self._trained = dict(trained)
        self._chains: dict[StepId, str] = {}  # by step, of the waves that this controller has sent
        self._digest = hashlib.blake2b()  # of the step whose waves are being added

    def before(self, step: StepId) -> str:
        """Return the chain before a step."""
        if step == 0:
            return self.base
        earlier = StepId(step - 1)
        chain = self._chains.get(earlier) or self._trained.get(earlier)
        if chain is None:
            raise RunFailed(f"step {step + 1} cannot be trained: the chain of step {step} is unknown")
        return chain

    def after(self, step: StepId) -> str:
        """Return the chain after a step."""
        return self.before(StepId(step + 1))

    def add(self, wave: list[MicroBatch]) -> list[MicroBatch]:
        """Return the next wave with its chains. Waves come in order, and each step begins with its first wave."""
        first = wave[0]
        parent = self.before(first.step)
        if first.index == 0:
            self._digest = hashlib.blake2b(parent.encode() + self._settings, digest_size=_DIGEST_BYTES)
        for batch in wave:
            _digest_batch(self._digest, batch)
        chain = self._close(first.step) if first.last else ""
        return [msgspec.structs.replace(batch, parent=parent, chain=chain) for batch in wave]

    def _close(self, step: StepId) -> str:
        chain = self._digest.hexdigest()
        known = self._trained.setdefault(step, chain)
        if chain != known:
            raise RunFailed(
                f"step {step + 1} would be trained again on different data (chain {chain}, previously {known}): "
                "the journal, the token store, the data or a setting has changed"
            )
        self._chains[step] = chain
        return chain


def base_chain(model_digest: str) -> str:
    """Return the chain before step 0."""
    return hashlib.blake2b(b"dora " + model_digest.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _digest_batch(digest: hashlib.blake2b, batch: MicroBatch) -> None:
    """Add all fields but `parent` and `chain` to the digest, arrays as little-endian bytes."""
    for name in batch.__struct_fields__:
        value = getattr(batch, name)
        if isinstance(value, np.ndarray):
            little = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("<"))
            digest.update(f"{name} {value.shape} ".encode())
            digest.update(little.data if little.size else b"")
        elif name not in ("parent", "chain"):
            digest.update(f"{name} {int(value)} ".encode())
