"""Packed rows: equal to separate sequences, independent of masked positions, and checked before they are trained."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from conftest import GROUP_SIZE, VOCAB, make_batch, make_groups
from transformers import Qwen3ForCausalLM

from dora.errors import ConfigError, InvariantViolation, ProtocolError
from dora.objectives.advantages import group_advantages
from dora.objectives.objective import Objective
from dora.objectives.settings import ObjectiveConfig
from dora.trainer import attention
from dora.trainer.batch import advantages_of, check, pack, turns_of, without_truncated
from dora.trainer.logprobs import logprobs
from dora.trainer.packing import PACKED, Layout, split_passes
from dora.trainer.score import score

CPU = torch.device("cpu")
OBJECTIVE = Objective(ObjectiveConfig(weight_high=1.5), longest=100)


def plain_logprobs(network, tokens, prompt_length, temperature):
    """One sequence by itself, with transformers' own attention."""
    logits = network(input_ids=torch.tensor([tokens])).logits[0] / temperature
    return logits.log_softmax(-1)[range(prompt_length - 1, len(tokens) - 1), tokens[prompt_length:]]


def load(path, implementation):
    return Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation=implementation).eval()


def pack_whole(batch):
    """The whole micro-batch in one packed row."""
    return pack_some(batch, range(len(batch.lengths)))


def pack_some(batch, members, *, layout=PACKED):
    advantages = group_advantages(batch.rewards, batch.group_rewards, kind="grpo")[:, None]
    return pack(batch, members, advantages_nU=advantages, layout=layout, device=CPU)


def loss_of(network, row, targets, old=None):
    """Σ l over the trained tokens of a row; `old`: the network before the step, in an update after the first."""
    current, entropy = logprobs(network, row, temperature=0.7)
    proximal = logprobs(old, row, temperature=0.7)[0] if old is not None else None
    tokens = targets.tokens(current, entropy_P=entropy, proximal_P=proximal)
    return OBJECTIVE(replace(tokens, advantage_P=tokens.advantage_P.double())).loss_P.sum()


def packed_loss(network, batches, old=None):
    """Σ l over all trained tokens, micro-batch by micro-batch."""
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        row, targets = pack_whole(batch)
        total = total + loss_of(network, row, targets, old)
    return total


def gradient(network, batches, old=None):
    network.zero_grad()
    packed_loss(network, batches, old).backward()
    return torch.cat([p.grad.flatten() for p in network.parameters()])


@pytest.fixture(params=["first", "later"])
def old(request, model_path):
    """The network before the step: None in its first update, else other weights than those being trained."""
    if request.param == "first":
        return None
    network = load(model_path, attention.NAME)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return network


def test_a_packed_row_has_the_logprobs_of_its_sequences_alone(model_path):
    answers = make_groups(5, version=0, seed=3)
    row, _ = pack_whole(make_batch(answers, step=0, index=0, last=True))
    packed, entropy = logprobs(load(model_path, attention.NAME), row, temperature=0.7)
    plain = load(model_path, "sdpa")
    alone = torch.cat([plain_logprobs(plain, a.tokens, a.prompt_length, 0.7) for a in answers])
    torch.testing.assert_close(packed, alone, atol=1e-11, rtol=0)
    assert (entropy > 0).all()
    assert not entropy.requires_grad


def test_the_gradient_does_not_depend_on_order_split_or_empty_micro_batches(model_path, old):
    network = load(model_path, attention.NAME)
    answers = make_groups(6, version=0, seed=4)
    whole = gradient(network, [make_batch(answers, step=0, index=0, last=True)], old)
    shuffled = [answers[i] for i in np.random.default_rng(0).permutation(len(answers))]
    parts = [shuffled[:1], [], shuffled[1:10], shuffled[10:]]
    split = gradient(network, [make_batch(part, step=0, index=0, last=False) for part in parts], old)
    torch.testing.assert_close(split, whole, rtol=0, atol=1e-11 * whole.abs().max().item())


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("budget", [1, 30, 1000])
def test_the_gradient_does_not_depend_on_the_passes(model_path, old, padded, budget):
    network = load(model_path, attention.NAME)
    batch = make_batch(make_groups(5, version=0, seed=9), step=0, index=0, last=True)
    whole = gradient(network, [batch], old)
    network.zero_grad()
    passes = split_passes(batch.lengths.tolist(), layout=Layout(padded=padded), budget=budget)
    for members in passes:
        row, targets = pack_some(batch, members, layout=Layout(padded=padded))
        assert row.tokens_BT.numel() <= budget or len(members) == 1
        loss_of(network, row, targets, old).backward()
    assert sorted(n for members in passes for n in members) == list(range(len(batch.lengths)))
    split = torch.cat([p.grad.flatten() for p in network.parameters()])
    torch.testing.assert_close(split, whole, rtol=0, atol=1e-11 * whole.abs().max().item())


