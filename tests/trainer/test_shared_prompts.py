"""Sequences that share their prompt in a row: equal to each alone, in log-probs and all gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import SETTINGS, VOCAB, Answer, in_history, make_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dora.trainer import attention
from dora.trainer.logprobs import logprobs
from dora.trainer.meshes import make_mesh
from dora.trainer.model import Policy
from dora.trainer.packing import SHARE_ABOVE, Layout, PromptTokens, make_row, prompts_of, split_passes
from dora.trainer.step import Trainer
from dora.transport.messages import Configure, StepDone
from tests.families import make_model
from tests.trainer.publishing import Unpublished, make_saver

CPU = torch.device("cpu")
SHARED = Layout(share_above=SHARE_ABOVE["on"])
Families = Sequence[tuple[int, Sequence[int]]]  #: the length of each prompt, and those of its responses

CASES: dict[str, Families] = {
    "one sibling": [(7, [5])],
    "prompt of one token": [(1, [4, 6, 2])],
    "an empty answer": [(5, [0, 3, 8]), (4, [0, 0, 1])],
    "unequal answers": [(20, [1, 40, 7])],
    "families and sequences alone": [(9, [3, 25]), (2, [5]), (1, [1, 1, 12]), (33, [6, 2, 9]), (4, [17])],
}
TRANSFORMERS = ("qwen3", "gemma2", "gemma3_text", "gpt_oss", "mixtral", "mistral", "cohere2")


@pytest.fixture(autouse=True, scope="module")
def _in_float64() -> Iterator[None]:
    """Models in float64 compute all of it in float64: transformers casts to float32 in norms, softmax and routers."""
    to, softmax = torch.Tensor.to, torch.nn.functional.softmax

    def kept(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        is_wide = tensor.dtype == torch.float64 and torch.float32 in (*args, *kwargs.values())
        return tensor if is_wide else to(tensor, *args, **kwargs)

    def as_given(tensor: Tensor, dim: int = -1, dtype: Any = None, **_: Any) -> Tensor:
        return softmax(tensor, dim, dtype=torch.promote_types(tensor.dtype, dtype or tensor.dtype))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "to", kept)
        patch.setattr(torch.Tensor, "float", lambda tensor: kept(tensor, torch.float32))
        patch.setattr(torch.nn.functional, "softmax", as_given)
        yield


def draw(families: Families, *, shuffled: bool = True) -> tuple[list[np.ndarray], list[int]]:
    """Random sequences, siblings apart from each other, and the lengths of their prompts."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 97, length) for length, _ in families]
    drawn = [
        (np.concatenate([prompt, rng.integers(0, 97, n)]), len(prompt))
        for prompt, (_, responses) in zip(prompts, families, strict=True)
        for n in responses
    ]
    order = rng.permutation(len(drawn)) if shuffled else range(len(drawn))
    return [drawn[i][0] for i in order], [drawn[i][1] for i in order]


def row_of(sequences: Sequence[np.ndarray], prompts: Sequence[int], layout: Layout) -> Any:
    lengths = [len(tokens) for tokens in sequences]
    mask = [np.arange(n) >= prompt for n, prompt in zip(lengths, prompts, strict=True)]
    trained = np.concatenate(mask).nonzero()[0]
    return make_row(np.concatenate(sequences), lengths=lengths, trained=trained, layout=layout, device=CPU)


def gradient(model: Any, found_P: Tensor) -> Tensor:
    """Of the log-probs, each with another weight, for all parameters."""
    model.zero_grad()
    weight_P = torch.linspace(-1.0, 1.0, len(found_P), dtype=found_P.dtype)
    (found_P * weight_P).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def alone(model: Any, sequences: Sequence[np.ndarray], prompts: Sequence[int]) -> Tensor:
    """Log-probs of all responses by transformers' own attention, one sequence at a time."""
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")  # the other kernels have no float64
    parts = []
    for tokens, prompt in zip(sequences, prompts, strict=True):
        tokens_T = torch.from_numpy(tokens)
        logits_TV = model(input_ids=tokens_T[None], use_cache=False).logits[0]
        parts.append(logits_TV[:-1].log_softmax(-1).gather(-1, tokens_T[1:, None])[prompt - 1 :, 0])
    return torch.cat(parts)


def assert_equal(model: Any, families: Families, *, error: float) -> None:
    sequences, prompts = draw(families)
    expected_P = alone(model, sequences, prompts)
    expected = gradient(model, expected_P)
    model.set_attn_implementation(attention.NAME)
    found_P = logprobs(model, row_of(sequences, prompts, SHARED), temperature=1.0)[0]
    torch.testing.assert_close(found_P, expected_P, rtol=0, atol=error)
    assert float((gradient(model, found_P) - expected).norm()) <= error * float(expected.norm())


