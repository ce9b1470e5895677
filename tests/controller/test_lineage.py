"""Lineage: equal chains mean equal histories, and a step that is trained again has the history that it had."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from dora.controller.lineage import Lineage, base_chain
from dora.errors import RunFailed
from dora.transport.messages import MicroBatch, empty_micro_batch

BASE = "b" * 32


def batch(step: int = 0, index: int = 0, *, last: bool = True, seed: int = 0) -> MicroBatch:
    """Two trajectories of three tokens."""
    rng = np.random.default_rng(seed)
    return msgspec.structs.replace(
        empty_micro_batch(step=step, index=index, last=last, group_size=2),
        tokens=rng.integers(0, 99, 6, np.int32),
        loss_mask=np.array([0, 1, 1, 0, 1, 1], np.uint8),
        behavior_logprobs=rng.random(6, np.float32),
        lengths=np.array([3, 3], np.int32),
        trajectories=np.array([4, 5], np.int64),
        groups=np.array([2, 2], np.int64),
        versions=np.array([step, step], np.int32),
        rewards=np.array([0.0, 1.0], np.float32),
        group_rewards=np.array([[0.0, 1.0]] * 2, np.float32),
        truncated=np.array([0, 1], np.uint8),
        sources=np.array([0, 2], np.uint8),
        rewards_to_go=np.zeros((2, 2, 3), np.float32),
    )


def chain_of(waves: Sequence[list[MicroBatch]], *, base: str = BASE, settings: bytes = b"lr=1") -> str:
    """After steps of these waves."""
    lineage = Lineage(base=base, settings=settings, trained={})
    return [lineage.add(wave) for wave in waves][-1][0].chain


def test_a_chain_is_a_digest_of_the_chain_before_the_settings_and_the_waves() -> None:
    known = chain_of([[batch()]])
    assert len(known) == 32
    assert chain_of([[batch()]]) == known
    assert chain_of([[batch()]], base="c" * 32) != known
    assert chain_of([[batch()]], settings=b"lr=2") != known
    assert chain_of([[batch(seed=1)]]) != known
    assert chain_of([[batch(), batch()]]) != known
    assert chain_of([[batch(last=False)], [batch(index=1)]]) != known


def test_a_chain_is_a_digest_of_the_waves_of_its_step_from_the_first() -> None:
    one, other = ([[batch(last=False, seed=seed)], [batch(index=1)]] for seed in (1, 2))
    assert chain_of(one) != chain_of(other)


def test_every_field_of_a_wave_is_in_the_chain() -> None:
    known = chain_of([[batch()]])
    for name in MicroBatch.__struct_fields__:
        if name in ("parent", "chain", "step", "index", "last"):
            continue  # filled in by the lineage, or what orders it
        value: Any = np.array(getattr(batch(), name))
        if value.size:
            value.flat[-1] += 1
        else:
            value = np.ones([1] * value.ndim, value.dtype)
        assert chain_of([[msgspec.structs.replace(batch(), **{name: value})]]) != known, name


def test_a_later_step_follows_from_all_before_it() -> None:
    first, second = [batch()], [batch(1, seed=1)]
    lineage = Lineage(base=BASE, settings=b"", trained={})
    (one,), (two,) = lineage.add(first), lineage.add(second)
    assert (one.parent, two.parent) == (BASE, one.chain)
    assert (lineage.before(1), lineage.after(1)) == (one.chain, two.chain)
    assert chain_of([[batch(seed=9)], second], settings=b"") != two.chain


def test_every_wave_names_the_chain_before_its_step_and_the_last_one_the_chain_with_it() -> None:
    lineage = Lineage(base=BASE, settings=b"", trained={})
    first = lineage.add([batch(last=False), batch(last=False)])
    last = lineage.add([batch(index=1), batch(index=1)])
    assert [(b.parent, b.chain) for b in first] == [(BASE, "")] * 2
    assert [b.parent for b in last] == [BASE] * 2
    assert {b.chain for b in last} == {lineage.after(0)}


def test_training_a_step_again_on_different_data_ends_the_run() -> None:
    known = chain_of([[batch()]], settings=b"")
    Lineage(base=BASE, settings=b"", trained={0: known}).add([batch()])
    with pytest.raises(RunFailed, match="step 1 would be trained again on different data"):
        Lineage(base=BASE, settings=b"", trained={0: known}).add([batch(seed=1)])
    with pytest.raises(RunFailed, match="step 8 cannot be trained: the chain of step 7 is unknown"):
        Lineage(base=BASE, settings=b"", trained={}).before(7)


def test_the_chain_before_step_0_is_a_digest_of_the_model() -> None:
    assert base_chain("a model") != base_chain("another")
    assert base_chain("a model") == hashlib.blake2b(b"dora a model", digest_size=16).hexdigest()
