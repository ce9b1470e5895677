"""Lineage: a digest of everything that a step's weights were trained on.

chain(s) = H(chain(s - 1), the settings that affect the model, the waves of step s as sent), and before step 0 H(the
model). Invariant: equal chains mean equal histories. Every wave names the chain before its step, which the trainer
compares with that of its weights, and the last wave of a step the one with it; versions and checkpoints carry it, the
journal records it with StepTrained. A step that is trained again must come to the chain that it had.
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
        """`base`: chain before step 0. `trained`: chains by step, as far as the journal knows."""
        self.base = base
        self._settings = settings
        self._trained = dict(trained)
        self._chains: dict[StepId, str] = {}  # of the steps whose waves were sent by this controller
        self._step = -1  # whose waves are being added
        self._digest = hashlib.blake2b()

    def before(self, step: StepId) -> str:
        """The chain of the weights that step trains."""
        if step == 0:
            return self.base
        earlier = StepId(step - 1)
        chain = self._chains.get(earlier) or self._trained.get(earlier)
        if chain is None:
            raise RunFailed(f"step {step} follows a step of which nothing is known")
        return chain

    def after(self, step: StepId) -> str:
        """The chain with that step."""
        return self.before(StepId(step + 1))

    def add(self, wave: list[MicroBatch]) -> list[MicroBatch]:
        """The next wave, marked with its place in the history. Waves come in order, and a step's from its first."""
        first = wave[0]
        parent = self.before(first.step)
        if first.index == 0:
            self._step = first.step
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
                f"step {step} would be trained again on other data than the first time (chain {chain}, it was "
                f"{known}): the journal, the token store or the data is not what it was"
            )
        self._chains[step] = chain
        return chain


def base_chain(model_digest: str) -> str:
    """The chain before step 0."""
    return hashlib.blake2b(b"dora " + model_digest.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _digest_batch(digest: hashlib.blake2b, batch: MicroBatch) -> None:
    """Every field but the two that the chain itself fills in, arrays as little-endian bytes."""
    for name in batch.__struct_fields__:
        value = getattr(batch, name)
        if isinstance(value, np.ndarray):
            little = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("<"))
            digest.update(f"{name} {value.shape} ".encode())
            digest.update(little.data if little.size else b"")
        elif name not in ("parent", "chain"):
            digest.update(f"{name} {int(value)} ".encode())