# -- layout -----------------------------------------------------------------------------------------------------------


def test_a_row_has_each_prompt_once_and_the_targets_in_the_order_of_the_sequences() -> None:
    sequences = [np.array(tokens) for tokens in ([7, 8, 9, 1, 2], [5, 6], [7, 8, 9, 3], [7, 8, 9])]
    row = row_of(sequences, [3, 1, 3, 3], SHARED)
    assert row.tokens_BT.tolist() == [[7, 8, 9, 1, 2, 3, 5, 6]]
    assert row.positions_BT.tolist() == [[0, 1, 2, 3, 4, 3, 0, 1]]
    assert (row.lengths, row.prompts) == ((3, 2, 1, 2), (-1, 0, 0, -1))
    assert row.targets_P.tolist() == [1, 2, 6, 3]
    assert row.predictors_P.tolist() == [2, 3, 6, 2], "the first token of every response comes from the prompt's last"
    assert row.uses_BT.tolist() == [[3, 3, 3, 1, 1, 1, 1, 1]], "of the shared tokens by three sequences"
    assert row.num_padding == 0


def test_prompts_are_shared_where_that_saves_enough() -> None:
    prompt = PromptTokens(100, b"")
    auto = Layout(share_above=SHARE_ABOVE["auto"])
    assert auto.shared([340] * 8, prompt) == 100, "1.34 times fewer tokens"
    assert auto.shared([760] * 8, prompt) == 0, "1.13 times"
    assert SHARED.shared([760] * 8, prompt) == 100
    assert Layout().shared([101] * 8, prompt) == SHARED.shared([340], prompt) == 0


def test_siblings_are_kept_in_one_pass_which_counts_their_prompt_once() -> None:
    sequences, prompts = draw([(50, [10] * 4), (50, [10] * 4), (2, [20])])
    lengths = [len(tokens) for tokens in sequences]
    mask = np.concatenate([np.arange(n) >= prompt for n, prompt in zip(lengths, prompts, strict=True)])
    found = prompts_of(np.concatenate(sequences), lengths=lengths, trained=mask.nonzero()[0])
    assert [prompt.length for prompt in found] == prompts

    def sizes(layout: Layout, budget: int) -> list[list[int]]:
        passes = split_passes(lengths, prompts=found, layout=layout, budget=budget)
        return [[lengths[n] for n in members] for members in passes]

    first = lengths.index(22)
    small, large = [22], [60] * 4
    assert sorted(map(sorted, sizes(SHARED, 112))) == sorted([small + large, large])
    assert sorted(map(sorted, sizes(SHARED, 90))) == sorted([small, large, large])
    assert sorted(map(sorted, sizes(SHARED, 79))) == sorted([small, [60] * 2, [60] * 2, [60] * 2, [60] * 2])
    assert len(sizes(replace(SHARED, share_above=SHARE_ABOVE["off"]), 120)) == 5
    long = sizes(replace(SHARED, rope_limit=59), 1000)
    assert long == [[lengths[first]], [60] * 8], "long sequences have passes of their own, and share in them"


SHAPES = st.lists(st.tuples(st.integers(1, 24), st.lists(st.integers(0, 24), min_size=1, max_size=4)), max_size=5)


@settings(deadline=None, max_examples=60)
@given(SHAPES.filter(bool), st.sampled_from(["auto", "on", "off"]), st.integers(20, 120))
def test_passes_keep_the_budget_and_every_token(families: Families, wanted: Any, budget: int) -> None:
    sequences, prompts = draw(families)
    lengths = [len(tokens) for tokens in sequences]
    layout = Layout(share_above=SHARE_ABOVE[wanted])
    found = [PromptTokens(n, tokens[:n].tobytes()) for tokens, n in zip(sequences, prompts, strict=True)]
    passes = split_passes(lengths, prompts=found, layout=layout, budget=budget)
    assert sorted(n for members in passes for n in members) == list(range(len(sequences)))
    for members in passes:
        row = row_of([sequences[n] for n in members], [prompts[n] for n in members], layout)
        assert row.tokens_BT.numel() == sum(row.lengths) <= budget or len(members) == 1
        assert row.targets_P.tolist() == [token for n in members for token in sequences[n][prompts[n] :]]
        predictors = [token for n in members for token in sequences[n][prompts[n] - 1 : -1]]
        assert row.tokens_BT[0, row.predictors_P].tolist() == predictors