def test_padded_passes_have_similar_lengths_and_long_sequences_passes_of_their_own():
    lengths = [90, 3, 10, 100, 120, 4, 200]
    assert split_passes(lengths, layout=Layout(padded=True), budget=400) == [[1, 5, 2], [0, 3, 4], [6]]
    assert split_passes(lengths, layout=Layout(padded=True), budget=300) == [[1, 5, 2], [0, 3], [4], [6]]
    assert split_passes(lengths, layout=Layout(rope_limit=99), budget=1000) == [[0, 1, 2, 5], [3, 4, 6]]


@pytest.mark.parametrize("layout", [Layout(), Layout(padded=True), Layout(share_above=1.0)])
def test_sequences_of_one_owner_are_in_one_pass_whatever_the_budget(layout):
    lengths, owners = [9, 30, 4, 90, 9, 9, 7], [0, 1, 1, 1, 2, 3, 3]
    passes = split_passes(lengths, owners=owners, layout=layout, budget=20)
    assert sorted(n for members in passes for n in members) == list(range(7))
    assert [1, 2, 3] in passes
    assert any({5, 6} <= set(members) for members in passes)
    for members in passes:
        assert sum(lengths[n] for n in members) <= 20 or members == [1, 2, 3]


def test_an_owner_with_long_and_short_sequences_is_refused_where_they_are_computed_apart():
    assert split_passes([9, 30], owners=[0, 1], layout=Layout(rope_limit=20), budget=99) == [[0], [1]]
    with pytest.raises(ConfigError, match="rows of more and of fewer than 20 tokens"):
        split_passes([9, 30], owners=[0, 0], layout=Layout(rope_limit=20), budget=99)


def test_turns_are_counted_over_all_rows_of_a_trajectory():
    batch = make_batch(make_groups(1, version=0, seed=9)[:3], step=0, index=0, last=True)
    mask = np.array([0, 1, 1, 0, 1, 0, 0, 1, 0, 1, 0, 0, 1, 0, 1], np.uint8)
    batch = msgspec.structs.replace(
        batch, loss_mask=mask, lengths=np.array([6, 5, 4], np.int32), trajectories=np.array([4, 4, 7])
    )
    assert turns_of(batch)[mask == 1].tolist() == [0, 0, 1, 2, 3, 0, 1]
    assert turns_of(make_batch([], step=0, index=0, last=True)).tolist() == []


def test_advantages_of_turns_are_those_of_what_is_left_among_the_siblings():
    """The one that ended after its first turn takes part with it; the one that could not be graded does not."""
    batch = make_batch(make_groups(1, version=0, seed=9)[:4], step=0, index=0, last=True)
    rewards = [[1.0], [0.5, 0.0, 0.5], [0.0, 1.0], None]
    to_go = [[np.nan] * 3 if r is None else [sum(r[min(t, len(r) - 1) :]) for t in range(3)] for r in rewards]
    whole = np.array([to_go] * 4, np.float32)
    batch = msgspec.structs.replace(
        batch,
        trajectories=np.array([0, 1, 2, 0]) + 100 * 4,
        group_rewards=whole[:, :, 0],
        rewards=whole[0, [0, 1, 2, 0], 0],
        rewards_to_go=whole,
    )
    found = advantages_of(batch, ("dr_grpo",), to_go=True)
    assert found.shape == (4, 3)
    for turn in range(3):
        left = [sum(r[min(turn, len(r) - 1) :]) for r in rewards if r is not None]
        np.testing.assert_allclose(found[:3, turn], np.array(left) - sum(left) / 3, atol=1e-7)
    np.testing.assert_array_equal(advantages_of(batch, ("grpo",)), advantages_of(batch, ("grpo",), to_go=True)[:, :1])


@pytest.mark.parametrize("poison", [np.nan, -np.inf])
def test_values_at_masked_positions_have_no_effect(model_path, poison):
    network = load(model_path, attention.NAME)
    batch = make_batch(make_groups(3, version=0, seed=6), step=0, index=0, last=True)
    poisoned = np.where(batch.loss_mask == 1, batch.behavior_logprobs, np.float32(poison))
    clean = np.where(batch.loss_mask == 1, batch.behavior_logprobs, np.float32(0))
    left, right = (
        gradient(network, [msgspec.structs.replace(batch, behavior_logprobs=logprobs)])
        for logprobs in (poisoned, clean)
    )
    assert left.isfinite().all()
    torch.testing.assert_close(left, right, rtol=0, atol=0)