# -- equality ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_shared_prompts_equal_each_sequence_alone(case: str) -> None:
    assert_equal(make_model("qwen3", dtype=torch.float64), CASES[case], error=1e-10)
    assert_equal(make_model("qwen3", dtype=torch.float32), CASES[case], error=1e-5)


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_windows_caps_sinks_and_experts_are_exact_too(family: str) -> None:
    # Windows are of 16 tokens, so that some end in a prompt.
    assert_equal(make_model(family, dtype=torch.float64), CASES["families and sequences alone"], error=1e-10)


@pytest.fixture(scope="module")
def windowed() -> Any:
    return make_model("gemma2", dtype=torch.float64, num_hidden_layers=2)


@settings(deadline=None, max_examples=15)
@given(SHAPES.filter(lambda families: any(sum(responses) for _, responses in families)))
def test_any_families_of_any_lengths_equal_each_sequence_alone(windowed: Any, families: Families) -> None:
    assert_equal(windowed, families, error=1e-10)


# -- a step -----------------------------------------------------------------------------------------------------------


class End:
    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def send(self, message: object) -> None:
        if isinstance(message, StepDone):
            self.metrics = message.metrics


def stepped(
    folder: Path, model_path: Path, layout: Layout, waves: Sequence[Sequence[Answer]]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The weights and the metrics of a step whose micro-batches are `waves`."""
    policy = Policy(model_path, mesh=make_mesh("cpu"), dtype=torch.float32)
    order = Configure(
        run_id="test", model_path=str(model_path), settings=msgspec.structs.replace(SETTINGS, micro_batch_tokens=150),
        memory_root=str(folder), durable_root=str(folder), checkpoints=str(folder), resume_from=(),
        may_start_over=False, chain="0" * 32, epoch=0, fence=str(folder / "epoch"),
    )  # fmt: skip
    end = End()
    trainer = Trainer(order, end=end, policy=policy, layout=layout, publisher=Unpublished(), saver=make_saver(order))
    for index, answers in enumerate(waves):
        trainer.train(in_history(make_batch(answers, step=0, index=index, last=index == len(waves) - 1)))
    return {name: shard.clone() for name, shard in policy.shards().items()}, end.metrics


@pytest.fixture
def _single_rank() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_single_rank")
@pytest.mark.parametrize("scattered", [False, True], ids=["siblings together", "siblings in different waves"])
def test_a_step_with_shared_prompts_ends_with_the_same_weights(
    tmp_path: Path, model_path: Path, scattered: bool
) -> None:
    rng = np.random.default_rng(3)
    answers = []
    for group, length in enumerate((30, 1, 17, 30)):
        prompt, rewards = rng.integers(0, VOCAB, length).tolist(), [0.0, 1.0, 0.5, 1.0]
        for sibling in range(4):
            response = rng.integers(0, VOCAB, 1 + 9 * sibling).tolist()
            logprobs_P = (-np.log(VOCAB) + rng.normal(0, 0.5, len(response))).tolist()
            answers.append(Answer(group, sibling, 0, prompt + response, length, logprobs_P, rewards))
    if scattered:
        answers = [answers[i] for i in rng.permutation(len(answers))]
    waves = [answers[:5], answers[5:6], [], answers[6:]]
    plain, shared = (stepped(tmp_path, model_path, layout, waves)[0] for layout in (Layout(), SHARED))
    policy = Policy(model_path, mesh=make_mesh("cpu"), dtype=torch.float32)
    before, left, right = (
        torch.cat([tensors[name].flatten().double() for name in plain]) for tensors in (policy.shards(), plain, shared)
    )
    assert float((left - before).norm()) > 1e-3 * float(before.norm())
    assert float((left - right).norm()) <= 1e-5 * float(before.norm())


@pytest.mark.usefixtures("_single_rank")
@pytest.mark.parametrize(
    ("layout", "useful", "padding"),
    [(Layout(), 20 / 50, 0), (SHARED, 20 / 30, 0), (Layout(padded=True), 20 / 54, 4 / 54)],
    ids=["packed", "shared", "padded"],
)
def test_shares_of_positions_are_of_those_that_a_pass_computes(
    tmp_path: Path, model_path: Path, layout: Layout, useful: float, padding: float
) -> None:
    """Siblings with 10 tokens of a prompt and 4, 8 and 8 of their own; a micro-batch without any computes nothing."""
    answers = [
        Answer(0, sibling, 0, [1] * 10 + [2 + sibling] * n, 10, [-3.0] * n, [0.0, 1.0, 0.5, 1.0])
        for sibling, n in enumerate((4, 8, 8))
    ]
    metrics = stepped(tmp_path, model_path, layout, [answers, []])[1]
    assert (metrics["step_tokens"], metrics["all/tokens"]) == (50, 20)
    assert metrics["useful_frac"] == pytest.approx(useful)
    assert metrics["padding_frac"] == pytest.approx(padding)