def test_an_empty_micro_batch_has_a_zero_gradient_for_every_parameter(model_path):
    network = load(model_path, attention.NAME)
    assert (gradient(network, [make_batch([], step=0, index=0, last=True)]) == 0).all()


def test_an_answer_that_is_not_trained_still_counts_in_the_statistics_of_its_group():
    batch = make_batch(make_groups(2, version=0, seed=9), step=0, index=0, last=True)
    batch = msgspec.structs.replace(batch, truncated=(np.arange(len(batch.lengths)) == 1).astype(np.uint8))
    masked = without_truncated(batch)
    _, targets = pack_whole(masked)
    assert targets.lengths_n[1] == 0
    kept = np.repeat(np.arange(len(batch.lengths)) != 1, batch.lengths)
    np.testing.assert_array_equal(masked.loss_mask, np.where(kept, batch.loss_mask, 0))
    np.testing.assert_array_equal(advantages_of(masked, ("grpo",)), advantages_of(batch, ("grpo",)))


def test_the_kind_of_advantage_may_differ_by_source():
    batch = make_batch(make_groups(3, version=0, seed=9), step=0, index=0, last=True)
    sources = np.repeat([1, 0, 1], GROUP_SIZE).astype(np.uint8)
    found = advantages_of(msgspec.structs.replace(batch, sources=sources), ("rloo", "dr_grpo"))
    rloo, dr_grpo = advantages_of(batch, ("rloo",)), advantages_of(batch, ("dr_grpo",))
    np.testing.assert_array_equal(found, np.where(sources[:, None] == 0, rloo, dr_grpo))
    with pytest.raises(ProtocolError, match="a prompt of source 3"):
        advantages_of(msgspec.structs.replace(batch, sources=sources + np.uint8(2)), ("rloo", "dr_grpo"))


def good_batch(**changes):
    return msgspec.structs.replace(make_batch(make_groups(1, version=3, seed=7), step=4, index=0, last=True), **changes)


@pytest.mark.parametrize("step", [2, 6])
def test_staleness_beyond_its_bound_is_a_c3_violation_that_names_the_group(step):
    batch = msgspec.structs.replace(good_batch(), step=step)
    with pytest.raises(InvariantViolation, match=f"C3: group 700 of version 3 was committed to step {step + 1} "):
        check(batch, max_staleness=2, vocab_size=VOCAB)
    for legal in (3, 4, 5):
        check(msgspec.structs.replace(batch, step=legal), max_staleness=2, vocab_size=VOCAB)


def test_a_micro_batch_that_contradicts_itself_is_refused():
    batch = good_batch()
    first_trained = np.flatnonzero(batch.loss_mask)[0]
    nameless = batch.behavior_logprobs.copy()
    nameless[first_trained] = np.nan
    for changes, match in [
        ({"tokens": batch.tokens + VOCAB}, "outside the vocabulary"),
        ({"lengths": batch.lengths + 1}, "do not add up"),
        ({"rewards": batch.rewards[1:]}, "columns of different length"),
        ({"trajectories": batch.trajectories[[0, 1, 2, 0]]}, "sequences of one trajectory are not side by side"),
        ({"rewards_to_go": np.zeros((1, GROUP_SIZE, 2), np.float32)}, "rewards to go that do not fit"),
        ({"loss_mask": batch.loss_mask[1:]}, "columns of different length"),
        ({"loss_mask": np.ones_like(batch.loss_mask)}, "first token"),
        ({"behavior_logprobs": nameless}, "1 trained tokens without a log-prob"),
    ]:
        with pytest.raises(ProtocolError, match=match):
            check(good_batch(**changes), max_staleness=2, vocab_size=VOCAB)


def test_scores_are_the_logprobs_of_the_responses(model_path):
    answers = make_groups(3, version=0, seed=8)
    scores = score(
        model_path,
        [a.tokens for a in answers],
        prompt_lengths=[a.prompt_length for a in answers],
        temperature=0.7,
        dtype="float64",
    )
    plain = load(model_path, "sdpa")
    for answer, values in zip(answers, scores, strict=True):
        expected = plain_logprobs(plain, answer.tokens, answer.prompt_length, 0.7).detach().numpy()
        np.testing.assert_allclose(values, expected, atol=1e-6)
